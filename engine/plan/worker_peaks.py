"""The most memory of Workers' processes: what they are, and what their nodes need.

Owns: the sums. Does not own: any part of them (passes/estimate.py, passes/processes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.plan.cost.memory import peak
from engine.plan.plan import Decisions, PlannedNode


def process_bytes(decided: Decisions, worker: str) -> int:
    """Bytes of a Worker's process beside its nodes; 0 on a host with GPUs."""
    process = decided.processes.get(worker)
    return 0 if process is None else process.total


def worker_peak(decided: Decisions, worker: str, nodes: Sequence[PlannedNode]) -> int:
    """The most resident bytes of a Worker with these nodes, on a host without GPUs."""
    parts: list[Mapping[str, int]] = [node.estimate.bytes for node in nodes]
    return process_bytes(decided, worker) + peak(parts)


def shared_process_bytes(decided: Decisions, workers: Iterable[str]) -> int:
    """Add up the processes of one host's Workers: what a template has imported is there once
    for all that are forked from it.
    """
    total = 0
    templates: dict[str, int] = {}
    for worker in workers:
        process = decided.processes.get(worker)
        if process is None:
            continue
        total += process.used
        if process.template:
            templates[process.template] = process.imported
        else:
            total += process.imported
    return total + sum(templates.values())
