"""Graphs that are wrong, one fault a function; the golden files say how each is refused.

Messages name lines of these files: change a file only at its end, or write the golden files anew.
"""
