"""Which answers go to one replica: how far a prompt's are spread, and whether the tail is apart.

Owns: Layout.spread, PlannedNode.tail and tail_chunks, what is said of them. Does not own: prices
(engine/plan/cost/dispatch_price.py), the cut of a Step's rows, which follows from both and from
keys and weights alone (engine/coordinator).

Each replica more that has answers of a prompt feeds it once more; what it gains is that long
answers are balanced, and that no replica is idle. With a lag replicas even out from Step to Step,
and only the latter counts. Both are chosen for the chunks of a generation as if each had a replica
of its own: equal chunks then give equal bits, on one replica too. They are left as they are unless
the price of a Step falls by 2 %. A tail has as many chunks as make the Step shortest. It is chosen
only where weights that say nothing would not cost 2 % of a Step either, since the plan does not
know how good they are: who does (`weight/recall`) asks for it by `--tail`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from engine.plan.cost.dispatch_price import Deal, DealPrices, DealtAnswers
from engine.plan.cost.models import ModelCost, Shape, cost_of_model
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.lengths import all_lengths
from engine.plan.passes.placement_problems import has_weights
from engine.plan.plan import PlannedNode
from engine.plan.priced_work import ASSUMED, PricedWork
from engine.plan.profiled_passes import samples_of
from engine.plan.step_price import StepPrice

_LEAST_GAIN = 0.02
"""Of a Step: what a deal other than the plain one has to be worth."""
_ROUNDING = 1e-9
"""Of sums of seconds, at most."""
_TAILS = (0.1, 0.2, 0.3)
"""Shares that are tried; StreamRL has 0.2 (arXiv:2504.15930)."""
_MOST_APARTS = 8
"""Numbers of chunks that a tail is tried with."""
_MOST_ROWS = 8192
"""Answers that are priced; of more, those of some replicas stand for all."""


def choose_dispatch(draft: Draft) -> Draft:
    """Choose spread and tail of each generation that has several chunks in a Step, or take what was
    asked for.
    """
    chooser = None
    nodes, notes = list(draft.nodes), list(draft.notes)
    for index, node in enumerate(draft.nodes):
        if not node.traits.generates:
            continue
        deal = Deal(
            spread=draft.placing.spread.get(node.name, 1),
            tail=draft.placing.tail.get(node.name, 0.0),
        )
        if _has_choice(draft, node):
            chooser = chooser or _DealChooser(draft)
            choice = chooser.choose(node)
            deal = choice.deal
            notes += choice.notes
        layout = replace(node.layout, spread=deal.spread)
        nodes[index] = replace(node, layout=layout, tail=deal.tail, tail_chunks=deal.apart)
    return replace(draft, nodes=tuple(nodes), notes=tuple(notes))


def _has_choice(draft: Draft, node: PlannedNode) -> bool:
    """Whether anything is to be chosen: a spread, or a tail and its chunks."""
    if node.region == "evaluation" or _count_chunks(node) < 2:
        return False
    return node.name not in draft.placing.spread or has_weights(node)


def _count_chunks(node: PlannedNode) -> int:
    """Chunks of a Step that are decoded side by side; as many as replicas where they take rows as
    they become free.
    """
    return node.layout.replicas if _is_late(node) else node.chunks


def _is_late(node: PlannedNode) -> bool:
    """Whether Steps overlap, so that replicas even out from one to the next."""
    return node.lag > 0


@dataclass(frozen=True, slots=True)
class _ChosenDeal:
    deal: Deal
    notes: tuple[str, ...] = ()


class _DealChooser:
    """Chooses by the price of a Step."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._models: dict[str, ModelCost] = {}
        for model in draft.graph_models:
            self._models[model.name] = cost_of_model(model)
        shapes: dict[str, Shape | None] = {}
        for name, cost in self._models.items():
            shapes[name] = cost.shape
        greatest = all_lengths(draft.graph, shapes)
        self._costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, self._models)
        lengths = ASSUMED
        self._work = PricedWork(draft, draft.graph, greatest, lengths)
        self._step = StepPrice(draft, self._costs, self._work, {})
        self._prices: list[DealPrices] = []
        """Of the classes of nodes so far that decode alike."""

    def choose(self, node: PlannedNode) -> _ChosenDeal:
        """Choose the deal of a node's answers."""
        asked = self._ask(node)
        if asked.tail and _is_late(node):
            return _ChosenDeal(asked)
        if self._costs.unpriced_reason(node.name):
            return _ChosenDeal(asked)
        seconds_of = self._price_deals(node)
        if seconds_of is None:
            return _ChosenDeal(asked)
        price = _StepOfDeal(self._step, node.name, seconds_of)
        deals = list(self._list_deals(node, asked))
        if not self._may_gain(node, seconds_of(asked), min(map(seconds_of, deals))):
            return _ChosenDeal(asked)
        plain_seconds = price.seconds(asked)
        best, best_seconds = asked, plain_seconds
        for deal in deals:
            seconds = price.seconds(deal)
            is_better = seconds < min(best_seconds, (1.0 - _LEAST_GAIN) * plain_seconds)
            if is_better and (asked.tail or not deal.tail or price.is_safe(deal)):
                best, best_seconds = deal, seconds
        if best == asked:
            return _ChosenDeal(asked)
        gain = 1.0 - best_seconds / plain_seconds
        return _ChosenDeal(best, tuple(_describe(node, asked, best, gain)))

    def _may_gain(self, node: PlannedNode, asked: float, least: float) -> bool:
        """Whether a Step may get shorter by enough if a node takes the least of its seconds in the
        place of those as asked: no Step changes by more than one of its nodes. So the Step of a
        large graph is not timed anew for each deal of each node.
        """
        whole = self._step_as_planned - max(0.0, self._step.by_node[node.name] - asked)
        return asked - least > _LEAST_GAIN * whole * (1.0 - _ROUNDING)

    @cached_property
    def _step_as_planned(self) -> float:
        return self._step.seconds(self._step.by_node)

    def _price_deals(self, node: PlannedNode) -> Callable[[Deal], float] | None:
        """What prices the deals of a node's answers; None where no price tells them apart."""
        if _is_late(node):
            return partial(self._time_overlapping, node)
        dealt = self._deal_answers(node)
        if dealt is None:
            return None
        model, where = self._costs.require_sizes(node.name), self._costs.place(node.name)
        for prices in self._prices:
            if prices.are_of(model, where, dealt):
                return prices.seconds
        self._prices.append(DealPrices(model, where, dealt))
        return self._prices[-1].seconds

    def _ask(self, node: PlannedNode) -> Deal:
        """The plain deal, with what was asked for."""
        placing = self._draft.placing
        return Deal(
            spread=placing.spread.get(node.name, 1),
            tail=placing.tail.get(node.name, 0.0),
            is_weighed=has_weights(node),
        )

    def _list_deals(self, node: PlannedNode, asked: Deal) -> Iterator[Deal]:
        """The deals that may be better, simple ones first."""
        placing = self._draft.placing
        spreads, tails = [asked.spread], [asked.tail]
        if node.name not in placing.spread:
            most = min(samples_of(node), _count_chunks(node))
            spreads = list(_list_spreads(most))
        if asked.is_weighed and not _is_late(node) and node.name not in placing.tail:
            tails += _TAILS
        for tail in tails:
            for spread, apart in product(spreads, _list_aparts(tail, _count_chunks(node))):
                yield replace(asked, spread=spread, tail=tail, apart=apart)

    def _deal_answers(self, node: PlannedNode) -> DealtAnswers | None:
        """The answers of a Step, or of some of its replicas; None of replicas with so many that
        they balance each other.
        """
        (work,) = self._work.list_works(node)
        chunks, prompts, samples = _count_chunks(node), work.most.prompts, work.samples
        if prompts * samples > _MOST_ROWS:
            rows_of_chunk = -(-prompts * samples // chunks)
            if 2 * rows_of_chunk > _MOST_ROWS:
                return None
            fewer = _MOST_ROWS // rows_of_chunk
            prompts, chunks = max(1, prompts * fewer // chunks), fewer
        return DealtAnswers(
            lengths=work.lengths,
            prompts=prompts,
            samples=samples,
            chunks=chunks,
            limits=self._costs.decode_limits(node.name),
        )

    def _time_overlapping(self, node: PlannedNode, deal: Deal) -> float:
        """Seconds of a node's rows of a Step amid those of others."""
        (work,) = self._work.list_works(node)
        spread_node = replace(node, layout=replace(node.layout, spread=deal.spread))
        return self._step.time_work(spread_node, replace(work, steps=1 + node.lag)).seconds


class _StepOfDeal:
    """Seconds of a Step by the deal of one of its nodes."""

    def __init__(self, step: StepPrice, node: str, seconds_of: Callable[[Deal], float]) -> None:
        self._step, self._node, self._seconds_of = step, node, seconds_of

    def seconds(self, deal: Deal) -> float:
        return self._step.seconds({self._node: self._seconds_of(deal)})

    def is_safe(self, deal: Deal) -> bool:
        """Whether weights by chance make a Step hardly longer than none do."""
        unweighed = replace(deal, tail=0.0, apart=0, is_weighed=False)
        misled = replace(deal, is_misled=True)
        return self.seconds(misled) <= (1.0 + _LEAST_GAIN) * self.seconds(unweighed)


def _list_aparts(tail: float, chunks: int) -> list[int]:
    """Numbers of chunks that a tail may have, some of them where there are many."""
    if not tail:
        return [0]
    numbers = np.linspace(1, chunks - 1, min(chunks - 1, _MOST_APARTS))
    return [0, *np.unique(numbers.astype(np.int64)).tolist()]


def _list_spreads(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the most."""
    spread = 1
    while spread < most:
        yield spread
        spread *= 2
    yield most


def _describe(node: PlannedNode, asked: Deal, best: Deal, gain: float) -> Iterator[str]:
    """What was chosen, and what it is worth."""
    parts: list[str] = []
    if best.spread != asked.spread:
        parts.append(f"the answers of a prompt in {best.spread} spans (spread)")
    if best.tail and best.apart:
        chunks = "1 chunk" if best.apart == 1 else f"{best.apart} chunks"
        parts.append(f"the {best.tail:.0%} of most weight apart, in {chunks} (tail)")
    elif best.tail:
        parts.append(f"the {best.tail:.0%} of most weight apart (tail)")
    worth = f"a Step is {gain:.0%} shorter by its price, with assumed lengths of answers"
    yield f"{node.name}: {' and '.join(parts)}: {worth}"
    if not _is_late(node):
        asks = f"spread={best.spread}"
        if best.tail:
            asks += f" and tail={best.tail:g}"
        yield f"{node.name}: where another price chooses otherwise, {asks} gives the same bits"
