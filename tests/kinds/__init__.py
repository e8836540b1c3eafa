"""One table for each kind of instance, and one whose columns get other types."""
