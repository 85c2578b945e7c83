"""What a run's records take from the coordinator, as events do not say it: its cuts and progress.

Owns: the looks at it, and the records of cuts. Does not own: who asks when (fold.py), how the
coordinator counts (engine/coordinator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.keep.flow.records import CutFlow
from engine.plan.plan import PlannedNode
from engine.protocol.progress import RunProgress, no_progress

CutCounts = Mapping[str, tuple[int, int, int, int]]
Cuts = Callable[[], CutCounts]
"""By source: prompts that are ready, that a Step takes, that are outstanding, that may be. Called
from two threads.
"""


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """The coordinator as it was at one moment."""

    cuts: CutCounts
    progress: RunProgress


@dataclass(frozen=True, slots=True)
class CoordinatorLooks:
    """Whom to ask. Both are called from two threads."""

    cuts: Cuts
    progress: Callable[[], RunProgress] = no_progress

    def look(self) -> CoordinatorState:
        """Ask now."""
        return CoordinatorState(self.cuts(), self.progress())


def cut_flows(
    cuts: CutCounts, lags: Mapping[str, list[int]], nodes: Iterable[PlannedNode]
) -> dict[str, CutFlow]:
    """By source. lags: by train node, its rows by lag."""
    by_source: dict[str, list[int]] = {}
    for node in nodes:
        if node.name in lags:
            by_source.setdefault(node.source, lags[node.name])
    flows: dict[str, CutFlow] = {}
    for name, counts in cuts.items():
        ready, wanted, outstanding, room = counts
        lags_of_source = by_source.get(name, [])
        flows[name] = CutFlow(
            ready=ready,
            wanted=wanted,
            outstanding=outstanding,
            room=room,
            lags=lags_of_source,
        )
    return flows
