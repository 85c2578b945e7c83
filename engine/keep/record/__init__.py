"""Rows and assignments of a run, recorded so that parts of it can be run again.

Enters: rows as Workers make them (recorder.py), what they were told (assignments.py). Leaves: the
folder recorded/, and both read back (stored_*.py). Waits: a Worker for its last rows to be written.
"""
