"""Rows too long for a Model's positions, and prompts that leave no room for an answer.

Owns: how many tokens fit and why, the policies `error`, `drop` and `truncate`, and their metric.
Does not own: positions (dataflow/positions.py, models.py), tokenizing (text.py), what happens to a
dropped prompt (the coordinator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dataflow.batch import Keys, Ragged
from dataflow.errors import DataError
from dataflow.kernel import KernelNode, Session

Overlong = Literal["error", "drop", "truncate"]

METRIC = "prompt/overlong"
"""Share of prompts, or of demonstrations, that were too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Room for prompts. most: tokens per prompt, None for no limit; why: the limit in words.

    what: the rows, in a message; fix: what else would make them fit; metric: of their share.
    """

    node: str
    most: int | None
    why: str
    policy: Overlong
    what: str = "prompt"
    fix: str = "overlong_prompt='drop' or 'truncate', a smaller max_tokens, or other data"
    metric: str = METRIC

    @staticmethod
    def of(node: KernelNode, model: str, positions: int | None) -> Room:
        """The lesser of max_prompt_tokens and the positions that an answer leaves, in every Model
        that reads the rows.

        positions: of the node's own Model, from its base; the plan knows the least of all readers'
        (engine/plan/passes/resolve.py).
        """
        params = node.params
        answer = int(params["max_tokens"])
        bounds: list[tuple[int, str]] = []
        most_by_param = params.get("max_prompt_tokens")
        if most_by_param is not None:
            bounds.append((int(most_by_param), f"max_prompt_tokens={most_by_param}"))
        planned_limit = params.get("positions"), params.get("positions_of", model)
        for limit, name in (planned_limit, (positions, model)):
            if limit is not None:
                why = f"Model {name!r} has {limit} positions, and max_tokens={answer}"
                bounds.append((limit - answer, why))
        most, why = min(bounds, default=(None, ""))
        return Room(
            node=node.name, most=most, why=why, policy=params.get("overlong_prompt", "error")
        )

    @staticmethod
    def of_scores(node: KernelNode, model: str, positions: int | None) -> Room:
        """The positions of a reward Model that reads prompt and answer."""
        return Room(
            node=node.name,
            most=positions,
            why=f"the positions of Model {model!r}",
            policy=node.params.get("overlong", "error"),
            what="row",
            fix="overlong='drop' or 'truncate', or a Model with more positions",
            metric=f"{node.name}/overlong",
        )

    def fit(self, prompts: Ragged, keys: Keys, session: Session) -> tuple[np.ndarray, Ragged]:
        """Fit the prompts: the indices of those that stay, and their ids. Dropped ones become
        tombstones of the session.

        Raises DataError naming the first prompt that is too long if the policy is `error`, or if no
        prompt can fit.
        """
        all_rows = np.arange(len(prompts))
        if self.most is None or not len(prompts):
            return all_rows, prompts
        long = np.flatnonzero(prompts.lengths > self.most)
        if len(long) and (self.policy == "error" or self.most < 1):
            raise DataError(self._message(prompts, keys, long))
        if self.policy != "error":
            session.metric(self.metric, len(long) / len(prompts), len(prompts))
        if not len(long):
            return all_rows, prompts
        if self.policy == "truncate":
            return all_rows, last_tokens(prompts, self.most)
        for index in long.tolist():
            message = self._message(prompts, keys, np.array([index]))
            session.tombstone(keys.rows()[index], message, failed=False)
        fitting_rows = np.setdiff1d(all_rows, long)
        return fitting_rows, take_rows(prompts, fitting_rows)

    def _message(self, prompts: Ragged, keys: Keys, long: np.ndarray) -> str:
        """The error for the first of the rows that are too long, and how many there are."""
        key = keys.take(long[:1]).rows()[0]
        length = int(prompts.lengths[long[0]])
        others = ""
        if len(long) > 1:
            others = (
                f" ({len(long)} of {len(prompts)} {self.what}s are too long, the longest"
                f" {int(prompts.lengths.max())})"
            )
        tokens = "prompt tokens" if self.what == "prompt" else "tokens"
        return (
            f"{self.node}: row {key}: expected at most {self.most} {tokens} ({self.why}),"
            f" found {length}{others}. Fix: {self.fix}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoom:
    """Room for rows, prompt and completion. positions: tokens per row, None for no limit."""

    node: str
    model: str
    positions: int | None
    policy: Overlong

    @staticmethod
    def of(node: KernelNode, model: str) -> RowRoom:
        """The positions of the Models that read the node's rows, from the plan."""
        params = node.params
        return RowRoom(
            node=node.name,
            model=params.get("positions_of", model),
            positions=params.get("positions"),
            policy=params.get("overlong", "error"),
        )

    def fit(
        self, prompts: Ragged, rest: Sequence[Ragged], keys: Keys, session: Session
    ) -> tuple[np.ndarray, Ragged, list[Ragged]]:
        """Fit the rows: the indices of those that stay, their prompts, and the columns aligned with
        their completions; the same objects if all rows fit as they are. rest: those columns, the
        completions first. Dropped rows become tombstones of the session.

        Raises DataError naming the longest if the policy is `error`.
        """
        all_rows = np.arange(len(prompts))
        completions = rest[0]
        if self.policy == "error" or self.positions is None or not len(prompts):
            require_positions(self.node, self.model, self.positions, keys, prompts, completions)
            return all_rows, prompts, list(rest)
        row_lengths = prompts.lengths + completions.lengths
        excess = row_lengths - self.positions
        session.metric(METRIC, float((excess > 0).mean()), len(excess))
        if not (excess > 0).any():
            return all_rows, prompts, list(rest)
        lengths = np.minimum(completions.lengths, completions.lengths - excess)
        # What is cut is the completion's end: a row whose prompt alone is too long has none left.
        fits = lengths > 0 if self.policy == "truncate" else excess <= 0
        fitting_rows = np.flatnonzero(fits)
        for index in np.setdiff1d(all_rows, fitting_rows).tolist():
            message = (
                f"{self.node}: expected at most {self.positions} tokens for Model {self.model!r},"
                f" found {int(row_lengths[index])}"
            )
            session.tombstone(keys.rows()[index], message, failed=False)
        fitting_lengths = lengths[fitting_rows]
        cut_columns = [
            take_spans(column, column.offsets[fitting_rows], fitting_lengths) for column in rest
        ]
        return fitting_rows, take_rows(prompts, fitting_rows), cut_columns


def last_tokens(rows: Ragged, most: int) -> Ragged:
    """Each row's last tokens, those next to the answer: left truncation, as in TRL and verl."""
    lengths = np.minimum(rows.lengths, most)
    return take_spans(rows, rows.offsets[1:] - lengths, lengths)


def take_rows(rows: Ragged, which: np.ndarray) -> Ragged:
    """Take these rows, in this order."""
    return take_spans(rows, rows.offsets[which], rows.lengths[which])


def take_spans(rows: Ragged, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
    """Copy `lengths` values for each new row, from `starts` on, a place in the flat values."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Ragged(rows.values[index], offsets)


def require_positions(
    node: str, model: str, positions: int | None, keys: Keys, prompts: Ragged, completions: Ragged
) -> None:
    """Raise DataError for a row longer than a Model's positions, before anything is computed."""
    if positions is None or not len(keys):
        return
    lengths = prompts.lengths + completions.lengths
    row = int(lengths.argmax())
    if lengths[row] > positions:
        count = int((lengths > positions).sum())
        key = keys.rows()[row]
        raise DataError(
            f"{node}: row {key}: expected at most {positions} tokens, the positions of"
            f" Model {model!r}, found {int(lengths[row])} ({count} of {len(keys)} rows are too"
            " long). Fix: overlong='drop' or 'truncate' (demonstrations), a smaller max_tokens, or"
            " a Model with more positions."
        )
