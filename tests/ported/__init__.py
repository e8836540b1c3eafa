"""Loops of the field: each as it is written by hand, and as a processor.

``by_hand`` has the loops with the features that their descriptions name, ``as_processor`` the same
as processors. The tests run both on the same rows, and compare what they did, and their lengths.
"""
