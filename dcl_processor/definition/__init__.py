"""What the user writes, and what is found wrong with it at once."""
