"""Peak bytes by what a profile has measured, where there is one.

Owns: how a correction, which is of one kernel alone in its process, counts in a Worker that has
several nodes. Does not own: the formulas (engine/plan/cost/memory.py), fitting
(engine/predict/profile).

A profile says of the peak of a kernel's parts `base + factor x parts`. What passes is multiplied.
The rest, which stays with the process, is a part of its own, `libraries`. Nodes of one Worker share
its libraries: they count once, at the most that one of its nodes needs.
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

_OF_MODEL = ("weights", "optimizer")
"""Lasting parts of a kernel that a profile measures with the rest."""


def correct(draft: Draft) -> Draft:
    """Correct the bytes of each node whose Model and kind of pass were measured."""
    if draft.profile is None:
        return draft
    costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile)
    computing = (n for n in draft.nodes if n.traits.computes)
    found = {n.name: c for n in computing if (c := costs.peak(n.name)) is not None}
    libraries = dict(_libraries(draft, found))
    nodes = tuple(_corrected(n, found.get(n.name), libraries.get(n.name)) for n in draft.nodes)
    return replace(draft, nodes=nodes)


def _corrected(node: PlannedNode, by: PeakCorrection | None, libraries: int | None) -> PlannedNode:
    if by is None:
        return node
    parts = {
        part: size if part in LASTING else math.ceil(by.factor * size)
        for part, size in node.estimate.bytes.items()
    }
    if libraries:
        parts[FIRST_USE_PART] = libraries
    return replace(node, estimate=replace(node.estimate, bytes=parts))


def _libraries(draft: Draft, found: Mapping[str, PeakCorrection]) -> Iterator[tuple[str, int]]:
    """By node: what stays with a process; of those that share a Worker, the first one's."""
    told: set[str] = set()
    measured = [n for n in draft.nodes if n.name in found]
    for node in measured:
        if set(node.workers) <= told:
            continue
        told.update(node.workers)
        near = [n for n in measured if set(n.workers) & set(node.workers)]
        yield node.name, max(0, max(_stays(n, found[n.name]) for n in near))


def _stays(node: PlannedNode, by: PeakCorrection) -> int:
    held = sum(node.estimate.bytes.get(part, 0) for part in _OF_MODEL)
    return math.ceil(by.base + (by.factor - 1.0) * held)
