"""What the tests of the contract share: rows, processors, clocks, sessions, questions."""
