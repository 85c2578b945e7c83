"""How simulated kernels behave: how long things take, which rows are kept, which fail.

Does not own: who does what (simulated_worker.py). Times are drawn from a generator of their own, so
that runs with other times differ in nothing else. Outcomes are keyed by row, as every draw in a
real run is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dataflow.batch import Keys
from dataflow.randomness import row_seeds, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What happens to a row, keyed by (seed, node, row key). keep: the share that a select keeps,
    of whole groups if it is in `groups`, of each group alike (but for rounding) if in `even`, as
    the first two rows of a group if in `pairs`, which says how many rows a group has; fail: the
    share of a node's rows that fail for good; lose: the share that are lost alone. segments: places
    for rows of an episode, of which all but the first stay empty. growth: so many tokens longer are
    rows than those of the prompt before.
    """

    seed: int = 0
    keep: Mapping[str, float] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    pairs: Mapping[str, int] = field(default_factory=dict)
    fail: Mapping[str, float] = field(default_factory=dict)
    lose: Mapping[str, float] = field(default_factory=dict)
    segments: Mapping[str, int] = field(default_factory=dict)
    growth: int = 0

    def find_empty_places(self, node: str, keys: Keys) -> np.ndarray:
        """Find the places of rows that no episode needs: boolean [rows]."""
        return keys.sample % self.segments.get(node, 1) > 0

    def draw_kept_rows(self, node: str, keys: Keys) -> np.ndarray:
        """Draw the rows that a select keeps: boolean [rows]."""
        share = self.keep.get(node, 1.0)
        if not (node in self.groups or node in self.even or node in self.pairs):
            return self._draw(f"{node}/keep", keys) < share
        group = Keys(keys.position, np.zeros_like(keys.sample), keys.attempt)
        draw = self._draw(f"{node}/keep", group)
        if node in self.pairs:
            return (keys.sample < 2) & (draw < share * self.pairs[node] / 2)
        if node in self.even:
            # Every 1/share-th row, from a drawn one on: whichever rows of a group come together.
            return np.floor((keys.sample + 1) * share + draw) > np.floor(keys.sample * share + draw)
        return draw < share

    def draw_failed_rows(self, node: str, keys: Keys) -> np.ndarray:
        """Draw the rows that fail for good: boolean [rows]."""
        if node not in self.fail:
            return np.zeros(len(keys), dtype=bool)
        return self._draw(f"{node}/fail", keys) < self.fail[node]

    def draw_lost_rows(self, node: str, keys: Keys) -> np.ndarray:
        """Draw the rows that are lost alone, if they do not fail with their group: boolean
        [rows].
        """
        if node not in self.lose:
            return np.zeros(len(keys), dtype=bool)
        return self._draw(f"{node}/lose", keys) < self.lose[node]

    def _draw(self, name: str, keys: Keys) -> np.ndarray:
        return uniform(row_seeds(self.seed, name, keys), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long things take, in seconds. Nodes without an entry in `row` take 1 second a row.

    tail: sigma of the log-normal factor of each row. slow: the share of rows that take `slower`
    times as long. loads: a reader takes new weights between chunks (drain) or at once.
    """

    seed: int = 0
    row: Mapping[str, float] = field(default_factory=dict)
    tail: float = 0.5
    slow: float = 0.0
    slower: float = 20.0
    train: float = 3.0
    load: float = 0.3
    store: float = 1.0
    slots: int = 4
    """Rows that a decode node works on at once; other nodes work on one."""
    loads: Literal["drain", "interrupt"] = "drain"

    def of_row(self, node: str, generator: random.Random) -> float:
        """Seconds that one row of a node takes."""
        seconds = self.row.get(node, 1.0) * generator.lognormvariate(0.0, self.tail)
        return seconds * (self.slower if generator.random() < self.slow else 1.0)
