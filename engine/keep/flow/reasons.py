"""Why a node has no task: what its place in the graph says while certain other nodes run.

    while                                     a node without a task waits for
    a node above it runs                      rows, of the nearest ones that do
    none does, and it is in the stream        room: those that run have the prompts, its own other
                                              replicas too
    none does, and it is in the step region   rows, of whatever runs
    nothing runs, or it only evaluates        nothing

Owns: these rules. Does not own: how long anything ran (activity.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from engine.keep.flow.activity import Running
from engine.plan.plan import Plan, PlannedNode

Kind = Literal["for_rows", "for_room", "idle"]
_REMEMBERED = 4096
"""Sets of running nodes whose reasons are kept: a run has few."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a node waits for, and the nodes (or `node@worker`) that share the blame."""

    kind: Kind
    blamed: tuple[str, ...] = ()


class Waits:
    """Seconds without a task, by kind, and who is blamed for how many."""

    def __init__(self) -> None:
        self.kinds: dict[str, float] = defaultdict(float)
        self.blames: dict[str, float] = defaultdict(float)

    def add(self, reason: Reason, seconds: float) -> None:
        """Count so many seconds more."""
        self.kinds[reason.kind] += seconds
        for name in reason.blamed:
            self.blames[name] += seconds / len(reason.blamed)


class Reasons:
    """Finds why the nodes of a plan wait."""

    def __init__(self, plan: Plan) -> None:
        self._nodes = {node.name: node for node in plan.nodes}
        self._above = {node.name: _above(node) for node in plan.nodes}
        self._found: dict[Running, dict[str, Reason]] = {}

    def of(self, node: str, running: Running) -> Reason:
        """Why this node has no task."""
        known = self._found.get(running)
        if known is None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            known = self._found[running] = {}
        if node not in known:
            known[node] = self._reason(self._nodes[node], running)
        return known[node]

    def without_task(self, node: str, states: Mapping[Running, float], left: float) -> Waits:
        """What a replica waited for in the `left` seconds of a stretch in which it had no task:
        first those in which its node ran nowhere, then those in which it ran elsewhere. states: the
        stretch, by what ran.
        """
        waits = Waits()
        here = {state: s for state, s in states.items() if node not in state.nodes}
        elsewhere = {state: s for state, s in states.items() if node in state.nodes}
        for part in (here, elsewhere):
            whole = sum(part.values())
            seconds_of_part = min(left, whole)
            if seconds_of_part <= 0:
                continue
            left -= seconds_of_part
            for state, seconds in part.items():
                waits.add(self.of(node, state), seconds * seconds_of_part / whole)
        waits.kinds["idle"] += max(0.0, left)
        return waits

    def _reason(self, node: PlannedNode, running: Running) -> Reason:
        active, alone = frozenset(running.nodes), dict(running.alone)
        if node.region == "evaluation":
            return Reason("idle")
        nearest = self._nearest(node.name, active)
        if nearest:
            return Reason("for_rows", _name_nodes(nearest, alone))
        if not running.nodes:
            return Reason("idle")
        if node.region == "stream":
            kind = "for_room"
        else:
            kind = "for_rows"
        return Reason(kind, _name_nodes(running.nodes, alone))

    def _nearest(self, node: str, active: frozenset[str]) -> list[str]:
        """The first running nodes on the ways up."""
        level, seen = list(self._above[node]), {node}
        while level:
            active_names = [name for name in level if name in active]
            if active_names:
                return active_names
            seen.update(level)
            above = chain.from_iterable(self._above[name] for name in level)
            level = [name for name in dict.fromkeys(above) if name not in seen]
        return []


def _above(node: PlannedNode) -> tuple[str, ...]:
    above = list(node.gates)
    for port in node.inputs:
        above += [fetch.producer for fetch in port.fetches]
    return tuple(dict.fromkeys(above))


def _name_nodes(nodes: Iterable[str], alone: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}@{alone[name]}" if name in alone else name for name in nodes)
