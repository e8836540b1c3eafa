"""Every order of things in which copies can meet, tried on the real database."""
