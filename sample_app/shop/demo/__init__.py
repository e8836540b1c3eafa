"""Races of several workers of one processor, with audits of what servers and tables received."""
