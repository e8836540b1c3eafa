"""Stage 2: lock the rows, and ask again."""
