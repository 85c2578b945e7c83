"""Decides what a run does next. Pure: events in, instructions out, with no clock and no socket.

Enters: each event that a Worker sent (engine/protocol/messages.py), one at a time, with its time.
Leaves: instructions, in the order in which they are to be sent.
Waits: for nothing itself; what it waits for is in the ledger (task_ledger.py) until it is answered.
Begin with coordinator.py. Whoever drives it (engine/run/loop) may be real, simulated, or a test.
"""
