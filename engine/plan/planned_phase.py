"""A plan's place in a Program.

Owns: the data type. Does not own: the phases' plans together (program_plan.py), what a phase leaves
in checkpoints (engine/session/phases.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.carried_weights import Carried


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """A plan's place in a Program: phase `number`, from 1, of `count`. Known once it begins:
    boundaries, the Step of the run after which each phase before ended; pinned, those of them whose
    checkpoints have to stay. By directory: starts, the weights that Models begin with; states, of
    train nodes whose optimizer goes on; left, all that earlier phases changed.
    """

    program: str
    number: int
    count: int
    title: str
    carried: Mapping[str, Carried] = field(default_factory=dict)
    """Models that do not begin with their base, and whose weights they begin with."""
    boundaries: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The Steps of the run before this phase."""
        return self.boundaries[-1] if self.boundaries else 0
