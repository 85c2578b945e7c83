"""What is heard and said of replicas that come and go while a run goes on.

Owns: these values; messages.py puts them among all others. Does not own: what follows from them
(engine/coordinator/replicas.py), nor who carries them out (engine/protocol/workers.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """Someone wants so many replicas of a node. Beyond its least and most, those count."""

    node: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """These Workers have to end soon, as their machine is taken away."""

    workers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing has come for a while, and a replica's time to leave may be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Respawn:
    """Kill what is left of these Workers, and start each with its next epoch: its first one if it
    was never there. Where there is no room for one, it opens whenever there is.
    """

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """End these Workers, opened or not, and report no loss: nothing that they have is wanted."""

    workers: tuple[str, ...]
