"""How much of a cohort each replica of a node gets, so that unlike ones end together.

    priced      the plan's loads, by the prices of their devices (engine/plan/passes/loads.py)
    measured    these until every replica has ended a chunk; then so that each replica's seconds
                for a token, as measured, times what it gets are the same

Owns: seconds of a token of each replica, and what follows from them. Does not own: the cut
(tables.py, units.py), who runs which chunk (dispatch.py), the plan's division
(engine/plan/passes/loads.py).

Of the same events the same loads follow; but times differ from run to run, and with other chunks
the last bits of a batched product do. So nothing is measured unless that was asked for. What a row
draws depends on its key alone, whoever has it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.coordinator.chunk import NodeChunk
from engine.plan.plan import Plan, PlannedNode
from engine.plan.replica_ranges import elastic_nodes

FindLoads = Callable[[PlannedNode], tuple[int, ...]]
"""As `ReplicaLoads.of_chunks`."""
SMOOTHING = 0.5
"""The share of the last chunk in the mean of a replica's seconds: as in engine/coordinator/
relayout_policy.py, more of it, as a chunk is a whole Step's rows.
"""
_UNITS = 1000
"""The load of the fastest."""


class ReplicaLoads:
    """Of a plan. measures: whether what chunks take counts."""

    def __init__(self, plan: Plan, *, measures: bool = False) -> None:
        self._seconds: dict[str, dict[str, float]] = {}
        """Node -> lead -> seconds of a token, measured."""
        elastic_names = {node.name for node in elastic_nodes(plan)}
        for node in plan.nodes:
            if measures and _divides(node) and node.name not in elastic_names:
                self._seconds[node.name] = {}

    def of_chunks(self, node: PlannedNode) -> tuple[int, ...]:
        """How much of a cohort each chunk of a node is to have, in proportion, those of one replica
        after another; empty where all have as much.
        """
        seconds = self._seconds.get(node.name, {})
        if len(seconds) < len(node.leads):
            return node.chunk_loads
        fastest = min(seconds.values())
        # All end together where loads are as rates. Who got nothing would never be measured again.
        loads = [max(1, round(_UNITS * fastest / seconds[lead])) for lead in node.leads]
        times = node.chunks // len(loads)
        return tuple(load for load in loads for _ in range(times))

    def note_end(self, chunk: NodeChunk, worker: str, seconds: float) -> None:
        """A replica has ended a chunk in so many seconds; 0: nobody has measured it."""
        measured = self._seconds.get(chunk.node.name)
        if measured is None or seconds <= 0 or chunk.written <= 0:
            return
        of_token = seconds / chunk.written
        before = measured.get(worker, of_token)
        measured[worker] = before + SMOOTHING * (of_token - before)


def _divides(node: PlannedNode) -> bool:
    """Whether the chunks of a node can be cut for its replicas."""
    count = len(node.leads)
    is_cut = node.work != "train" and node.scope != "batch" and not node.binds_late
    return is_cut and count > 1 and node.chunks % count == 0


def planned_loads(node: PlannedNode) -> tuple[int, ...]:
    """As the plan has them."""
    return node.chunk_loads


def lead_of_chunk(node: PlannedNode, number: int, chunks: int) -> str:
    """The replica for which a chunk was cut, by its number among so many."""
    return node.leads[number * len(node.leads) // chunks]
