"""A run's state at a Step's boundary: what a checkpoint is made of, and who may resume from it.

Enters: folders with the state of kernels, and the cut of all rows (cut.py). Leaves: folders step_N,
whole or absent (store.py), and what has changed since (provenance.py). Waits: for the disk alone.
"""
