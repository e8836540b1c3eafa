"""The shapes of loops that real projects have, as processors.

``table`` lists them, with the rows that they begin with and the result. The other modules have the
names of the families, and a function with the name of each shape.
"""
