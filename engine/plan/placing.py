"""What somebody asked for about places: the planner's input beside the graph and the machine.

Owns: the data type. Does not own: the options that it comes from (engine/options.py), nor what
is decided from it (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Which Workers there are to be, as far as it was said; the planner decides the rest.

    workers: `one` puts every node on `main`; `auto` does so at max_lag 0, and above it lets
    generation, columns and training have a Worker each, so that they overlap; `apart` gives each
    node one of its own. pin: the Workers of a node, several for its replicas or ranks. together:
    nodes that share their Workers. replicas, chunks: of a node that keeps nothing between chunks.
    ranks: data-parallel ranks of a train node; shard: whether each of them keeps a part of weights
    and optimizer, not all. tensor: ranks in the place of each of these, which have the same rows
    and a part of each weight matrix. turns: Workers on the same devices, which take turns. hosts:
    the host of a Worker, where that is not the first one. weights: how versions reach readers in
    other Workers; `auto` is by collectives between devices, else by pull. inproc: all of this, but
    for chunks (those that replicas bring too), is put aside, and every node is on `main`.
    """

    workers: Spread = "auto"
    pin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    tensor: Mapping[str, int] = field(default_factory=dict)
    shard: bool = False
    turns: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    weights: Weights = "auto"
    inproc: bool = False
