"""Worker processes (copies), the signals that stop them, and the watch."""
