"""In which batches the rows of a chunk leave its replica, and how long those are that stay.

Owns: the rule of operators/kernels/leaving_rows.py for rows whose ends are foreseen, by which runs
are priced and simulated. Does not own: when rows end (engine/plan/cost/decode.py), what becomes of
them (engine/coordinator).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.plan.plan import PlannedNode
from engine.plan.run_limits import BEAT

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeseenRows:
    """A chunk's rows. starts, ends: float64 [rows], seconds from its begin. groups: int64 [rows],
    of which those with one number are what it has of one prompt. answers: int64 [rows], tokens;
    None where nobody knows them.
    """

    starts: np.ndarray
    ends: np.ndarray
    groups: np.ndarray
    answers: np.ndarray | None = None

    @property
    def group_ends(self) -> np.ndarray:
        """When the last row of each row's group ends, float64 [rows]."""
        return group_ends(self.ends, self.groups)

    def watermark(self, seconds: float, has_left: np.ndarray) -> int:
        """The tokens that each row has at least that has not ended so many seconds after the
        chunk's begin; of a group that has ended and not left, as if a token were still to come.
        """
        if self.answers is None:
            return 0
        until = seconds * (1.0 + _ROUNDING)
        has_ended = self.ends <= until
        # The rows of a group that has others under way are no longer than these will be.
        stays = ~has_left & (~has_ended | (self.group_ends <= until))
        if not stays.any():
            return 0
        taken = np.maximum(self.ends - self.starts, 1e-9)
        written = np.clip((seconds - self.starts) / taken, 0.0, 1.0)
        tokens = np.minimum((self.answers * written).astype(np.int64), self.answers - 1)
        return max(0, int(tokens[stays].min()))


def group_ends(ends: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """When the last row of each row's group ends, float64 [rows]."""
    last = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(last, groups, ends)
    return last[groups]


def list_batches(node: PlannedNode, rows: ForeseenRows) -> Iterator[tuple[float, np.ndarray]]:
    """List when rows leave, and the numbers of those that leave together, int64.

    Of a generation whole groups: all at once where they fit its slots, else as soon as there are
    enough for a quarter of them; where its Step is worked on in parts, also once so many tokens of
    a part have ended, and with each heartbeat, if only to say the watermark. Of other nodes those
    that end at the same time.
    """
    if not len(rows.ends):
        return
    ready_at, least = rows.ends, 1
    if node.traits.generates:
        slots, count = node.layout.slots, len(rows.ends)
        ready_at = rows.group_ends
        least = count if count <= slots else max(1, slots // 4)
    leaving = _LeavingTokens(rows, node.layout.part_tokens)
    order = np.argsort(ready_at, kind="stable")
    sorted_ready = ready_at[order]
    first = 0
    for now in leaving.list_moments(ready_at):
        last = int(np.searchsorted(sorted_ready, now, side="right"))
        is_enough = last - first >= least or leaving.is_enough(now)
        has_all = last > first and (is_enough or last == len(order))
        if has_all or leaving.is_beat(now):
            yield now, order[first:last]
            if last > first:
                leaving.note_left(now)
            first = last


class _LeavingTokens:
    """Tokens of rows that have ended since rows left last. enough: with so many the ready ones
    leave; 0: their number counts alone.
    """

    def __init__(self, rows: ForeseenRows, enough: int) -> None:
        self._enough = enough if rows.answers is not None else 0
        self._left = 0
        """Tokens that had ended when rows left last."""
        if self._enough:
            assert rows.answers is not None
            order = np.argsort(rows.ends, kind="stable")
            self._ends = rows.ends[order]
            self._sums = np.concatenate([[0], np.cumsum(rows.answers[order])])
            self._beats = set(np.arange(BEAT, self._ends[-1], BEAT).tolist())

    def list_moments(self, ready_at: np.ndarray) -> list[float]:
        """When rows may leave: as some get ready, enough tokens have ended, or at a heartbeat."""
        if self._enough:
            return sorted(self._beats.union(self._ends.tolist()))
        return np.unique(ready_at).tolist()

    def is_enough(self, now: float) -> bool:
        """Whether enough tokens have ended by now."""
        return bool(self._enough) and self._count(now) - self._left >= self._enough

    def is_beat(self, now: float) -> bool:
        """Whether there is a heartbeat now, in seconds from the chunk's begin."""
        return bool(self._enough) and now in self._beats

    def note_left(self, now: float) -> None:
        """All rows have left that were ready now."""
        if self._enough:
            self._left = self._count(now)

    def _count(self, now: float) -> int:
        return int(self._sums[np.searchsorted(self._ends, now, side="right")])
