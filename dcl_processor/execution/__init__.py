"""Stage 3: the handler, and what surrounds a call of it."""
