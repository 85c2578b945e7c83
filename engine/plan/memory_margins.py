"""What memory that ran out has taught of a node: how much more it needs than the formulas say.

    margin    bytes that its Worker had at most, less those that last, over those that the plan has
              of what passes while the node runs; 1 where the plan has as many
    limits    what it takes at once since, where it stands as it stood then

Owns: these values, the margin's formula, how a node stands. Does not own: when memory ran out, and
by how much limits are lowered (engine/coordinator/memory_limits.py), the file that keeps them
(engine/keep/memory_file.py), the passes that count with them (passes/correct.py, passes/limit.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataflow.memory_limits import MemoryLimits
from engine.plan.cost.memory import HOST_PARTS, lasting
from engine.plan.plan import Decisions, PlannedNode
from engine.plan.worker_peaks import process_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Of a node whose memory ran out in a run. limits: what it takes at once since, where it stands
    like this. margin: as the module says, at least 1.
    """

    limits: MemoryLimits
    stand: str
    margin: float = 1.0


RunMemory = Mapping[str, NodeMemory]
"""Of each node whose memory ran out."""


def describe_stand(decided: Decisions, node: PlannedNode) -> str:
    """How a node is split, and which nodes are in its Workers: where it is the same, it needs as
    much memory for as many rows.
    """
    layout = node.layout
    splits = (layout.replicas, layout.data, layout.tensor, layout.context)
    mates: dict[str, None] = {}
    for worker in node.workers:
        mates |= dict.fromkeys(other.name for other in decided.nodes_on(worker))
    kinds = {worker in decided.devices for worker in node.workers}
    on_gpu = "gpu" if kinds == {True} else "cpu"
    return f"{'x'.join(map(str, splits))} {on_gpu} {layout.offload} {','.join(sorted(mates))}"


def measure_margin(decided: Decisions, node: PlannedNode, worker: str, peak: int) -> float:
    """How much more a node needs than its estimate says, as its Worker had so many bytes at most
    when memory ran out under the limits of the plan. An estimate that has a margin counts with it.
    peak: 0 where nobody measured it.
    """
    without = HOST_PARTS if worker in decided.devices else ()
    lasting_bytes = process_bytes(decided, worker)
    for other in decided.nodes_on(worker):
        lasting_bytes += lasting(other.estimate.bytes, without=without)
    whole = sum(size for part, size in node.estimate.bytes.items() if part not in without)
    passing_bytes = whole - lasting(node.estimate.bytes, without=without)
    if passing_bytes <= 0:
        return 1.0
    before = decided.margins.get(node.name, 1.0)
    return max(1.0, before, before * (peak - lasting_bytes) / passing_bytes)
