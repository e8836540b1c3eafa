"""Worker processes (copies): their supervisor, their start, and the signals that stop them."""
