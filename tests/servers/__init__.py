"""Servers that the suite starts for itself: private, and gone when it ends."""
