"""Torture: signals, failing disks, bad rewards, data and models, forged run folders.

Whatever happens to it, a run ends with one clear line, loses nothing that it called safe, shows
no traceback and leaves no process. Each part has `torture(short, seed) -> list[CaseResult]`.
"""
