"""What stays on disk of a run, and reading it back: one format each, one reader for all who look.

Enters: events of the run and rows of its Workers; later, a run folder, whoever made it.
Leaves: run_folder.py's files: metrics/, samples, trace/, flow/ (events/), record/, checkpoint/; and
reader/, by which page, top, runs, report and Prometheus look, so that they say the same.
Waits: a checkpoint's writers for the disk, nobody else. What keeps nothing is not here.
"""
