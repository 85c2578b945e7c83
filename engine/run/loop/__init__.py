"""Between coordinator and Workers: carries instructions and events, and ends a run well.

Enters: events of Workers, signals, requests of users. Leaves: instructions, checkpoints, an end.
Waits: for the next event (loop.py); a watchdog beside it ends a run in which nothing moves.
"""
