"""Stage 3: the handler, and the code around each call of it."""
