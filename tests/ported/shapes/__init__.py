"""The shapes of loops that real projects have: each as a processor, and as a loop by hand.

``table`` lists them, with the rows that they begin with and the result. The modules of ``by_hand``
and ``as_processor`` have the names of the families, and a function with the name of each shape.
"""
