"""Looking into a run folder, whoever made it: nothing is written, nothing leads out of it.

Enters: an open folder (open_folder.py). Leaves: in which state a run is (run_state.py) and how far
(run_summary.py), its metrics, samples, flows and plan, indexed as they grow. Waits: nobody; for
several threads.
"""
