"""The engine: lanes that deliver rows."""
