"""Statements that are compiled once, and executed for one row after another.

To build a query and compile it takes Django longer than it takes the database to answer. The
statements of a window differ in nothing but the row's key and the values that are written, so
these are left open, and filled in for each row. What is sent, and what is made of the answer, is
what Django would send and make of it, but for a pair of parentheses.
"""
