"""What is live in the slots of one replica at any pass, where its cache is never full.

Owns: when rows start then, and sums over live rows in closed form. Does not own: a cache that is
full at times (decode_slots.py), the curve that is made of the sums (decode_curve.py).

Sums over the rows that have started less those over the rows that have ended are those over live
rows, and with rows in the order of their starts and of their ends both are running sums.
"""

from __future__ import annotations

import heapq

import numpy as np

from engine.plan.cost.decode import DecodeBatch
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
    """Sums over rows that start then. A row has a token more with each pass from its start on."""

    def __init__(self, batch: DecodeBatch, starts: np.ndarray) -> None:
        self._share = 1.0 / batch.shared
        self._copied_share = 1.0 - self._share if batch.copied else 0.0
        prompts, ends = batch.prompts.astype(np.float64), starts + batch.answers
        self._prompts, self._starts = prompts, starts
        start_order = np.argsort(starts, kind="stable")
        end_order = np.argsort(ends, kind="stable")
        self._sorted_starts, self.sorted_ends = starts[start_order], ends[end_order]
        powers = np.stack([np.ones_like(starts), starts, starts * starts])
        self._started = _run_sums(np.vstack([powers, prompts, prompts * starts])[:, start_order])
        tokens = batch.answers.astype(np.float64)
        done = np.stack([tokens, tokens * tokens, prompts * tokens])
        gone = np.vstack([powers, prompts, prompts * starts, done])
        self._ended = _run_sums(gone[:, end_order])
        self.busiest = self._find_busiest()

    def _find_busiest(self) -> float:
        """The most tokens that are cached at once, which is as some row ends."""
        at = np.unique(self.sorted_ends)
        started = self._started[:, np.searchsorted(self._sorted_starts, at, side="left")]
        ended = self._ended[:, np.searchsorted(self.sorted_ends, at, side="left")]
        live, begun, _, prompts, _ = started - ended[:5]
        return float((live * at - begun + self._share * prompts).max(initial=0.0))

    def sum_up(self, cuts: np.ndarray) -> PassParts:
        """Sum up the passes between each two cuts, float64 [parts + 1], ascending."""
        started = self._started[:, np.searchsorted(self._sorted_starts, cuts, side="left")]
        places = np.searchsorted(self.sorted_ends, cuts, side="left")
        ended = self._ended[:, places]
        live, begun, squares, prompts, prompts_begun = started - ended[:5]
        tokens, token_squares, prompt_tokens = ended[5:]
        # By each cut: tokens of all rows; of these tokens, all those that their rows had before;
        # and the prompts of all live rows, pass by pass.
        written = live * cuts - begun + tokens
        before = (live * cuts * cuts - 2.0 * begun * cuts + squares + token_squares - written) / 2.0
        prompt_passes = prompts * cuts - prompts_begun + prompt_tokens
        count = np.diff(cuts)
        rows = np.diff(written) / count
        prompt = np.diff(prompt_passes) / count
        cached = np.diff(before) / count + self._share * prompt
        return PassParts(
            count=count,
            tokens=rows,
            keys=cached + rows,
            cached=cached + self._copied_share * prompt,
            rows=rows,
        )

    def list_prefills(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [prefills], in their order: tokens that each is fed, and keys that they attend
        to. Rows that start before the same pass are fed together.
        """
        order = np.argsort(self._starts, kind="stable")
        starts = self._starts[order]
        if not len(starts):
            return np.zeros(0), np.zeros(0)
        firsts = np.flatnonzero(np.diff(starts, prepend=-1.0))
        prompts = self._prompts[order]
        fed = self._share * np.add.reduceat(prompts, firsts)
        keys = self._share * np.add.reduceat(prompts * prompts / 2.0, firsts)
        has_tokens = fed > 0
        return fed[has_tokens], keys[has_tokens]


def _run_sums(columns: np.ndarray) -> np.ndarray:
    """Running sums of each row of the array, with a 0 in front."""
    return np.pad(np.cumsum(columns, axis=1), ((0, 0), (1, 0)))
