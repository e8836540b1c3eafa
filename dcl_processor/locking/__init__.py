"""Stage 2: lock the rows, and check them again."""
