"""Rows in keys, handled by eight processes, and audited by a log that is only appended to.

``python -m tests.keys`` (``make keys``) runs it and prints what the audit found.
"""
