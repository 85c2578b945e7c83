"""Host memory of a process that computes on a CPU.

Owns: what the C library does with freed memory. Does not own: memory of a GPU (devices.py), what
kernels hold.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_THRESHOLD, _MOST = -3, 32 << 20
"""Parameters of mallopt(3) and their values: 32 MiB is the greatest that glibc takes."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees in blocks of up to 32 MiB, for its next pass.

    Otherwise glibc gives it back at the end of a pass, and the next one waits for the operating
    system to give and clear the same pages: 10,000 to 40,000 faults a Step of a small Model, a
    tenth of its time. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _MOST)


def return_freed_memory() -> None:
    """Give back what this process has freed so far: weights that another Model of its base has
    already, whose places are too small for what a pass computes. Does nothing with another C
    library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
