"""What a run reports: outcomes, counts, errors, and the values that are written."""
