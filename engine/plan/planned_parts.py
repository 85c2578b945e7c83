"""What a plan has beside nodes: the ranks of a node, and the edges between nodes.

Owns: these data types. Does not own: nodes and the plan (plan.py), who makes them (passes/).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """One Worker of a replica that runs on several in lock-step. index: its number in `Layout`."""

    worker: str
    index: int = 0
    share: int = 0
    """Its share of a Step's rows."""
    part: int = 0
    """Its part of each weight matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEdge:
    """One data edge: its columns, bytes a Step and route."""

    producer: str
    consumer: str
    columns: tuple[str, ...]
    bytes: int
    route: str
    device: tuple[str, ...] = ()
    """Columns whose values stay on devices and travel by collectives."""
    seconds: float | None = None
    """Until a Step's rows have moved; None where a device is not known."""
    saved: int = 0
    """Bytes of declared columns that stay, since nobody downstream reads them."""
