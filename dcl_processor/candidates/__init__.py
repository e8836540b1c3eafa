"""Stage 1: which rows to try, read without a lock."""
