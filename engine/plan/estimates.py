"""What a node should cost at most, and what a Worker's process takes, as a plan says it.

Owns: the data types. Does not own: the numbers (passes/estimate.py, engine/plan/passes/seconds.py,
passes/processes.py).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dataflow.attention_paths import AttentionPath
from engine.plan.cost.devices import Origin
from engine.plan.cost.model_passes import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """Bytes of a Worker's process beside its nodes."""

    imported: int
    """Before its kernels are opened."""
    used: int
    """As it works."""
    template: str = ""
    """The template that it is forked from, with which it shares what that imported; empty for an
    interpreter of its own.
    """

    @property
    def total(self) -> int:
        """Imported and used together."""
        return self.imported + self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Greatest predicted cost of a node: bytes by part, seconds a Step (None if unknown), what
    bounds these (empty for a node without a Model), and where the rates come from.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    bound: Bound | Literal[""] = ""
    origin: Origin = "catalogue"
    attention: tuple[AttentionPath, ...] = ()
    """The paths that compute its attention over packed rows, as the rule chooses them for what its
    Model's config.json says; none where that is unknown, or it feeds no finished rows to a Model.
    """

    exchanged: int = 0
    """Bytes that each context rank sends, and receives, for attention in the largest pass, and in
    the backward one if there is one; 0 without such ranks.
    """

    @property
    def tree_path(self) -> AttentionPath:
        """The path over the prefix tree; where none is known, the dense one, which takes most."""
        if not self.attention:
            return "dense"
        return self.attention[0]

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.bytes.values())

    def without(self, parts: Container[str]) -> Estimate:
        """The estimate where some parts are not."""
        others = {part: size for part, size in self.bytes.items() if part not in parts}
        return replace(self, bytes=others)

    def on_each(self, devices: int) -> Estimate:
        """The estimate for one of so many devices, among which the node is divided."""
        sizes = {part: -(-size // devices) for part, size in self.bytes.items()}
        return replace(self, bytes=sizes)
