"""A Worker: runs its kernels one after another on the rows that it is told to take.

Enters: instructions, rows and weights of others. Leaves: rows that it keeps for others, reports.
Waits: for its next instruction, then for the rows or weights that it names. Begin with worker.py.
"""
