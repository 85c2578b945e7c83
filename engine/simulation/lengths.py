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
from dataflow.randomness import row_seeds, uniform
from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.lengths import Lengths
from engine.plan.lengths import greatest_lengths
from engine.plan.plan import Plan


class Distributions(Protocol):
    """Of prompts and answers; None: as counted in the data, or as long as the graph allows."""

    @property
    def prompts(self) -> LengthDistribution | None:
        """How long the prompts of a source are."""
        ...

    @property
    def answers(self) -> LengthDistribution | None:
        """How long the answers are that a generate node adds."""
        ...


@dataclass(frozen=True, slots=True)
class UnknownDistributions:
    """Nothing is said of any row: each is as long as it may be."""

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None


class DrawnLengths:
    """The lengths of a plan's rows. None is longer than graph and Model allow, or shorter than 1; a
    guess of the longest prompt limits nothing. distributions: what is said of them.
    """

    def __init__(self, plan: Plan, distributions: Distributions, seed: int) -> None:
        assert plan.program is not None
        self._greatest = greatest_lengths(plan.program)
        self._trained = {source.name for source in plan.sources}
        self.distributions, self._seed = distributions, seed

    def greatest(self, node: str) -> Lengths:
        """What the graph allows."""
        return self._greatest[node]

    def distribution_of_prompts(self, source: str) -> LengthDistribution | None:
        """What is said of a source's prompts: of what is trained, and so of an evaluation's only
        where its own were not counted.
        """
        is_counted = self._greatest[source].counts is not None
        if is_counted and source not in self._trained:
            return None
        return self.distributions.prompts

    def prompts(self, source: str, keys: Keys) -> np.ndarray:
        """Draw the tokens of the prompts that a source makes, int64 [rows]."""
        # A prompt has the same length in every sample and attempt.
        zeros = np.zeros_like(keys.sample)
        keys, greatest = Keys(keys.position, zeros, zeros), self._greatest[source]
        distribution = self.distribution_of_prompts(source)
        if distribution is not None:
            return self._draw(source, keys, distribution, greatest.limit)
        if greatest.counts is not None:
            return self._draw(source, keys, LengthDistribution(greatest.counts.prompts))
        return np.full(len(keys), greatest.prompt, dtype=np.int64)

    def answers(self, node: str, keys: Keys) -> np.ndarray:
        """Draw the tokens of the answers of a generate node, int64 [rows]."""
        return self._draw_answers(node, keys, max(1, self._greatest[node].completion))

    def completions(self, source: str, keys: Keys) -> np.ndarray:
        """Draw the tokens of the completions that come with a source's prompts, int64 [rows]."""
        name, greatest = source + "/completion", self._greatest[source]
        counts = greatest.counts
        # What is said of answers counts before what the data has.
        if self.distributions.answers is not None or counts is None or counts.answers is None:
            return self._draw_answers(name, keys, greatest.completion)
        return self._draw(name, keys, LengthDistribution(counts.answers), greatest.completion)

    def _draw_answers(self, name: str, keys: Keys, most: int) -> np.ndarray:
        if self.distributions.answers is None or most == 0:
            return np.full(len(keys), most, dtype=np.int64)
        return self._draw(name, keys, self.distributions.answers, most)

    def _draw(
        self,
        name: str,
        keys: Keys,
        distribution: LengthDistribution,
        most: int | None = None,
    ) -> np.ndarray:
        """Lengths by the seed, the name and the rows' keys alone, at most `most`."""
        draws = uniform(row_seeds(self._seed, f"{name}/length", keys), 0)
        lengths = distribution.at(draws)
        if most is None:
            return lengths
        return np.minimum(lengths, most)
