"""Seconds of a plan's nodes, edges and weights, at the greatest lengths, but for prompts that were
counted in the data.

Owns: which rows are assumed, and notes on whose rates count. Does not own: the formulas
(engine/plan/cost), where they are applied (engine/plan/costs.py), bytes (estimate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Time
from engine.plan.cost.models import ModelCost
from engine.plan.costs import PlanCosts, RowLengths
from engine.plan.draft import Draft
from engine.plan.estimates import Estimate
from engine.plan.plan import PlannedEdge, PlannedModel, PlannedNode

_WAVES = 4
"""Fillings of the slots that a schedule of equal rows is worked out for; more are as many more."""

WorkOf = Callable[[PlannedNode], Mapping[str, Work]]
"""What one replica (of a train node, one rank) does in a Step, by row set."""


def timed(draft: Draft, models: Mapping[str, ModelCost], work: WorkOf) -> Draft:
    """Fill in the seconds."""
    costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, models)
    seconds = _Seconds(costs, draft, work)
    nodes = tuple(replace(n, estimate=seconds.node(n)) for n in draft.nodes)
    edges = tuple(replace(e, seconds=seconds.edge(e)) for e in draft.edges)
    known = tuple(replace(m, seconds=seconds.weights(m)) for m in draft.models)
    notes = (*draft.notes, *seconds.notes())
    return replace(draft, nodes=nodes, edges=edges, models=known, notes=notes)


class _Seconds:
    """Of each part of a draft."""

    def __init__(self, costs: PlanCosts, draft: Draft, work: WorkOf) -> None:
        self._costs, self._draft, self._work = costs, draft, work
        self._planned = {n.name: n for n in draft.nodes}
        self._batches = {s.name: s.batch for s in draft.sources}

    def node(self, node: PlannedNode) -> Estimate:
        """Its estimate with seconds; without, where they are unknown: users' functions that nobody
        has measured, evaluations, Models and GPUs of which nothing is known.
        """
        if node.region == "evaluation" or node.work == "evaluate":
            return node.estimate
        if node.traits.computes:
            if self._costs.unpriced(node.name):
                return node.estimate
            time, origin = self._passes(node), self._costs.origin(node.name)
            return replace(node.estimate, seconds=time.seconds, bound=time.bound, origin=origin)
        rows = -(-self._batches.get(node.source, 0) * node.rows // node.layout.replicas)
        seconds = self._costs.function(node.name, rows)
        origin = "fitted" if self._costs.measured_function(node.name) else "catalogue"
        return replace(node.estimate, seconds=seconds, origin=origin)

    def _passes(self, node: PlannedNode) -> Time:
        """Of one replica; of a train node, of one rank, with the whole Step."""
        work = self._work(node)
        if node.work == "train":
            ranks = node.layout.data
            return self._costs.train(node.name, {n: _longest(w, ranks) for n, w in work.items()})
        (one,) = work.values()
        if not node.traits.generates:
            return self._costs.forward(node.name, _longest(one, node.layout.data))
        few = min(one.rows, _WAVES * node.layout.slots)
        return self._costs.decode(node.name, _longest(one, rows=few)).time.times(
            one.rows / max(1, few)
        )

    def edge(self, edge: PlannedEdge) -> float | None:
        """Of what a Step moves along an edge, between all of both nodes' Workers at once."""
        made, reads = self._planned[edge.producer].workers, self._planned[edge.consumer].workers
        pairs = min(len(made), len(reads))
        return self._costs.rows(edge.bytes / pairs, made[0], reads[-1]).seconds

    def weights(self, model: PlannedModel) -> float | None:
        """Until the readers in other Workers have a version, all at once."""
        if not model.writer or self._costs.unpriced(model.writer):
            return None
        writer = self._planned[model.writer].workers[0]
        far = {w: r for r in model.copied for w in self._planned[r].workers if w != writer}
        if not far or any(map(self._costs.unpriced, set(far.values()))):
            return None
        slowest = max(far, key=lambda w: self._costs.link(writer, w).delay)
        return self._costs.weights(model, slowest, len(far)).seconds

    def notes(self) -> Iterator[str]:
        """What has no known rate, though its Model is known; and what a profile does not tell, or
        tells of a busy machine.
        """
        load, fix = self._costs.load, "(dataflow profile measures it)"
        if load is not None and not load.quiet:
            yield load.note
        for node in self._draft.nodes:
            if not self._costs.sizes(node.name):
                continue
            if why := self._costs.unpriced(node.name):
                yield f"{node.name}: no seconds are predicted: {why} {fix}"
            elif self._costs.outside_profile(node.name):
                yield f"{node.name}: not in the profile: seconds by the catalogue {fix}"


def _longest(work: Work, ranks: int = 1, rows: int = 0) -> RowLengths:
    """Rows of so many ranks (rows: as many as that), with the greatest lengths; prompts and
    answers that were counted in the data have their lengths.
    """
    rows, lengths = (rows or work.rows) * ranks, work.lengths
    answers = np.full(rows, max(1, lengths.completion), np.int64)
    if lengths.counts is None:
        return RowLengths(np.full(rows, lengths.prompt, np.int64), answers)
    samples = max(1, work.rows // max(1, work.prompts))
    counted = LengthDistribution(lengths.counts.prompts)
    prompts = np.repeat(counted.spread(-(-rows // samples)), samples)[:rows]
    if lengths.counts.answers is not None:
        answers = LengthDistribution(lengths.counts.answers).spread(rows)
    return RowLengths(prompts, answers)
