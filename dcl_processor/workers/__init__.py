"""Who runs a run: copies in processes of their own, the signals that stop them, and the watch."""
