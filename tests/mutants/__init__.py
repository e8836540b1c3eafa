"""One-line faults, each with the tests that have to find it."""
