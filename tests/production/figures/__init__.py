"""Measure the figures on the page "Going to production".

python -m tests.production.figures [NAME…]

Each is a ratio of two things that are done in turn, several times over, on one PostgreSQL: the
embedded one, in a database of its own that is dropped afterwards. Medians are printed.
"""
