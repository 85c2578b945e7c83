"""The page of `dataflow watch`, seen from its server: a process of its own that reads run folders.

Owns: what is read of a run folder for the page, its form in JSON, who may ask. Does not own: the
page itself (static/), any file of a run, the run. Nothing here writes.
"""
