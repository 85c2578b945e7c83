"""How many prompts memory holds, by how long their answers are just now.

    live tokens    outstanding prompts x the tokens of answers that each is expected to have
    expected       for each generation its rows of a prompt x (mean of the last Step's rows, and
                   what it grew by since the Step before, once for each Step that rows may wait)
    until a Step's rows were measured    as many prompts as fit with the longest rows

Owns: the means, and the number of prompts that follows. Does not own: what memory holds
(engine/plan/passes/intake_fit.py), what is admitted (admission.py).

What waits is bounded here, and nothing else: rows that are decoded are bounded by a kernel's slots,
or its cache, and those beyond them wait there without keys. One batch is always allowed, whatever
its rows take: the Step that is to end needs it (decision 0062).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource


class AnswerLengths:
    """Of the rows of one generation. window: rows of a Step."""

    def __init__(self, rows: int, window: int) -> None:
        self.rows = rows
        """Of each prompt."""
        self._window = window
        self._tokens = self._count = 0
        self._mean: float | None = None
        self._growth = 0.0

    def note(self, tokens: int, rows: int) -> None:
        """Rows have come, or are lost, with so many tokens together."""
        self._tokens += tokens
        self._count += rows
        if self._count < self._window:
            return
        mean = self._tokens / self._count
        if self._mean is not None:
            self._growth = max(0.0, mean - self._mean)
        self._mean = mean
        self._tokens = self._count = 0

    def expect(self, steps: int) -> float | None:
        """Tokens of a prompt's answers in so many Steps; None where too few rows have come."""
        if self._mean is None:
            return None
        return self.rows * (self._mean + steps * self._growth)


class LiveTokens:
    """Of the prompts of one source. nodes: those above the cut."""

    def __init__(self, source: PlannedSource, nodes: Iterable[PlannedNode]) -> None:
        self._source = source
        self._lengths: dict[str, AnswerLengths] = {}
        if source.max_lag and (source.room is not None or source.live_tokens):
            for node in nodes:
                if node.traits.generates:
                    window = source.batch * node.rows
                    self._lengths[node.name] = AnswerLengths(node.rows, window)

    @property
    def is_bounded(self) -> bool:
        """Whether memory, or a user, may allow fewer prompts than the lag does."""
        return bool(self._lengths)

    def note(self, node: str, tokens: int, rows: int) -> None:
        """Rows of a node have come, or are lost, with so many tokens together."""
        if node in self._lengths:
            self._lengths[node].note(tokens, rows)

    def expect(self) -> float | None:
        """Tokens of a prompt's answers; None as long as too few rows have come."""
        tokens = 0.0
        for lengths in self._lengths.values():
            expected = lengths.expect(1 + self._source.max_lag)
            if expected is None:
                return None
            tokens += expected
        return tokens

    def most(self) -> int:
        """Prompts that may be outstanding, at least one batch."""
        source = self._source
        allowed = source.allowed
        if not self.is_bounded:
            return allowed
        expected = self.expect()
        if source.live_tokens:
            asked = 0 if expected is None else source.live_tokens / max(1.0, expected)
            allowed = min(allowed, int(asked))
        if source.room is not None:
            held = float(source.room.prompts)
            if expected is not None:
                held = source.room.tokens / max(1.0, expected + source.room.beside)
            allowed = min(allowed, int(held))
        return max(source.batch, allowed)
