"""What is live in the slots of one replica at any pass, where its cache is never full.

Owns: when rows start then, and sums over live rows in closed form. Does not own: a cache that is
full at times (decode_slots.py), the curve that is made of the sums (decode_curve.py).

Sums over the rows that have started less those over the rows that have ended are those over live
rows, and with rows in the order of their starts and of their ends both are running sums.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from engine.plan.cost.model_passes import PassParts


def start_rows(answers: np.ndarray, slots: int) -> np.ndarray:
    """float64 [rows]: the pass before which each row starts, in their order, each in the slot that
    is free first.
    """
    rows = len(answers)
    starts = np.zeros(rows)
    if rows <= slots:
        return starts
    tokens: list[int] = answers.tolist()
    ends = tokens[:slots]
    heapq.heapify(ends)
    later: list[int] = []
    for answer in tokens[slots:]:
        start = ends[0]
        later.append(start)
        heapq.heapreplace(ends, start + answer)
    starts[slots:] = later
    return starts


class SlotMoments:
    """Sums over these rows, int64 [rows]: prompts and answers, in their order, where `slots` are
    decoded at once. A row has a token more with each pass from its start on. cut: makes of the
    sorted ends of rows, in passes, where parts end, float64, ascending, from 0 on.
    """

    def __init__(
        self,
        prompts: np.ndarray,
        answers: np.ndarray,
        slots: int,
        cut: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        starts = start_rows(answers, slots)
        prompts, ends = prompts.astype(np.float64), starts + answers
        start_order = np.argsort(starts, kind="stable")
        end_order = np.argsort(ends, kind="stable")
        self._sorted_starts, self._sorted_ends = starts[start_order], ends[end_order]
        powers = np.stack([np.ones_like(starts), starts, starts * starts])
        self._started = _run_sums(np.vstack([powers, prompts, prompts * starts])[:, start_order])
        tokens = answers.astype(np.float64)
        done = np.stack([tokens, tokens * tokens, prompts * tokens])
        gone = np.vstack([powers, prompts, prompts * starts, done])
        self._ended = _run_sums(gone[:, end_order])
        self._fed, self._keys = self._sum_prefills(prompts[start_order])
        self._own_at_ends, self._prompts_at_ends = self._sum_at_ends()
        self._count, self._rows, self._own, self._prompts = self._sum_between(cut(ends[end_order]))

    def _sum_prefills(self, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompts that are fed before the same pass, and half of their squares."""
        if not len(prompts):
            return np.zeros(0), np.zeros(0)
        firsts = np.flatnonzero(np.diff(self._sorted_starts, prepend=-1.0))
        fed = np.add.reduceat(prompts, firsts)
        keys = np.add.reduceat(prompts * prompts / 2.0, firsts)
        return fed[fed > 0], keys[fed > 0]

    def _sum_at_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """As each row ends: tokens that live rows have of their own, and of their prompts."""
        at = np.unique(self._sorted_ends)
        started, ended = self._sums_at(at)
        live, begun, _, prompts, _ = started - ended[:5]
        return live * at - begun, prompts

    def _sums_at(self, passes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the rows that have started before these passes, and over those that have
        ended.
        """
        started = np.searchsorted(self._sorted_starts, passes, side="left")
        ended = np.searchsorted(self._sorted_ends, passes, side="left")
        return self._started[:, started], self._ended[:, ended]

    def _sum_between(
        self, cuts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Passes between each two cuts, and in their mean: live rows, tokens of their own and of
        their prompts.
        """
        started, ended = self._sums_at(cuts)
        live, begun, squares, prompts, prompts_begun = started - ended[:5]
        tokens, token_squares, prompt_tokens = ended[5:]
        # By each cut: tokens of all rows; of these tokens, all those that their rows had before;
        # and the prompts of all live rows, pass by pass.
        written = live * cuts - begun + tokens
        before = live * cuts * cuts - 2.0 * begun * cuts + squares + token_squares - written
        prompt_passes = prompts * cuts - prompts_begun + prompt_tokens
        count = np.diff(cuts)
        rows, own_tokens = np.diff(written) / count, np.diff(before) / 2.0 / count
        return count, rows, own_tokens, np.diff(prompt_passes) / count

    def most_cached(self, shared: int) -> float:
        """The most tokens that are cached at once, which is as some row ends. shared: rows that
        share a prompt's cache.
        """
        return float((self._own_at_ends + self._prompts_at_ends / shared).max(initial=0.0))

    def sum_up(self, shared: int, *, copied: bool) -> PassParts:
        """Sum up the passes between the cuts. copied: whether each row reads a copy of its
        prompt.
        """
        cached = self._own + self._prompts / shared
        read = self._own + self._prompts if copied else cached
        rows = self._rows
        return PassParts(count=self._count, tokens=rows, keys=cached + rows, cached=read, rows=rows)

    def list_prefills(self, shared: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [prefills], in their order: tokens that each is fed, and keys that they attend
        to. Rows that start before the same pass are fed together.
        """
        return self._fed / shared, self._keys / shared


def _run_sums(columns: np.ndarray) -> np.ndarray:
    """Running sums of each row of the array, with a 0 in front."""
    return np.pad(np.cumsum(columns, axis=1), ((0, 0), (1, 0)))
