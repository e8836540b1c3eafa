"""What an operator asks of rows, and does with those in doubt or given up."""
