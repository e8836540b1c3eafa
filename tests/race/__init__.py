"""What a held row holds up, and the memory of long runs."""
