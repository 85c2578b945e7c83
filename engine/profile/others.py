"""How many cores others use of this machine meanwhile.

Owns: the counting. Does not own: what follows from it (profiling.py).

The load average of the operating system would count what ended a minute ago, a run before a profile
for example.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

BUSY = 0.5
"""Cores beyond those to spare from which others are taken to disturb what is measured."""
_STAT = Path("/proc/stat")
_RESTING = (3, 4)
"""Of a processor's times those in which it did nothing, idle and iowait (proc(5))."""
_TIMES = 8
"""After them come those of guests, which are in the first ones already."""


@dataclass(slots=True)
class Others:
    """From its making on. This process and its children that have ended are not others."""

    _begun: float = field(default_factory=lambda: time.monotonic())
    _all: float = field(default_factory=lambda: _all_seconds())
    _own: float = field(default_factory=lambda: _own_seconds())

    def cores(self) -> float:
        """That they used in the mean, 0 or more."""
        taken = (_all_seconds() - self._all) - (_own_seconds() - self._own)
        return max(0.0, taken / (time.monotonic() - self._begun))


def disturbs(cores: float) -> bool:
    """Whether others who use so many cores leave fewer than this process may use."""
    spare = (os.cpu_count() or 1) - len(os.sched_getaffinity(0))
    return cores > spare + BUSY


def _all_seconds() -> float:
    """Of all processors of the machine, since it was started."""
    first = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1 : 1 + _TIMES]
    ticks = sum(int(value) for at, value in enumerate(first) if at not in _RESTING)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return sum(times[:4])
