"""When the parts of a streamed Step are there, by the price of its generation.

Owns: the rows that stand for a Step's, how groups lie in chunks, and the cut of
engine/coordinator/part_cut.py as it is foreseen. Does not own: seconds of decoding
(engine/plan/costs.py), in which batches rows leave (leaving_batches.py), what is done with parts
(streamed_step.py).

The answers are the quantiles of their distribution in a random order that is always the same. A
part is ready when the watermark has passed its last group: each of those that may still come will
be longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from dataflow.randomness import row_seeds, uniform
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.costs import PlanCosts
from engine.plan.leaving_batches import ForeseenRows, list_batches
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.plan.row_lengths import RowLengths

_MOST_ROWS = 8192
"""Rows that are gone through; of more, those of some chunks stand for all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedPart:
    """seconds: from the generation's begin until the part can be worked on. rows: all of its own,
    those of a group side by side. groups: how many these are. share: of the Step's rows.
    """

    seconds: float
    rows: RowLengths
    groups: int
    share: float

    def cut(self, pieces: int) -> RowLengths:
        """The rows of the largest of so many pieces of whole groups."""
        groups_of_piece = -(-self.groups // max(1, pieces))
        count = -(-len(self.rows) * groups_of_piece // max(1, self.groups))
        return self.rows.take(np.arange(count))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedParts:
    """The parts in order, and when the generation's last chunk has ended."""

    parts: tuple[GeneratedPart, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StandingRows:
    """Rows of some chunks, of which each stands for `factor`. group, chunk: of each row."""

    lengths: RowLengths
    group: np.ndarray
    chunk: np.ndarray
    groups: int
    chunks: int
    factor: int


class _ChunkTimes:
    """When the rows of one chunk come, and how long those are at least that do not."""

    def __init__(self, node: PlannedNode, rows: ForeseenRows) -> None:
        self.come = np.zeros(len(rows.ends))
        has_left = np.zeros(len(rows.ends), dtype=bool)
        times: list[float] = []
        watermarks: list[int] = []
        for now, batch in list_batches(node, rows):
            has_left[batch] = True
            self.come[batch] = now
            times.append(now)
            watermarks.append(rows.watermark(now, has_left))
        self.end = float(rows.ends.max(initial=0.0))
        self._times = np.array([*times, self.end])
        self._watermarks = np.maximum.accumulate(np.array([*watermarks, 0], dtype=np.int64))

    def reach(self, tokens: np.ndarray) -> np.ndarray:
        """When the chunk is known to have no shorter row to come than these, float64."""
        place = np.searchsorted(self._watermarks, tokens, side="left")
        return self._times[np.minimum(place, len(self._times) - 1)]


def generate_parts(
    costs: PlanCosts,
    node: PlannedNode,
    source: PlannedSource,
    lengths: RowDistributions,
    slowdown: float = 1.0,
) -> GeneratedParts:
    """Foresee a first generation's rows and the parts that they make. slowdown: by how much others
    that compute meanwhile make it longer. Raises PlanError for a row that the cache cannot hold.
    """
    standing = _stand_for(node, source, lengths)
    rows = len(standing.group)
    come, begins = np.zeros(rows), np.zeros(max(1, node.layout.replicas))
    chunks: list[tuple[float, _ChunkTimes]] = []
    for number in range(standing.chunks):
        mine = np.flatnonzero(standing.chunk == number)
        if not len(mine):
            continue
        replica = number % len(begins)
        decoded = costs.decode(node.name, standing.lengths.take(mine)).times(slowdown)
        foreseen = ForeseenRows(
            starts=decoded.begins,
            ends=decoded.ends,
            groups=np.unique(standing.group[mine], return_inverse=True)[1],
            answers=standing.lengths.answers[mine],
        )
        times = _ChunkTimes(node, foreseen)
        come[mine] = begins[replica] + times.come
        chunks.append((float(begins[replica]), times))
        begins[replica] += times.end + costs.message
    ends = max((begin + times.end for begin, times in chunks), default=0.0)
    group_come = np.zeros(standing.groups)
    np.maximum.at(group_come, standing.group, come)
    parts = _cut_parts(source, standing, group_come, chunks)
    return GeneratedParts(parts=parts, seconds=ends)


def _stand_for(
    node: PlannedNode, source: PlannedSource, lengths: RowDistributions
) -> _StandingRows:
    samples, chunks, prompts = node.live_rows, max(1, node.chunks), source.batch
    factor = max(1, min(chunks, prompts * samples // _MOST_ROWS))
    chunks, prompts = chunks // factor, -(-prompts // factor)
    keys = Keys.of(range(prompts)).expand(samples)
    count = len(keys)
    shuffled = np.argsort(uniform(row_seeds(0, "answer", keys), 0), kind="stable")
    answers = np.empty(count, dtype=np.int64)
    answers[shuffled] = lengths.answers.spread(count)
    middle_of_last = 1.0 - 0.5 / (count * factor)
    answers[answers.argmax()] = lengths.answers.at(np.array(middle_of_last))
    group = np.repeat(np.arange(prompts), samples)
    sample = np.tile(np.arange(samples), prompts)
    # Spans of a prompt go to chunks one after another, as do prompts.
    unit = group * node.layout.spread + sample * node.layout.spread // samples
    units = prompts * node.layout.spread
    prompt_lengths = lengths.prompts.spread(prompts)
    return _StandingRows(
        lengths=RowLengths(np.repeat(prompt_lengths, samples), answers),
        group=group,
        chunk=unit * chunks // units if node.layout.spread == 1 else unit % chunks,
        groups=prompts,
        chunks=chunks,
        factor=factor,
    )


def _cut_parts(
    source: PlannedSource,
    rows: _StandingRows,
    come: np.ndarray,
    chunks: list[tuple[float, _ChunkTimes]],
) -> tuple[GeneratedPart, ...]:
    """Cut the groups into parts. come: when each group has come, float64 [groups]."""
    answers = rows.lengths.answers
    longest = np.zeros(rows.groups, dtype=np.int64)
    np.maximum.at(longest, rows.group, answers)
    tokens = np.bincount(rows.group, weights=answers, minlength=rows.groups)
    known, order = come, np.argsort(come, kind="stable")
    if source.stream == "ordered":
        known = come.copy()
        for begin, times in chunks:
            known = np.maximum(known, begin + times.reach(longest))
        # Once all have come nothing is waited for.
        known = np.minimum(known, come.max(initial=0.0))
        order = np.lexsort((np.arange(rows.groups), longest))
    least = max(1.0, source.part_tokens / rows.factor)
    parts: list[GeneratedPart] = []
    first, filled, ready = 0, 0.0, 0.0
    for place, group in enumerate(order.tolist()):
        filled += tokens[group]
        ready = max(ready, float(known[group]))
        if filled >= least or place == rows.groups - 1:
            parts.append(_make_part(rows, order[first : place + 1], ready))
            first, filled = place + 1, 0.0
    return tuple(parts)


def _make_part(rows: _StandingRows, groups: np.ndarray, ready: float) -> GeneratedPart:
    mine = rows.lengths.take(np.isin(rows.group, groups))
    repeated = RowLengths(np.tile(mine.prompts, rows.factor), np.tile(mine.answers, rows.factor))
    return GeneratedPart(
        seconds=ready,
        rows=repeated,
        groups=len(groups) * rows.factor,
        share=len(groups) / max(1, rows.groups),
    )
