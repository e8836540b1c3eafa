"""Every order of things in which workers can meet, tried on the real database."""
