"""Weights that one phase of a Program takes over from another.

Owns: how they are named. Does not own: which they are (program.py), where they lie on disk
(engine/session/phases.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The weights that a Model had at the end of an earlier phase, which is counted from 1.
    is_adapter: they are those of its adapter alone.
    """

    phase: int
    model: str
    is_adapter: bool = False
