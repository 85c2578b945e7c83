"""What a kernel needs of its node, its Model and its Worker.

Owns: the data type. Does not own: the needs of any kernel (operators), what follows from them for a
plan (engine/plan).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a kernel; a kernel that declares none takes whatever the check accepts.

    packages: that can be imported; install: the command for them. model_types, dtypes, head_sizes:
    of its Model, None for all; head_sizes bind on CPU only.
    """

    packages: tuple[str, ...] = ()
    install: str = ""
    model_types: frozenset[str] | None = None
    dtypes: tuple[str, ...] | None = None
    head_sizes: tuple[int, ...] | None = None
    some_windows: bool = True
    """Whether it takes Models in which only some layers have a sliding window."""
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NONE)
    """The values that it takes of some of its node's parameters."""
    follower: bool = True
    """Whether its Model may follow another, which moves by its own steps."""
    shares_module: bool = True
    """Whether it computes with a module that kernels of other names in its Worker use too."""
    own_worker: bool = False
    """Whether nothing else may compute with a Model in its Worker. Nodes that run the same kernel
    with the same Model may."""
    tensor: bool = False
    """Whether it starts tensor ranks of its own, inside of its one Worker (Layout.inner)."""
    ranks: bool = False
    """Whether several Workers can be one replica of it, each with a part of every matrix
    (Layout.tensor), or of the tokens of finished rows (Layout.context). A train kernel's can
    without saying so.
    """
    adapter_ranks: tuple[int, ...] = ()
    """Up to which ranks it has room for an adapter, ascending; empty: for any."""
    cache: bool = False
    """Whether it keeps keys and values in memory of a fixed size (Layout.cache_bytes)."""
    memory: int = 0
    """Bytes of host memory that a process with it has, besides those of any Worker."""
    seconds: float = 0.0
    """About how long it takes to open."""
    pays_off: int = 0
    """Tokens of an answer from which on it pays to interrupt it for new weights, after which it
    computes prompts and answers again."""
    on_cpu: tuple[str, ...] = ()
    """What explain says of it where its host has no GPU: what was chosen, and what else costs."""
    environment: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """Variables of its Worker's process; those that the user has set stay."""
    cpu_environment: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """Further ones where its host has no GPU."""


NO_NEEDS = Needs()
