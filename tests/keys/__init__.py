"""Rows in keys, handled by several processes, and audited by a log that is only appended to."""
