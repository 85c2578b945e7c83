"""What flows through a running graph: figures of nodes, edges and Workers, folded per Step.

Enters: the run's events, as they happen (fold.py). Leaves: records (records.py) in the files of the
folder events/ (segments.py), and the stretch of time that stands for a run. Waits: nobody.
"""
