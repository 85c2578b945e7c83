"""What flows through a running graph: figures of nodes, edges and Workers, folded per Step.

Owns: their types (records.py), their files (segments.py), and how they are made of a run's events.
Does not own: metrics (engine/keep/metrics/step_accounts.py), nor anything that shows the figures.
"""
