"""A process that must not outlive the one that started it.

Owns: tying it to that one. Does not own: what either does. It imports the standard library alone,
so that it is called before the first slow import: from a cold disk that of pyarrow takes seconds,
in which a process whose starter has died would go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """On Linux: kill this process when the thread that started it ends. Ends it if `parent` is no
    longer its parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        print("ended: the process of the run is gone", file=sys.stderr, flush=True)
        os._exit(1)
