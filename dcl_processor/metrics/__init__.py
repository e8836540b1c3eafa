"""What is counted and measured while rows are handled; imported only when it is asked for."""
