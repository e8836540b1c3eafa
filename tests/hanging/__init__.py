"""Handlers that do not end, in processes whose supervisor waits for a short time only."""
