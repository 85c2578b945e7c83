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
from collections.abc import Sequence
from dataclasses import replace

from dataflow.adapters import Lora
from engine.plan.cost.memory import FIRST_USE_PART, lasting, peak
from engine.plan.cost.process_memory import (
    ADAPTERS,
    FIRST_USE,
    FORKED_FILES,
    OPENED,
    READS,
    SCATTERED,
    SCATTERED_BESIDE,
    ImportedMemory,
    ProcessMemory,
)
from engine.plan.draft import Draft
from engine.plan.estimates import PlannedProcess
from engine.plan.kernel_needs import find_model
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import nodes_by_worker

_Template = tuple[str, int]
"""Host and threads."""


def estimate_processes(draft: Draft) -> Draft:
    """Fill in the process of each Worker that is on a host without GPUs."""
    hosts = set(draft.hosts.values()) or {""}
    if all(draft.cluster.on(host).gpus for host in hosts):
        return replace(draft, processes={})
    nodes_on_cpu: dict[str, list[PlannedNode]] = {}
    for worker, nodes in nodes_by_worker(draft.nodes).items():
        if not draft.cluster.on(draft.host_of(worker)).gpus:
            nodes_on_cpu[worker] = nodes
    templates = {w: _find_template(draft, w, nodes) for w, nodes in nodes_on_cpu.items()}
    worker_counts = Counter(templates.values())
    with_torch = {templates[w] for w, nodes in nodes_on_cpu.items() if _has_torch(nodes)}
    sizes = draft.profile.process if draft.profile is not None else ProcessMemory()
    processes: dict[str, PlannedProcess] = {}
    for worker, nodes in nodes_on_cpu.items():
        template = templates[worker]
        # A process with an environment of its own is not forked: the template's is another.
        if worker_counts[template] > 1 and worker not in draft.environments:
            # A template imports what any of its Workers needs.
            imports = _imports(sizes, has_torch=template in with_torch)
            imported = imports.anonymous + FORKED_FILES
            template_name = f"{template[0]}/{template[1]}"
        else:
            imports = _imports(sizes, has_torch=_has_torch(nodes))
            imported = imports.anonymous + imports.files
            template_name = ""
        processes[worker] = PlannedProcess(
            imported=imported, used=_count_used(draft, nodes), template=template_name
        )
    return replace(draft, processes=processes)


def _imports(sizes: ProcessMemory, *, has_torch: bool) -> ImportedMemory:
    return sizes.torch if has_torch else sizes.plain


def _find_template(draft: Draft, worker: str, nodes: Sequence[PlannedNode]) -> _Template:
    return draft.host_of(worker), max(node.layout.threads for node in nodes)


def _has_torch(nodes: Sequence[PlannedNode]) -> bool:
    return any(node.kernel.startswith("operators.kernels.torch") for node in nodes)


def _count_used(draft: Draft, nodes: Sequence[PlannedNode]) -> int:
    """Bytes that come as the process works, beside what its nodes hold."""
    size = OPENED
    if any(node.work == "source" for node in nodes):
        size += READS
    adapted_nodes = [node for node in nodes if _has_adapter(draft, node)]
    if adapted_nodes:
        size += ADAPTERS
    is_measured = any(FIRST_USE_PART in node.estimate.bytes for node in nodes)
    if _has_torch(nodes) and not is_measured:
        parts = [node.estimate.bytes for node in nodes]
        passing = peak(parts) - sum(map(lasting, parts))
        trains_adapter = any(node.work == "train" for node in adapted_nodes)
        scattered = SCATTERED_BESIDE if trains_adapter else SCATTERED
        size += FIRST_USE + math.ceil(scattered * passing)
    return size


def _has_adapter(draft: Draft, node: PlannedNode) -> bool:
    """Whether a node computes with a Model that has an adapter of PEFT."""
    model = find_model(draft, node)
    return model is not None and isinstance(model.adapter, Lora)
