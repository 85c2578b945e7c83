"""The user's wishes for places: the planner's input besides the graph and the machine.

Owns: the data type. Does not own: the options (engine/options.py), the decisions (passes/place.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Spread = Literal["one", "auto", "apart"]
Weights = Literal["auto", "pull", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Wishes for Workers; the planner decides the rest.

    workers: `one` puts every node on `main`; `auto` does so at max_lag 0, and otherwise lets
    generation, columns and training overlap, in a Worker each; `apart` gives each node its own.
    pin: the Workers of a node, several for its replicas or ranks. together: nodes that share their
    Workers. replicas, chunks: of a node that keeps nothing between chunks. ranks: data-parallel
    ranks of a train node; shard: whether each keeps only a part of weights and optimizer. tensor:
    ranks in place of each of these, with the same rows and a part of each weight matrix. turns:
    Workers that take turns with the same devices. hosts: the host of a Worker, unless the first.
    weights: how versions reach readers in other Workers; `auto` is by collectives between devices,
    else by pull. inproc: put every node on `main` and ignore the rest, except for chunks (also
    those that replicas bring).
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
