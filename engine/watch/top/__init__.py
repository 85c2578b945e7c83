"""`dataflow top`: what a run does, in a terminal; the twin of the page of `dataflow watch`.

Owns: what is read of a run folder for it, its text, its keys. Does not own: any figure of a run
(engine/keep). Nothing here writes to a run folder.
"""
