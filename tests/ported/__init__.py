"""Loops of the field as processors: a shape for each row of the page of loops."""
