"""Seconds of a plan's nodes, edges and weights, at the greatest lengths, but for prompts that were
counted in the data.

Owns: which rows are assumed, and notes on whose rates count. Does not own: the formulas
(engine/plan/cost), where they are applied (engine/plan/costs.py), bytes (estimate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Time
from engine.plan.cost.models import ModelCost
from engine.plan.cost.transfers import count_rounds
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.estimates import Estimate
from engine.plan.host_regions import list_regions
from engine.plan.plan import PlannedModel, PlannedNode
from engine.plan.planned_parts import PlannedEdge
from engine.plan.replica_price import list_parts
from engine.plan.row_lengths import RowLengths
from engine.plan.run_limits import FAN_OUT

_WAVES = 4
"""Fillings of the slots that a schedule of equal rows is worked out for; more are as many more."""

WorkOf = Callable[[PlannedNode], Mapping[str, Work]]
"""What one replica (of a train node, one rank) does in a Step, by row set."""


def add_seconds(draft: Draft, models: Mapping[str, ModelCost], work: WorkOf) -> Draft:
    """Fill in the seconds of nodes, edges and weights."""
    costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, models)
    seconds = _Seconds(costs, draft, work)
    nodes = [replace(node, estimate=seconds.estimate_node(node)) for node in draft.nodes]
    edges = [replace(edge, seconds=seconds.time_edge(edge)) for edge in draft.edges]
    timed_models = [replace(m, seconds=seconds.time_weights(m)) for m in draft.models]
    return replace(
        draft,
        nodes=tuple(nodes),
        edges=tuple(edges),
        models=tuple(timed_models),
        notes=(*draft.notes, *seconds.describe_rates()),
    )


def time_nodes(
    draft: Draft, models: Mapping[str, ModelCost], work: WorkOf, names: Container[str]
) -> Draft:
    """Fill in the seconds of some nodes."""
    costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, models)
    seconds = _Seconds(costs, draft, work)
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        if node.name in names:
            nodes[index] = replace(node, estimate=seconds.estimate_node(node))
    return replace(draft, nodes=tuple(nodes))


class _Seconds:
    """The seconds of each part of a draft."""

    def __init__(self, costs: PlanCosts, draft: Draft, work: WorkOf) -> None:
        self._costs, self._draft, self._work_of = costs, draft, work
        self._planned = {n.name: n for n in draft.nodes}
        self._batches = {s.name: s.batch for s in draft.sources}

    def estimate_node(self, node: PlannedNode) -> Estimate:
        """Add seconds to a node's estimate, where they are known: not of users' functions that
        nobody has measured, of evaluations, nor of Models and GPUs of which nothing is known.
        """
        if node.region == "evaluation" or node.work == "evaluate":
            return node.estimate
        if node.traits.computes:
            if self._costs.unpriced_reason(node.name):
                return node.estimate
            time = self._time_passes(node)
            origin = self._costs.origin(node.name)
            return replace(node.estimate, seconds=time.seconds, bound=time.bound, origin=origin)
        step_rows = self._batches.get(node.source, 0) * node.rows
        rows = -(-step_rows // node.layout.replicas)
        seconds = self._costs.function(node.name, rows)
        origin = "fitted" if self._costs.measured_function(node.name) else "catalogue"
        return replace(node.estimate, seconds=seconds, origin=origin)

    def _time_passes(self, node: PlannedNode) -> Time:
        """Time the passes of the busiest replica in a Step; of a train node, those of one rank."""
        work_by_set = self._work_of(node)
        if self._costs.is_alike(node.name):
            return self._time_part(self._costs, node, work_by_set)
        parts = list_parts(node)
        loads = node.loads or (1,) * len(parts)
        times: list[Time] = []
        for worker, load in zip(parts, loads, strict=True):
            works = {name: _share(work, load, max(loads)) for name, work in work_by_set.items()}
            times.append(self._time_part(self._costs.on(worker), node, works))
        return max(times, key=lambda time: time.seconds)

    def _time_part(
        self, costs: PlanCosts, node: PlannedNode, work_by_set: Mapping[str, Work]
    ) -> Time:
        ranks = node.layout.data
        if node.work == "train":
            rows = {name: _longest_rows(work, ranks) for name, work in work_by_set.items()}
            return costs.train(node.name, rows)
        (work,) = work_by_set.values()
        if not node.traits.generates:
            chunks = -(-node.chunks // node.layout.replicas)
            return costs.forward(node.name, _longest_rows(work, ranks), chunks)
        # A schedule of a few waves is worked out, and counts as often as there are such. Rows of
        # one episode, of which each waits for the one before, share none.
        few = min(work.rows // work.segments, _WAVES * node.layout.slots)
        decoding = costs.decode(node.name, _longest_rows(work, row_count=few))
        return decoding.time.times(work.rows / max(1, few))

    def time_edge(self, edge: PlannedEdge) -> float | None:
        """Time what a Step moves along an edge, between all of both nodes' Workers at once."""
        senders = self._planned[edge.producer].workers
        readers = self._planned[edge.consumer].workers
        pairs = min(len(senders), len(readers))
        return self._costs.rows(edge.bytes / pairs, senders[0], readers[-1]).seconds

    def time_weights(self, model: PlannedModel) -> float | None:
        """Time a version's way to the readers in other Workers: on the writer's host all at once,
        to others once into each region, and by a tree to its hosts, on each of which all have it
        from the first (engine/coordinator/weight_tree.py).
        """
        if not model.writer or self._costs.unpriced_reason(model.writer):
            return None
        writer = self._planned[model.writer].workers[0]
        readers_by_worker: dict[str, str] = {}
        for reader in model.copying_readers:
            readers_by_worker |= dict.fromkeys(self._planned[reader].workers, reader)
        readers_by_worker.pop(writer, None)
        remote_readers = set(readers_by_worker.values())
        if not remote_readers or any(map(self._costs.unpriced_reason, remote_readers)):
            return None
        home = self._draft.host_of(writer)
        firsts = {self._draft.host_of(worker): worker for worker in readers_by_worker}
        firsts.pop(home, None)
        if not firsts or model.route == "collective":
            slowest = max(readers_by_worker, key=lambda w: self._costs.link(writer, w).delay)
            return self._costs.weights(model, slowest, len(readers_by_worker)).seconds
        return self._time_regions(model, writer, firsts)

    def _time_regions(self, model: PlannedModel, writer: str, firsts: Mapping[str, str]) -> float:
        """Time a version's way into each region, and by a tree to its hosts. firsts: a reader's
        Worker on each host.
        """
        home = self._draft.host_of(writer)
        regions = list_regions([home, *firsts], self._draft.cluster)
        readers_by_region: dict[str, list[str]] = {}
        for host, worker in firsts.items():
            readers_by_region.setdefault(regions[host], []).append(worker)
        near = readers_by_region.pop(regions[home], [])
        seconds = [self._time_tree(model, writer, near)]
        entries = [readers[0] for readers in readers_by_region.values()]
        crossing = self._time_tree(model, writer, entries)
        for first, *others in readers_by_region.values():
            seconds.append(crossing + self._time_tree(model, first, others))
        return max(seconds)

    def _time_tree(self, model: PlannedModel, source: str, readers: Sequence[str]) -> float:
        """Time a version's way from a Worker to readers on other hosts, each by the slowest way."""
        if not readers:
            return 0.0
        ways = {worker: self._costs.link(source, worker) for worker in readers}
        slowest = min(readers, key=lambda worker: (ways[worker].rate, -ways[worker].delay))
        at_once = min(len(readers), FAN_OUT)
        one_round = self._costs.weights(model, slowest, at_once, source).seconds
        return count_rounds(len(readers)) * one_round

    def describe_rates(self) -> Iterator[str]:
        """What has no known rate, though its Model is known; and what a profile does not tell, or
        tells of a busy machine.
        """
        load = self._costs.load
        fix = "(dataflow profile measures it)"
        if load is not None and not load.quiet:
            yield load.note
        for node in self._draft.nodes:
            if not self._costs.sizes(node.name):
                continue
            if why := self._costs.unpriced_reason(node.name):
                yield f"{node.name}: no seconds are predicted: {why} {fix}"
            elif self._costs.outside_profile(node.name):
                yield f"{node.name}: not in the profile: seconds by the catalogue {fix}"


def _share(work: Work, load: int, most: int) -> Work:
    """The work of a part that has so much, of the one that has most."""
    return replace(work, prompts=work.prompts * load // most, rows=work.rows * load // most)


def _longest_rows(work: Work, ranks: int = 1, row_count: int = 0) -> RowLengths:
    """Rows of so many ranks (row_count: as many as that), with the greatest lengths; prompts and
    answers that were counted in the data have their lengths.
    """
    rows = (row_count or work.rows) * ranks
    lengths = work.lengths
    answers = np.full(rows, max(1, lengths.completion), np.int64)
    if lengths.counts is None:
        return RowLengths(np.full(rows, lengths.prompt, np.int64), answers)
    samples = max(1, work.rows // work.segments // max(1, work.prompts))
    prompt_count = -(-rows // samples)
    prompt_lengths = LengthDistribution(lengths.counts.prompts).spread(prompt_count)
    prompts = np.repeat(prompt_lengths, samples)[:rows]
    if lengths.counts.answers is not None:
        answers = LengthDistribution(lengths.counts.answers).spread(rows)
    return RowLengths(prompts, answers)
