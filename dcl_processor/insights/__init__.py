"""Answers about the rows of a processor, for the command and for other interfaces: read-only."""
