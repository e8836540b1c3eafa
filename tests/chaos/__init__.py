"""Rows handled by eight processes while a monkey does to them what a year of production does.

``python -m tests.chaos`` (``make chaos``) runs it and prints what the audit says.
"""
