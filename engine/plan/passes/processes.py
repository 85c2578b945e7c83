"""What the process of each Worker takes, beside its nodes.

Owns: which imports a Worker's process has, and whether it shares them. Does not own: their sizes
(engine/plan/cost/process_memory.py), how processes are started (engine/run/launch/starter.py).

Workers of a host with as many threads are forked from one template, which imports what all of them
need; one without another like it has an interpreter of its own, as has the only one of a run. On
hosts with GPUs nothing is counted: what a CUDA context takes of the host is not known.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from engine.plan.cost.memory import FIRST_USE_PART, lasting, peak
from engine.plan.cost.process_memory import (
    FIRST_USE,
    FORKED_FILES,
    OPENED,
    READS,
    SCATTERED,
    ProcessMemory,
)
from engine.plan.draft import Draft
from engine.plan.estimates import PlannedProcess
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import nodes_by_worker

_Template = tuple[str, int]
"""Host and threads."""


def processes(draft: Draft) -> Draft:
    """Fill in the process of each Worker that is on a host without GPUs."""
    on = nodes_by_worker(draft.nodes)
    here = {w: nodes for w, nodes in on.items() if not draft.cluster.on(draft.host_of(w)).gpus}
    sizes = draft.profile.process if draft.profile is not None else ProcessMemory()
    templates = {worker: _template(draft, worker, nodes) for worker, nodes in here.items()}
    alike = Counter(templates.values())
    with_torch = {templates[w] for w, nodes in here.items() if any(map(_has_torch, nodes))}
    made: dict[str, PlannedProcess] = {}
    for worker, nodes in here.items():
        template = templates[worker]
        forked = alike[template] > 1 and worker not in draft.environments
        has_torch = template in with_torch if forked else any(map(_has_torch, nodes))
        imported = sizes.torch if has_torch else sizes.plain
        made[worker] = PlannedProcess(
            imported=imported.anonymous + (FORKED_FILES if forked else imported.files),
            used=_used(nodes),
            template=f"{template[0]}/{template[1]}" if forked else "",
        )
    return replace(draft, processes=made)


def _template(draft: Draft, worker: str, nodes: list[PlannedNode]) -> _Template:
    return draft.host_of(worker), max(node.layout.threads for node in nodes)


def _has_torch(node: PlannedNode) -> bool:
    return node.kernel.startswith("operators.kernels.torch")


def _used(nodes: list[PlannedNode]) -> int:
    size = OPENED
    if any(node.work == "source" for node in nodes):
        size += READS
    measured = any(FIRST_USE_PART in node.estimate.bytes for node in nodes)
    if any(map(_has_torch, nodes)) and not measured:
        parts = [node.estimate.bytes for node in nodes]
        passing = peak(parts) - sum(map(lasting, parts))
        size += FIRST_USE + math.ceil(SCATTERED * passing)
    return size
