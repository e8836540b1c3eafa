"""Worker processes: their supervisor, their start, and the signals that stop them."""
