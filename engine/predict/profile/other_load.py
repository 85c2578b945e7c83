"""How much of the machine others have meanwhile.

Owns: two measures of it, and the refusal of what they make worthless. Does not own: what counts as
too much (engine/plan/cost/machine_load.py), what is repeated (kernel_timing.py, profiler.py).

`CoreWaits` tells what others took from this very process: the time that its threads were ready to
run and waited for a core (proc(5), schedstat). It is exact for calls of milliseconds. A process
cannot tell it of children that have ended, so that of a run of the graph `Others` counts what the
machine's processors did for nobody here; that is exact for seconds. The load average of the
operating system would count what ended a minute ago, a run before a profile for example.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from dataflow.errors import RunError
from engine.plan.cost.machine_load import MOST, MOST_OF_CPU

BUSY = 0.5
"""Cores beyond those to spare from which others are taken to disturb a run of the graph."""
_STAT = Path("/proc/stat")
_TASKS = Path("/proc/self/task")
_RESTING = (3, 4)
"""Of a processor's times those in which it did nothing, idle and iowait (proc(5))."""
_TIMES = 8
"""After them come those of guests, which are in the first ones already."""


@dataclass(slots=True)
class Others:
    """From its making on. This process and its children that have ended are not others."""

    _begun: float = field(default_factory=lambda: time.monotonic())
    _all: float = field(default_factory=lambda: _all_seconds())
    _ours: float = field(default_factory=lambda: _our_seconds())

    def cores(self) -> float:
        """How many they used in the mean, 0 or more."""
        seconds = (_all_seconds() - self._all) - (_our_seconds() - self._ours)
        return max(0.0, seconds / (time.monotonic() - self._begun))


def disturbs(cores: float) -> bool:
    """Whether others who use so many cores leave fewer than this process may use."""
    return cores > _spare_cores(len(os.sched_getaffinity(0))) + BUSY


def taken_share(cores: float, wanted: int) -> float:
    """The share of the wanted cores that others have, if they use so many of the machine's."""
    return min(1.0, max(0.0, cores - _spare_cores(wanted)) / wanted)


def _spare_cores(wanted: int) -> int:
    return (os.cpu_count() or 1) - wanted


def _all_seconds() -> float:
    """Seconds that all processors of the machine worked since it was started."""
    first_line, _, _ = _STAT.read_text(encoding="ascii").partition("\n")
    # Its first word is `cpu`.
    times = first_line.split()[1 : 1 + _TIMES]
    ticks = sum(int(time) for place, time in enumerate(times) if place not in _RESTING)
    return ticks / os.sysconf("SC_CLK_TCK")


def _our_seconds() -> float:
    """Seconds of this process and its ended children, as users and in the system."""
    times = os.times()
    return sum(times[:4])


@dataclass(frozen=True, slots=True)
class CoreWaits:
    """Seconds that the threads of this process ran, and that they waited for a core."""

    ran: float = 0.0
    waited: float = 0.0

    def __add__(self, other: CoreWaits) -> CoreWaits:
        return CoreWaits(self.ran + other.ran, self.waited + other.waited)

    def since(self, before: CoreWaits) -> CoreWaits:
        """What came on top. A thread that has ended took its seconds with it."""
        return CoreWaits(max(0.0, self.ran - before.ran), max(0.0, self.waited - before.waited))

    @property
    def share(self) -> float:
        """The share that others had of the cores that the threads wanted."""
        wanted = self.ran + self.waited
        if not wanted:
            return 0.0
        return self.waited / wanted


def read_core_waits() -> CoreWaits:
    """Read what all threads of this process ran and waited since they began. Nothing is known of a
    thread that ends meanwhile, nor on a system without this file: there only `Others` tells of
    others.
    """
    ran = waited = 0
    for task in _TASKS.iterdir():
        try:
            task_ran, task_waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            # It has ended since the folder was listed.
            continue
        ran += int(task_ran)
        waited += int(task_waited)
    return CoreWaits(ran * 1e-9, waited * 1e-9)


def refuse_worthless(what: str, share: float, *, by_cpu: bool, accept: bool) -> None:
    """Refuse seconds of `what` where others had more of the cores that it wanted than they can
    bear. by_cpu: they are CPU seconds. Raises RunError.
    """
    most = MOST_OF_CPU if by_cpu else MOST
    if share <= most or accept:
        return
    problem = f"expected others to have at most {100 * most:.0f} % of the cores that it wants"
    effect = "what it takes now says nothing of this machine, and no profile is written"
    fix = "stop what else runs here (top lists it), or keep such seconds: --busy accept"
    raise RunError(f"profile: {what}: {problem}, found {100 * share:.0f} %; {effect}. Fix: {fix}.")
