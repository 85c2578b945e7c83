"""The user's wishes for places: the planner's input besides the graph and the machine.

Owns: the data type. Does not own: the options (engine/options.py), the decisions (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective"]
Samples = Literal["brief", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Wishes for Workers, which the options of these names explain; the planner decides the rest.

    pin: the Workers of a node, several for its replicas or ranks. hosts: of Workers that are not on
    the first. inproc: all nodes are on `main`; of the rest only chunks count (also by replicas).
    least: of nodes whose replicas come and go, how many there are at the beginning; `replicas` are
    the most. samples: what is recorded of a Step's rows.
    """

    workers: Spread = "auto"
    kernel: Mapping[str, str] = field(default_factory=dict)
    pin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    tensor: Mapping[str, int] = field(default_factory=dict)
    shard: bool = False
    turns: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = "auto"
    inproc: bool = False
    samples: Samples = "brief"
