"""Facts about the connection, its driver and its errors, for all stages."""
