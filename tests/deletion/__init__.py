"""Deletes each part of the edge from a copy of the tree, and runs what is left."""
