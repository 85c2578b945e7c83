"""Workers that compute nothing: a test double of the other rooms of engine/run.

Enters: the same instructions as real ones get. Leaves: the same events, after the simulated time
that somebody says (kernel_times.py), with faults if asked. Waits: the clock jumps to what is next.
"""
