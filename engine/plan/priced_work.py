"""What the nodes of a plan do in a Step, as their prices need it.

Owns: rows and lengths of a plan's nodes, as distributions. Does not own: prices
(engine/plan/cost/node_price.py), the greatest lengths (engine/plan/lengths.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dataflow.graph import Graph
from dataflow.loss_terms import ROWS
from engine.plan.cost.decode_curve import RowDistributions, unite_distributions
from engine.plan.cost.distribution import LengthDistribution, assumed_answers, constant_length
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.node_price import NodeWork
from engine.plan.plan import Decisions, PlannedNode
from engine.plan.profiled_passes import kernel_family, kind_of_pass, samples_of


@dataclass(frozen=True, slots=True)
class StepLengths:
    """How long prompts and answers are; None: as counted in the data, else as long as the graph
    allows, or, where `assumes_answers` says so, as a guess by the longest.
    """

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None
    assumes_answers: bool = False


ASSUMED = StepLengths(assumes_answers=True)
"""Of a run of which nobody knows how long its answers are."""


class PricedWork:
    """The work of each node of a plan. greatest: of each node, what the graph allows; lengths: what
    is known besides, of the rows that are trained.
    """

    def __init__(
        self,
        decided: Decisions,
        graph: Graph,
        greatest: Mapping[str, Lengths],
        lengths: StepLengths,
    ) -> None:
        self._decided, self._graph = decided, graph
        self._greatest, self._lengths = greatest, lengths
        self._nodes = {node.name: node for node in decided.nodes}
        self._batches = {source.name: source.batch for source in decided.sources}
        self._kept: dict[str, RowDistributions] = {}

    def list_works(self, node: PlannedNode) -> Iterator[NodeWork]:
        """List what a node that computes with a Model does in a Step, by row set."""
        if node.work == "train":
            sources = self._decided.sources_of(node)
            for name, inputs in node.row_sets.items():
                samples = max(self._nodes[each.gate].rows for each in inputs)
                prompts = self._batches[sources[name]]
                updates = int(self._graph.node(node.name).params["minibatches"])
                yield self._make_work(
                    node,
                    inputs[0].gate,
                    prompts=prompts,
                    samples=samples,
                    updates=updates if name == ROWS else 0,
                )
            return
        prompts = self._batches.get(node.source, node.layout.slots)
        if node.traits.generates:
            prompts *= max(1, node.inner)
        yield self._make_work(node, node.name, prompts=prompts, samples=samples_of(node))

    def _make_work(
        self, node: PlannedNode, rows_of: str, *, prompts: int, samples: int, updates: int = 1
    ) -> NodeWork:
        """rows_of: the node that has these rows. updates: of an epoch."""
        epochs = int(self._graph.node(node.name).params.get("epochs", 1))
        most = Work(lengths=self._greatest[rows_of], prompts=prompts, rows=prompts * samples)
        return NodeWork(
            kind=kind_of_pass(node),
            most=most,
            lengths=self.distributions(rows_of),
            samples=samples,
            chunks=node.chunks,
            steps=1 + node.lag if node.binds_late else 0,
            updates=epochs * updates,
            epochs=epochs,
            is_torch=kernel_family(node) == "torch",
        )

    def distributions(self, node: str) -> RowDistributions:
        """How long a node's rows are."""
        if node not in self._kept:
            greatest = self._greatest[node]
            prompts = _find_prompts(greatest, self._lengths.prompts)
            answers = _find_answers(greatest, self._lengths)
            self._kept[node] = unite_distributions(RowDistributions(prompts, answers))
        return self._kept[node]


def _find_prompts(greatest: Lengths, distribution: LengthDistribution | None) -> LengthDistribution:
    if distribution is not None:
        return distribution if greatest.limit is None else distribution.cap(greatest.limit)
    if greatest.counts is not None:
        return LengthDistribution(greatest.counts.prompts)
    return constant_length(max(1, greatest.prompt))


def _find_answers(greatest: Lengths, lengths: StepLengths) -> LengthDistribution:
    most = max(1, greatest.completion)
    if lengths.answers is not None:
        return lengths.answers.cap(most)
    if greatest.counts is not None and greatest.counts.answers is not None:
        return LengthDistribution(greatest.counts.answers).cap(most)
    if lengths.assumes_answers:
        return assumed_answers(most)
    return constant_length(most)
