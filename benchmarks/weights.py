"""How much shorter a generation is by the weights of its rows, by how good these are.

    python -m benchmarks.weights [--quick] [--json FILE]

Owns: Steps whose rows are dealt by weights of some recall, and their seconds by the price of the
schedule. Does not own: how results are shown (report.py), rankers (length_ranks.py).

A Step of generation alone, in the mean of some that are drawn: the time until the last row has
ended, over that of the same rows without weights. *Chunks*: rows are cut into one chunk a replica,
as without a lag. *Late*: a replica takes the next row when a slot falls free; that other Steps are
under way beside it, which hides a part of the end, is not in it. *Tail*: the heaviest 5 % have
chunks of their own, so many as the Steps with weights of recall 1 are shortest with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks.price import MODEL
from benchmarks.report import SideResult, machine, show, write_json
from engine.coordinator.units import cut_by_weight, whole_weights
from engine.plan.cost.decode import DecodeBatch
from engine.plan.cost.decode_curve import curve_of_batch, time_curve
from engine.plan.cost.devices import catalogue_place, device
from engine.plan.cost.distribution import lognormal
from engine.plan.joining_decode import PricedDecode
from engine.plan.row_lengths import RowLengths
from engine.run.worker.weight_metrics import find_recall

PLACE = catalogue_place(device("H100"))
PROMPT = 300
ROOM = 1_000_000
"""Tokens of a replica's cache: what is left of 80 GB beside the weights."""
TAIL = 0.05
MOST_LOSS = 1.02
"""Of a Step's seconds without weights: what weights by chance may cost."""
RECALLS = (0.2, 0.8, 1.0)
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCase:
    """Rows of a Step and where they are decoded. samples: of each prompt, which has one weight."""

    name: str
    prompts: int
    samples: int
    replicas: int
    slots: int


CASES = (
    WeighedCase(name="1,024 prompts", prompts=1024, samples=1, replicas=8, slots=256),
    WeighedCase(name="1,024 prompts", prompts=1024, samples=1, replicas=16, slots=256),
    WeighedCase(name="1,024 prompts", prompts=1024, samples=1, replicas=8, slots=32),
    WeighedCase(name="128 prompts of 8", prompts=128, samples=8, replicas=8, slots=256),
    WeighedCase(name="128 prompts of 8", prompts=128, samples=8, replicas=8, slots=32),
)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnStep:
    """answers: int64 [prompts, samples]. weights: by recall, float64 [prompts]."""

    answers: np.ndarray
    weights: dict[float, np.ndarray]


def draw_step(case: WeighedCase, seed: int) -> DrawnStep:
    """Half of what decides an answer's length is its prompt's."""
    draw = np.random.default_rng(seed)
    of_prompts = draw.normal(size=(case.prompts, 1))
    of_answers = draw.normal(size=(case.prompts, case.samples))
    ranks = np.argsort(np.argsort((of_prompts + of_answers).reshape(-1)))
    quantiles = (ranks + 0.5) / len(ranks)
    answers = lognormal(3000, 0.9, 20_000).at(quantiles).reshape(of_answers.shape)
    means = answers.mean(axis=1)
    weights = {recall: weigh(means, recall, draw) for recall in RECALLS}
    return DrawnStep(answers, weights)


def weigh(means: np.ndarray, recall: float, draw: np.random.Generator) -> np.ndarray:
    """Weights of about this recall: mean lengths of answers times a noise, or of other prompts."""
    if recall == 1.0:
        return means
    if recall == 0.2:
        return draw.permutation(means)
    noise, least, most = draw.normal(size=len(means)), 0.0, 4.0
    weights = means
    for _ in range(20):
        middle = (least + most) / 2
        weights = means * np.exp(middle * noise)
        if (find_recall(weights, means) or 0.0) > recall:
            least = middle
        else:
            most = middle
    return weights


def time_chunks(
    case: WeighedCase, step: DrawnStep, recall: float | None, tail: float = 0.0, tail_parts: int = 0
) -> float:
    """Seconds until the last replica has decoded its chunk. recall: None without weights."""
    row = np.arange(case.prompts)
    weights = np.ones(case.prompts, np.int64)
    if recall is not None:
        weights = whole_weights(step.weights[recall])
    slowest = 0.0
    for prompts in cut_by_weight(weights, row, case.replicas, tail, tail_parts):
        ordered = prompts[np.argsort(-weights[prompts], kind="stable")]
        answers = step.answers[ordered].reshape(-1)
        batch = DecodeBatch(
            prompts=np.full(len(answers), PROMPT),
            answers=answers,
            shared=case.samples,
            slots=case.slots,
            room=ROOM,
        )
        slowest = max(slowest, time_curve(MODEL, PLACE, curve_of_batch(batch)).seconds)
    return slowest


def time_late(case: WeighedCase, step: DrawnStep, recall: float | None) -> float:
    """Seconds until the last row has ended, each begun where a slot is free first."""
    order = np.arange(case.prompts)
    if recall is not None:
        order = np.argsort(-step.weights[recall], kind="stable")
    answers = step.answers[order].reshape(-1)
    limits = DecodeBatch(
        prompts=NO_ROWS, answers=NO_ROWS, slots=case.slots, shared=case.samples, room=ROOM
    )
    lanes = [PricedDecode(MODEL, PLACE, limits) for _ in range(case.replicas)]
    first = min(len(answers), case.slots * case.replicas)
    for number, lane in enumerate(lanes):
        mine = answers[number : first : case.replicas]
        lane.add(RowLengths(np.full(len(mine), PROMPT), mine), 0.0)
    begun, last = first, 0.0
    while True:
        ends = [(end, number) for number, lane in enumerate(lanes) if (end := lane.next_end())]
        if not ends:
            return last
        last, number = min(ends)
        ended = len(lanes[number].advance(last))
        more = answers[begun : begun + ended]
        begun += len(more)
        if len(more):
            lanes[number].add(RowLengths(np.full(len(more), PROMPT), more), last)


def measure(case: WeighedCase, steps: Sequence[DrawnStep]) -> Iterator[SideResult]:
    """Seconds over those without weights, by recall."""
    where = f"{case.name}, {case.replicas} replicas of {case.slots} slots"
    plain = sum(time_chunks(case, step, None) for step in steps)
    counts = range(1, case.replicas)
    by_count = [sum(time_chunks(case, s, 1.0, TAIL, count) for s in steps) for count in counts]
    tail_parts = counts[int(np.argmin(by_count))]
    late = sum(time_late(case, step, None) for step in steps)
    for recall in RECALLS:
        chunks = sum(time_chunks(case, step, recall) for step in steps) / plain
        yield of_recall(f"{where}/chunks", recall, chunks)
        in_tail = sum(time_chunks(case, s, recall, TAIL, tail_parts) for s in steps) / plain
        name = f"{where}/tail in {tail_parts} chunks/recall {recall:g}"
        yield SideResult(name=name, value=in_tail, unit="of no weights")
        by_share = sum(time_chunks(case, step, recall, TAIL) for step in steps) / plain
        name = f"{where}/tail by its share of the weight/recall {recall:g}"
        yield SideResult(name=name, value=by_share, unit="of no weights")
        late_seconds = sum(time_late(case, step, recall) for step in steps) / late
        yield of_recall(f"{where}/late", recall, late_seconds)


def of_recall(name: str, recall: float, ratio: float) -> SideResult:
    """A result, with the goal that weights by chance have."""
    goal = MOST_LOSS if recall == 0.2 else None
    return SideResult(
        name=f"{name}/recall {recall:g}", value=ratio, unit="of no weights", goal=goal, least=False
    )


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: fewer Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    figures: list[SideResult] = []
    for case in CASES:
        steps = [draw_step(case, seed) for seed in range(2 if quick else 8)]
        figures += measure(case, steps)
    where = machine()
    show("weights", figures, where)
    if json is not None:
        write_json(json, figures, where)


if __name__ == "__main__":
    tyro.cli(main)
