"""Statements that are compiled once, and executed for one row after another.

Django takes longer to build and compile a query than the database takes to answer it. The
statements of a window differ only in the row's key and the values that are written, so these are
placeholders, which get their values for each row. The SQL that is sent is Django's, except for a
pair of parentheses, and the answer is processed as Django processes it.
"""
