"""One column for exclusion, order, caps and fair shares: conditions of the question, and locks."""
