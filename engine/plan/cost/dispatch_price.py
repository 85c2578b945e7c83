"""How long the slowest of several replicas decodes, by which answers it gets.

Owns: answers that vary between and within prompts, how they are dealt, and the price of the deal.
Does not own: which deal is taken (engine/plan/passes/dispatch.py), seconds of a replica's rows
(decode_curve.py).

Answers of one prompt are alike: half of what decides the quantile of an answer is the prompt's, the
other half its own. With a prompt's answers on one replica, long prompts add up there.

Long answers apart are decoded in small batches, whose passes are short, while short ones are many
and soon over: with as much weight on each replica that is worth nothing, as the long ones still
take the longest, so the tail has replicas by its price (StreamRL, arXiv:2504.15930, Algorithm 2).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dataflow.batch import Keys
from dataflow.randomness import row_seeds, uniform
from engine.plan.cost.decode import DecodeBatch
from engine.plan.cost.decode_curve import (
    DecodeCurve,
    RowDistributions,
    curve_of_batch,
    time_curve,
    unite_distributions,
)
from engine.plan.cost.decode_slots import SlotLimits
from engine.plan.cost.devices import Place
from engine.plan.cost.model_passes import Sizes

_DRAWS = 4
"""Steps whose answers are drawn, by seeds that are the same in every plan: the mean counts."""


_LOOKED_AT = 16
"""Replicas of which each is timed; of more only those that may be the slowest."""
_KEPT = 1024
"""Deals whose curves are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtAnswers:
    """Answers that are dealt to replicas. limits: of one replica, without rows; its `shared` is
    that of whole prompts.
    """

    lengths: RowDistributions
    prompts: int
    samples: int
    chunks: int
    limits: DecodeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How answers are dealt. spread: spans that a prompt's are cut into. tail: the share of spans
    of most weight that have chunks of their own, so many as `apart`, 0 for their share of the
    weight. is_weighed: whether prompts say how long their answers will be; is_misled: whether they
    say so by chance alone.
    """

    spread: int = 1
    tail: float = 0.0
    apart: int = 0
    is_weighed: bool = False
    is_misled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DrawnAnswers:
    """Of one Step: tokens of each answer, int64 [prompts, samples], and what is expected of those
    of each prompt, int64 [prompts]; by_chance: the same of another prompt.
    """

    answers: np.ndarray
    expected: np.ndarray
    by_chance: np.ndarray


def _draw_answers(dealt: AlikeAnswers, seed: int) -> DrawnAnswers:
    keys = Keys.of(range(dealt.prompts))
    of_prompts = uniform(row_seeds(seed, "prompt", keys), 0)
    of_answers = uniform(row_seeds(seed, "answer", keys.expand(dealt.samples)), 0)
    distribution = dealt.lengths.answers
    answers = distribution.at(_join_quantiles(np.repeat(of_prompts, dealt.samples), of_answers))
    expected = distribution.at(of_prompts)
    other_prompts = np.argsort(uniform(row_seeds(seed, "chance", keys), 0))
    return DrawnAnswers(
        answers=answers.reshape(dealt.prompts, dealt.samples),
        expected=expected,
        by_chance=expected[other_prompts],
    )


class DealPrices:
    """Prices of deals of the same answers, on replicas that stand on such places."""

    def __init__(self, model: Sizes, where: Place, dealt: DealtAnswers) -> None:
        self._model, self._where = model, where
        self.dealt = _unite(dealt)

        self._seconds: dict[Deal, float] = {}

    def are_of(self, model: Sizes, where: Place, dealt: DealtAnswers) -> bool:
        """Whether these are the prices of such answers there."""
        return (model, where, _unite(dealt)) == (self._model, self._where, self.dealt)

    def seconds(self, deal: Deal) -> float:
        """Seconds until the last replica has decoded its chunk, in the mean of some Steps."""
        if deal not in self._seconds:
            steps = _find_curves(self.dealt, deal)
            self._seconds[deal] = sum(map(self._time_slowest, steps)) / _DRAWS
        return self._seconds[deal]

    def _time_slowest(self, curves: Sequence[DecodeCurve]) -> float:
        times = (time_curve(self._model, self._where, curve) for curve in curves)
        return max((time.seconds for time in times), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeAnswers:
    """DealtAnswers of one content, which are equal."""

    lengths: RowDistributions
    prompts: int
    samples: int
    chunks: int
    limits: SlotLimits
    budget: int


def _unite(dealt: DealtAnswers) -> AlikeAnswers:
    return AlikeAnswers(
        lengths=unite_distributions(dealt.lengths),
        prompts=dealt.prompts,
        samples=dealt.samples,
        chunks=dealt.chunks,
        limits=dealt.limits.limits,
        budget=dealt.limits.budget,
    )


@lru_cache(maxsize=_KEPT)
def _find_curves(dealt: AlikeAnswers, deal: Deal) -> tuple[tuple[DecodeCurve, ...], ...]:
    """The curves of the replicas that may be the slowest, of each Step. They depend on no Model and
    no device: nodes whose rows are alike have them together, and so have the plans of one graph.
    """
    dealing = Dealing(dealt)
    steps: list[tuple[DecodeCurve, ...]] = []
    for drawn in dealing.draws:
        batches = _find_slow(list(dealing.deal_out(deal, drawn)))
        steps.append(tuple(map(curve_of_batch, batches)))
    return tuple(steps)


class Dealing:
    """Deals answers to replicas. draws: the answers of each Step."""

    def __init__(self, dealt: AlikeAnswers) -> None:
        self._dealt = dealt
        self.draws = [_draw_answers(dealt, seed) for seed in range(_DRAWS)]
        # A replica's chunk has some of the prompts, long and short mixed.
        self._prompts = dealt.lengths.prompts.spread(dealt.prompts)

    def deal_out(self, deal: Deal, drawn: DrawnAnswers) -> Iterator[DecodeBatch]:
        """The batch of each replica."""
        dealt = self._dealt
        edges = np.arange(deal.spread + 1) * dealt.samples // deal.spread
        sizes = np.tile(np.diff(edges), dealt.prompts)
        prompt_of_unit = np.repeat(np.arange(dealt.prompts), deal.spread)
        weights = sizes
        if deal.is_weighed:
            expected = drawn.by_chance if deal.is_misled else drawn.expected
            weights = expected[prompt_of_unit] * sizes
        chunk_of_unit = _cut(weights, dealt.chunks, deal)
        unit_of_row = np.repeat(np.arange(len(sizes)), sizes)
        chunk_of_row = chunk_of_unit[unit_of_row]
        answers = drawn.answers.reshape(-1)
        prompts = self._prompts[prompt_of_unit[unit_of_row]]
        order = np.arange(len(answers))
        if deal.is_weighed:
            order = np.argsort(-weights[unit_of_row], kind="stable")
        shared = -(-dealt.limits.shared // deal.spread)
        for chunk in range(dealt.chunks):
            rows = order[chunk_of_row[order] == chunk]
            yield DecodeBatch(
                prompts=prompts[rows],
                answers=answers[rows],
                shared=shared,
                slots=dealt.limits.slots,
                room=dealt.limits.room,
                budget=dealt.budget,
                copied=dealt.limits.copied,
            )


def _find_slow(batches: list[DecodeBatch]) -> list[DecodeBatch]:
    """Those of many batches of which one is the slowest: with most tokens, or the longest row."""
    if len(batches) <= _LOOKED_AT:
        return batches
    totals = np.array([batch.answers.sum() for batch in batches])
    longest = np.array([batch.answers.max(initial=0) for batch in batches])
    few = _LOOKED_AT // 2
    numbers = np.union1d(np.argsort(-totals)[:few], np.argsort(-longest)[:few])
    return [batches[number] for number in numbers]


def _join_quantiles(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Quantiles, again uniform, of which each of two uniform ones decides a half: the distribution
    of the sum of two is a triangle.
    """
    total = one + other
    return np.where(total < 1.0, total**2 / 2.0, 1.0 - (2.0 - total) ** 2 / 2.0)


def _cut(weights: np.ndarray, chunks: int, deal: Deal) -> np.ndarray:
    """int64 [units]: the chunk of each, of equal weight; those of most weight apart."""
    order = np.argsort(-weights, kind="stable")
    heavy_count = int(np.ceil(deal.tail * len(order)))
    chunk = np.zeros(len(weights), dtype=np.int64)
    if chunks == 1 or not 0 < heavy_count < len(order):
        chunk[order] = _balance(weights[order], chunks)
        return chunk
    heavy, light = order[:heavy_count], order[heavy_count:]
    share = weights[heavy].sum() / max(1, weights.sum())
    apart = min(max(1, deal.apart or round(chunks * share)), chunks - 1)
    chunk[heavy] = _balance(weights[heavy], apart)
    chunk[light] = apart + _balance(weights[light], chunks - apart)
    return chunk


def _balance(weights: np.ndarray, chunks: int) -> np.ndarray:
    """int64 [units]: for each the chunk with least weight so far, the first of several."""
    loads = [(0, chunk) for chunk in range(chunks)]
    numbers: list[int] = []
    for weight in weights.tolist():
        load, chunk = loads[0]
        numbers.append(chunk)
        heapq.heapreplace(loads, (load + weight, chunk))
    return np.array(numbers, dtype=np.int64)
