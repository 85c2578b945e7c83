"""Torture: signals, failing disks, bad rewards, data and models, forged run folders; one rule for every outcome.

Whatever is done to it, a run ends with one clear line, loses nothing that it said was safe, shows no traceback and
leaves no process behind. Each module but outcome.py and __main__.py is a part; it has
`torture(short, seed) -> list[Outcome]`.
"""
