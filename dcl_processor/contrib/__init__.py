"""Integrations with other packages; each is an extra."""
