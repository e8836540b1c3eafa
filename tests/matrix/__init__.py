"""Faults that the database injects itself, at each kind of statement, with each kind of answer."""
