"""The watch: run after run in one process, and what wakes it."""
