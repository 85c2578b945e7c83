"""What a kernel of an operator needs, for the planner to choose by.

Owns: the declaration. Does not own: the choice (engine/plan/passes/kernels.py), any kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """By default nothing.

    package: to import, and install: the command that brings it. types: `model_type`s of a Model
    that it can read; none: all. head_sizes: of attention, where there is no GPU; none: all.
    follower: whether it can read a Model that moves towards another's weights. engine: it runs an
    engine, which changes the process that it is in: the nodes that read one Model share it, in a
    Worker with no other node that computes, and it has its own copy of the weights. ranks: whether
    an engine can have tensor ranks. environment: of the engine's process; the user's own variables
    stay.
    """

    package: str = ""
    install: str = ""
    types: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    follower: bool = True
    engine: bool = False
    ranks: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
