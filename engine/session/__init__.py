"""A run from its folder to its end: planned, begun, resumed, started again, told of.

Enters: a graph or a run folder, and options, from the command line or from Python (calls.py).
Leaves: a Result, progress on the screen, the folder as engine/keep defines it.
Waits: for the run's end (attempts.py), or not at all (background_run.py).
"""
