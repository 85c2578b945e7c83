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
        answer, bounds = int(params["max_tokens"]), []
        if params.get("max_prompt_tokens") is not None:
            bounds.append(
                (
                    int(params["max_prompt_tokens"]),
                    f"max_prompt_tokens={params['max_prompt_tokens']}",
                )
            )
        for limit, name in (
            (params.get("positions"), params.get("positions_of", model)),
            (positions, model),
        ):
            if limit is not None:
                bounds.append(
                    (
                        limit - answer,
                        f"Model {name!r} has {limit} positions, and max_tokens={answer}",
                    )
                )
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

    def fitted(self, prompts: Ragged, keys: Keys, session: Session) -> tuple[np.ndarray, Ragged]:
        """The indices of the prompts that stay, and their ids; dropped ones go to the session.

        Raises DataError naming the first prompt that is too long if the policy is `error`, or if no
        prompt can fit.
        """
        every = np.arange(len(prompts))
        if self.most is None or not len(prompts):
            return every, prompts
        long = np.flatnonzero(prompts.lengths > self.most)
        if len(long) and (self.policy == "error" or self.most < 1):
            raise DataError(self._message(prompts, keys, long))
        if self.policy != "error":
            session.metric(self.metric, len(long) / len(prompts), len(prompts))
        if not len(long):
            return every, prompts
        if self.policy == "truncate":
            return every, last_tokens(prompts, self.most)
        for index in long.tolist():
            message = self._message(prompts, keys, np.array([index]))
            session.tombstone(keys.rows()[index], message, failed=False)
        stay = np.setdiff1d(every, long)
        return stay, rows_of(prompts, stay)

    def _message(self, prompts: Ragged, keys: Keys, long: np.ndarray) -> str:
        key, found = keys.take(long[:1]).rows()[0], int(prompts.lengths[long[0]])
        many = (
            f" ({len(long)} of {len(prompts)} {self.what}s are too long, the longest"
            f" {int(prompts.lengths.max())})"
        )
        of = f"{self.what} tokens" if self.what == "prompt" else "tokens"
        return (
            f"{self.node}: row {key}: expected at most {self.most} {of} ({self.why}),"
            f" found {found}{many if len(long) > 1 else ''}. Fix: {self.fix}."
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
        least, of = params.get("positions"), params.get("positions_of", model)
        return RowRoom(
            node=node.name, model=of, positions=least, policy=params.get("overlong", "error")
        )

    def fitted(
        self, prompts: Ragged, rest: Sequence[Ragged], keys: Keys, session: Session
    ) -> tuple[np.ndarray, Ragged, list[Ragged]]:
        """The indices of the rows that stay, their prompts, and the columns aligned with their
        completions.

        Raises DataError naming the longest if the policy is `error`.
        """
        every, completions = np.arange(len(prompts)), rest[0]
        if self.policy == "error" or self.positions is None or not len(prompts):
            require_positions(self.node, self.model, self.positions, keys, prompts, completions)
            return every, prompts, list(rest)
        over = prompts.lengths + completions.lengths - self.positions
        session.metric(METRIC, float((over > 0).mean()), len(over))
        if not (over > 0).any():
            return every, prompts, list(rest)
        lengths = np.minimum(completions.lengths, completions.lengths - over)
        stay = np.flatnonzero(lengths > 0 if self.policy == "truncate" else over <= 0)
        for index in np.setdiff1d(every, stay).tolist():
            found = f"found {int(prompts.lengths[index] + completions.lengths[index])}"
            error = (
                f"{self.node}: expected at most {self.positions} tokens for Model {self.model!r},"
                f" {found}"
            )
            session.tombstone(keys.rows()[index], error, failed=False)
        cut = [spans(column, column.offsets[stay], lengths[stay]) for column in rest]
        return stay, rows_of(prompts, stay), cut


def last_tokens(rows: Ragged, most: int) -> Ragged:
    """Each row's last tokens, those next to the answer: left truncation, as in TRL and verl."""
    lengths = np.minimum(rows.lengths, most)
    return spans(rows, rows.offsets[1:] - lengths, lengths)


def rows_of(rows: Ragged, which: np.ndarray) -> Ragged:
    """These rows, in this order."""
    return spans(rows, rows.offsets[which], rows.lengths[which])


def spans(rows: Ragged, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
    """Of each row the values from `starts`, a place in the flat ones, on."""
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
        raise DataError(
            f"{node}: row {keys.rows()[row]}: expected at most {positions} tokens, the positions of"
            f" Model {model!r}, found {int(lengths[row])} ({count} of {len(keys)} rows are too"
            " long). Fix: overlong='drop' or 'truncate' (demonstrations), a smaller max_tokens, or"
            " a Model with more positions."
        )
