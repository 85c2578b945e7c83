"""How long the rows of a simulated run are: draws keyed by the row, so that compared plans see the
same rows, whatever Worker makes them.

Owns: the draws, and which distribution counts for a node. Does not own: the distributions
(engine/cost/distribution.py), where they come from (engine/seen_rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dataflow.batch import Keys
from dataflow.model import Model
from dataflow.randomness import row_seeds, uniform
from engine.cost.distribution import LengthDistribution
from engine.cost.lengths import Lengths
from engine.cost.models import model_cost
from engine.plan.lengths import all_lengths
from engine.plan.plan import Plan


class Distributions(Protocol):
    """Of prompts and answers; None: as long as the graph allows."""

    @property
    def prompts(self) -> LengthDistribution | None:
        """Of a source's rows."""
        ...

    @property
    def answers(self) -> LengthDistribution | None:
        """Of what a generate node adds."""
        ...


@dataclass(frozen=True, slots=True)
class Greatest:
    """Every row is as long as the graph allows."""

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None


class DrawnLengths:
    """The lengths of a plan's rows. None is longer than the graph allows, or shorter than 1."""

    def __init__(self, plan: Plan, given: Distributions, seed: int) -> None:
        assert plan.program is not None
        shapes = {
            s.name: model_cost(s.base, s.head).shape
            for s in plan.program.states
            if isinstance(s, Model)
        }
        self._greatest = all_lengths(plan.program, shapes)
        self._given, self._seed = given, seed

    def greatest(self, node: str) -> Lengths:
        """What the graph allows."""
        return self._greatest[node]

    def prompts(self, source: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the prompts that a source makes. A prompt has the same length in
        every sample and attempt.
        """
        zeros = np.zeros_like(keys.sample)
        keys = Keys(keys.position, zeros, zeros)
        return self._drawn(source, keys, self._given.prompts, self._greatest[source].prompt)

    def answers(self, node: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the answers of a generate node."""
        most = max(1, self._greatest[node].completion)
        return self._drawn(node, keys, self._given.answers, most)

    def demonstrated(self, source: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the completions that come with a source's prompts."""
        most = self._greatest[source].completion
        return self._drawn(source + "/completion", keys, self._given.answers, most)

    def _drawn(self, name: str, keys: Keys, of: LengthDistribution | None, most: int) -> np.ndarray:
        if of is None or most == 0:
            return np.full(len(keys), most, dtype=np.int64)
        draws = uniform(row_seeds(self._seed, f"{name}/length", keys), 0)
        return np.minimum(of.at(draws), most)
