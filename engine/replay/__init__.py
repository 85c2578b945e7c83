"""A recorded run, again: nodes of a Step run once more and compared, bit by bit; runs compared.

Enters: run folders (recorded_run.py). Leaves: what differs, and first where. Waits: for the further
ranks of a node, each in a process of its own (other_ranks.py). Begin with rerun.py.
"""
