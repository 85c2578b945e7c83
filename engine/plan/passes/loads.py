"""How many prompts of a Step each replica has, or each share of a train node, on unlike devices.

Owns: PlannedNode.loads. Does not own: prices (engine/plan/replica_price.py), the division
(engine/plan/search/equal_finish.py), which rows each gets (engine/coordinator).

All are to end together, since the Step waits for the last: the loads are those with which the last
one ends earliest, by the price of each one's device. Like devices have as many each, and so do
replicas that come and go, those whose chunks nobody can tell apart (as many as are no multiple of
the replicas), and those that take rows as their slots fall free, which even out by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from dataflow.loss_terms import ROWS
from engine.plan.cost.models import Shape, cost_of_model
from engine.plan.cost.node_price import NodeWork
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.lengths import all_lengths
from engine.plan.plan import PlannedNode
from engine.plan.priced_work import PricedWork, StepLengths
from engine.plan.replica_price import list_parts, time_part
from engine.plan.search.equal_finish import divide_units


def divide_loads(draft: Draft) -> Draft:
    """Divide the prompts of each node on unlike devices, as far as their rates are known."""
    if draft.placing.loads == "equal" or not _has_unlike(draft):
        return draft
    nodes, notes = list(draft.nodes), list(draft.notes)
    divider = _Divider(draft)
    for index, node in enumerate(draft.nodes):
        loads = divider.divide(node)
        if loads:
            nodes[index] = replace(node, loads=loads)
            notes.append(_describe(draft, nodes[index]))
    return replace(draft, nodes=tuple(nodes), notes=tuple(notes))


def _has_unlike(draft: Draft) -> bool:
    """Whether a node that computes is on devices of several kinds, as far as hosts say."""
    for node in draft.nodes:
        hosts = {draft.host_of(worker) for worker in node.workers}
        if node.traits.computes and len({draft.cluster.on(host).kind for host in hosts}) > 1:
            return True
    return False


class _Divider:
    """Divides by the prices of a draft."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        models = {model.name: cost_of_model(model) for model in draft.graph_models}
        shapes: dict[str, Shape | None] = {name: cost.shape for name, cost in models.items()}
        greatest = all_lengths(draft.graph, shapes)
        self._costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, models)
        lengths = StepLengths(assumes_answers=True)
        self._work = PricedWork(draft, draft.graph, greatest, lengths)

    def divide(self, node: PlannedNode) -> tuple[int, ...]:
        """The loads of a node; empty where each is to have as much."""
        if not self._is_divided(node) or self._costs.is_alike(node.name):
            return ()
        if self._costs.unpriced_reason(node.name):
            return ()
        works = list(self._work.list_works(node))
        seconds = [self._price_part(node, works, worker) for worker in list_parts(node)]
        return divide_units(seconds, works[0].most.prompts)

    def _is_divided(self, node: PlannedNode) -> bool:
        if not node.traits.computes or len(list_parts(node)) < 2:
            return False
        if node.work == "train":
            return ROWS in node.row_sets
        is_elastic = node.name in self._draft.placing.least
        is_cut = node.scope != "batch" and node.chunks % node.layout.replicas == 0
        return is_cut and not is_elastic and not node.binds_late and not node.tail

    def _price_part(
        self, node: PlannedNode, works: Sequence[NodeWork], worker: str
    ) -> Callable[[int], float]:
        """Seconds of so many prompts on the device of a Worker, each number worked out once."""
        return cache(partial(self._time_prompts, node, works, worker))

    def _time_prompts(
        self, node: PlannedNode, works: Sequence[NodeWork], worker: str, prompts: int
    ) -> float:
        """prompts: of the node's own rows; those of other sets are divided alike."""
        seconds = 0.0
        for work in works:
            mine = -(-work.most.prompts * prompts // works[0].most.prompts)
            seconds += time_part(self._costs, node, work, worker, mine).seconds
        return seconds


def _describe(draft: Draft, node: PlannedNode) -> str:
    """Who has how many, and why."""
    shares = []
    for worker, load in zip(list_parts(node), node.loads, strict=True):
        kind = draft.cluster.on(draft.host_of(worker)).kind
        shares.append(f"{load} on {worker} ({kind})")
    return f"{node.name}: prompts of a Step, so that unlike devices end together: " + (
        ", ".join(shares)
    )
