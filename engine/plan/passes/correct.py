"""Peak bytes by what was measured, by a profile or as memory ran out, where there is any.

Owns: how a correction, which is of one kernel alone in its process, counts in a Worker that has
several nodes. Does not own: the formulas (engine/plan/cost/memory.py), fitting
(engine/predict/profile).

A profile says of the peak of a kernel's parts `base + factor x parts`. What passes is multiplied.
The rest, which stays with the process, is a part of its own, `libraries`. Nodes of one Worker share
its libraries: they count once, at the most that one of its nodes needs. What a run has learned of a
node whose memory ran out (engine/plan/memory_margins.py) is multiplied in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from engine.plan.cost.memory import FIRST_USE_PART, LASTING
from engine.plan.cost.profile import PeakCorrection
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode

_OF_MODEL = ("weights", "own_weights", "merged", "optimizer")
"""Lasting parts of a kernel that a profile measures with the rest."""


def correct_peaks(draft: Draft) -> Draft:
    """Correct the bytes of each node whose Model and kind of pass were measured, or whose memory
    ran out in the run that goes on.
    """
    if draft.profile is not None:
        draft = _correct_by_profile(draft)
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        if node.name in draft.margins:
            nodes[index] = _multiply_passing(node, draft.margins[node.name])
    return replace(draft, nodes=tuple(nodes))


def _correct_by_profile(draft: Draft) -> Draft:
    costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile)
    corrections: dict[str, PeakCorrection] = {}
    for node in draft.nodes:
        if node.traits.computes and (correction := costs.peak(node.name)) is not None:
            corrections[node.name] = correction
    libraries = dict(_find_libraries(draft, corrections))
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        if node.name in corrections:
            library_bytes = libraries.get(node.name, 0)
            nodes[index] = _correct_node(node, corrections[node.name], library_bytes)
    return replace(draft, nodes=tuple(nodes))


def _correct_node(node: PlannedNode, correction: PeakCorrection, library_bytes: int) -> PlannedNode:
    node = _multiply_passing(node, correction.factor)
    if not library_bytes:
        return node
    parts = {**node.estimate.bytes, FIRST_USE_PART: library_bytes}
    return replace(node, estimate=replace(node.estimate, bytes=parts))


def _multiply_passing(node: PlannedNode, factor: float) -> PlannedNode:
    """The node with so many times the bytes of what passes."""
    parts = dict(node.estimate.bytes)
    for part, size in parts.items():
        if part not in LASTING:
            parts[part] = math.ceil(factor * size)
    return replace(node, estimate=replace(node.estimate, bytes=parts))


def _find_libraries(
    draft: Draft, corrections: Mapping[str, PeakCorrection]
) -> Iterator[tuple[str, int]]:
    """Find the bytes that stay with a process, by the first of the nodes that share its Workers."""
    counted_workers: set[str] = set()
    measured_nodes = [node for node in draft.nodes if node.name in corrections]
    for node in measured_nodes:
        if set(node.workers) <= counted_workers:
            continue
        counted_workers.update(node.workers)
        most = 0
        for other in measured_nodes:
            if not set(other.workers).isdisjoint(node.workers):
                most = max(most, _lasting_bytes(other, corrections[other.name]))
        yield node.name, most


def _lasting_bytes(node: PlannedNode, correction: PeakCorrection) -> int:
    """What stays with the process of a kernel after its pass."""
    model_bytes = sum(node.estimate.bytes.get(part, 0) for part in _OF_MODEL)
    return math.ceil(correction.base + (correction.factor - 1.0) * model_bytes)
