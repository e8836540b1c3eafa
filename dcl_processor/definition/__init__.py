"""What the user writes, and the checks of it at definition."""
