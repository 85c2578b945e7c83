"""A Model of a plan: who writes it, who reads it, how large it is.

Owns: these facts. Does not own: the routes' choice (passes/modules.py), sizes (passes/estimate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataflow.model import Part

WeightRoute = Literal["pull", "collective", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """One Model, or a Table, which has no base: who writes it, who reads it and how its versions
    get there.
    """

    name: str
    base: str
    dtype: str = ""
    """That it computes in; empty where it is its base's, and that is not on this machine."""
    writer: str = ""
    readers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Readers that share the writer's module."""
    follows: str = ""
    rate: float = 1.0
    every: int = 1
    parameters: int | None = None
    """Of its base, with its head."""
    part: Part = ""
    """What it has beside a base that never changes."""
    trained_parameters: int | None = None
    """Of that part: those that travel; None where there is none, or if unknown."""
    route: WeightRoute = "pull"
    """How versions reach readers in other Workers; a follower has its leader's."""
    seconds: float | None = None
    """Until each reader in another Worker has a version; None without one, or if unknown."""

    @property
    def version_parameters(self) -> int | None:
        """Parameters of a version; None if unknown."""
        if self.trained_parameters is not None:
            return self.trained_parameters
        return self.parameters

    @property
    def copying_readers(self) -> tuple[str, ...]:
        """Readers with a module of their own."""
        return tuple(reader for reader in self.readers if reader not in self.aliases)
