"""Where a drawing puts nodes: on Workers, with their hosts and devices.

Owns: these types. Does not own: how it is decided (the engine's plan).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """One Worker. host: empty for the only one. devices: numbers of its GPUs. threads: of its
    cores; 0 if not known.
    """

    name: str
    host: str = ""
    devices: tuple[int, ...] = ()
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A graph's nodes on Workers.

    nodes: node -> its Workers, replica by replica, each with its ranks in order. ranks: node -> how
    many Workers are one replica; 1 where it is not named.
    """

    workers: tuple[PlacedWorker, ...]
    nodes: Mapping[str, tuple[str, ...]]
    ranks: Mapping[str, int] = field(default_factory=dict)
