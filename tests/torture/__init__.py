"""Torture: signals, failing disks, bad rewards, data and models, forged run folders; one rule for
every outcome.

Whatever is done to it, a run ends with one clear line, loses nothing that it said was safe, shows
no traceback and leaves no process behind. __main__.py names the parts; each is a module with
`torture(short, seed) -> list[CaseResult]`.
"""
