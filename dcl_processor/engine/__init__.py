"""The engine: lanes that deliver rows, and settlements as values that go with the next claim."""
