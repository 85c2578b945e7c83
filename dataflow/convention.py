"""Conventions: what peers do differently within the same operator or loss, in words.

Owns: the peers' names, and the values with which a declaration tells what each of them does. Does
not own: the numbers (tables beside the formulas), which dialect a node follows (dialect.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dataflow.limits import choice

Dialect = Literal["trl", "verl", "openrlhf", "nemo_rl"]
"""A peer whose conventions can be asked for. They never change an algorithm (a clip, a baseline, an
aggregate): only epsilons, biased or not, clamps, groups of one.
"""

DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
DIALECT_LIMIT = choice(*DIALECTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something to which a peer has no answer. `instead` says what happens then: nothing is silent.

    where: parameter -> the values with which it matters; empty: always.
    """

    lacks: str
    instead: str
    where: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def matters(self, params: Mapping[str, Any]) -> bool:
        """Whether it concerns a use with these parameters."""
        return all(params.get(name) in values for name, values in self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """What an operator or a loss does in one dialect, and what the peer has no answer to."""

    says: str = ""
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectUse:
    """The dialect of one node, or of one term of a train node's loss.

    where: the node's name, followed by `.label` for a term. what: the operator's or loss's name.
    """

    where: str
    what: str
    dialect: str
    params: Mapping[str, Any]
    conventions: tuple[tuple[str, Convention], ...] = ()

    @property
    def says(self) -> str:
        """`unbiased deviation + 1e-4`; empty if nothing is declared (a user's own)."""
        return self._convention.says

    @property
    def _convention(self) -> Convention:
        return dict(self.conventions).get(self.dialect, Convention())

    def describe_gaps(self) -> Iterator[str]:
        """Yield a line for each gap that concerns this use: `openrlhf has no groups of one: 0, as
        trl`.
        """
        for gap in self._convention.gaps:
            if gap.matters(self.params):
                yield f"{self.dialect} has no {gap.lacks}: {gap.instead}"
