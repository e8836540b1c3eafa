"""Stage 4: write the outcomes."""
