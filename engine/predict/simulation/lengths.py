"""How long the rows of a simulated run are: draws keyed by the row, so that compared plans see the
same rows, whatever Worker makes them.

Owns: the draws, and which distribution counts for a node. Does not own: the distributions
(engine/plan/cost/distribution.py), where they come from (engine/predict/row_statistics.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dataflow.batch import Keys
from dataflow.model import Model
from dataflow.randomness import row_seeds, uniform
from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.models import model_cost
from engine.plan.lengths import all_lengths
from engine.plan.plan import Plan


class Distributions(Protocol):
    """Of prompts and answers; None: as counted in the data, or as long as the graph allows."""

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
    """Nothing is said of any row."""

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None


class DrawnLengths:
    """The lengths of a plan's rows. None is longer than graph and Model allow, or shorter than 1; a
    guess of the longest prompt limits nothing. given: what is said of them.
    """

    def __init__(self, plan: Plan, given: Distributions, seed: int) -> None:
        assert plan.program is not None
        shapes = {
            s.name: model_cost(s.base, s.head).shape
            for s in plan.program.states
            if isinstance(s, Model)
        }
        self._greatest = all_lengths(plan.program, shapes)
        self._trained = {each.name for each in plan.sources}
        self.given, self._seed = given, seed

    def greatest(self, node: str) -> Lengths:
        """What the graph allows."""
        return self._greatest[node]

    def given_prompts(self, source: str) -> LengthDistribution | None:
        """What is said of a source's prompts: of what is trained, and so of an evaluation's only
        where its own were not counted.
        """
        counted = self._greatest[source].counts is not None
        return None if counted and source not in self._trained else self.given.prompts

    def prompts(self, source: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the prompts that a source makes. A prompt has the same length in
        every sample and attempt.
        """
        zeros = np.zeros_like(keys.sample)
        keys, greatest = Keys(keys.position, zeros, zeros), self._greatest[source]
        if (given := self.given_prompts(source)) is not None:
            return self._drawn(source, keys, given, greatest.limit)
        if greatest.counts is not None:
            return self._drawn(source, keys, LengthDistribution(greatest.counts.prompts))
        return np.full(len(keys), greatest.prompt, dtype=np.int64)

    def answers(self, node: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the answers of a generate node."""
        return self._written(node, keys, max(1, self._greatest[node].completion))

    def demonstrated(self, source: str, keys: Keys) -> np.ndarray:
        """int64 [rows]: tokens of the completions that come with a source's prompts."""
        name, greatest = source + "/completion", self._greatest[source]
        counted = None if greatest.counts is None else greatest.counts.answers
        if self.given.answers is not None or counted is None:
            return self._written(name, keys, greatest.completion)
        return self._drawn(name, keys, LengthDistribution(counted), greatest.completion)

    def _written(self, name: str, keys: Keys, most: int) -> np.ndarray:
        if self.given.answers is None or most == 0:
            return np.full(len(keys), most, dtype=np.int64)
        return self._drawn(name, keys, self.given.answers, most)

    def _drawn(
        self, name: str, keys: Keys, of: LengthDistribution, most: int | None = None
    ) -> np.ndarray:
        draws = uniform(row_seeds(self._seed, f"{name}/length", keys), 0)
        found = of.at(draws)
        return found if most is None else np.minimum(found, most)
