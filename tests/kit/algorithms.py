"""The graphs that are shipped, each with arguments small enough for the tiny model.

What a graph function's parameter gets follows from its name: one name, one meaning.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataflow.graph import Graph
from dataflow.node import Node
from engine.cli.graphs import shipped_graphs
from tests.kit.environments import VowelTurns
from tests.kit.run_graphs import vowels, vowels_of_steps

NAMES = tuple(shipped_graphs())

MODELS = ("base", "setter_base", "solver_base", "ranker_base")
"""Parameters that are a model directory."""

DATA = {"sft": "demos", "dpo": "pairs"}
"""The file of `data`, if it is not train.parquet."""

NUMBERS: dict[str, Any] = {
    "n": 4,
    "max_turns": 4,
    "max_turn_tokens": 5,
    "batch": 4,
    "demo_batch": 4,
    "max_tokens": 6,
    "buffer": 2,
    "minibatches": 2,
    "epochs": 1,
    "above": -1.0,
    "split": "e",
    "top_k": 8,
    "lr": 1e-3,
    "critic_lr": 1e-2,
    "ranker_lr": 1e-2,
}

OF_EPISODES = {"max_tokens": 16}
"""Of graphs that take an environment: some of its three turns do not fit."""


def function_of(name: str) -> Callable[..., Graph]:
    """The graph function of the file graphs/NAME.py."""
    return getattr(importlib.import_module(f"graphs.{name}"), name)


def small(name: str, folder: Path, **changes: Any) -> Graph:
    """A shipped graph on the tiny inputs in a folder (`save_tiny_inputs`)."""
    function = function_of(name)
    known = {
        "data": str(folder / f"{DATA.get(name, 'train')}.parquet"),
        "demos": str(folder / "demos.parquet"),
        "teacher": str(folder / "teacher"),
        "reward_fn": vowels,
        "step_fn": vowels_of_steps,
        **dict.fromkeys(MODELS, str(folder / "model")),
        "environment": VowelTurns,
        **NUMBERS,
    }
    taken = inspect.signature(function).parameters
    if "environment" in taken:
        known |= OF_EPISODES
    return function(**{name: known[name] for name in taken if name in known} | changes)


def generates(graph: Graph) -> bool:
    return any(node.operator.traits.generates for node in graph.nodes)


def lagging(graph: Graph, lag: int) -> Graph:
    """The graph with this max_lag in each generation."""

    def change(node: Node) -> Node:
        made = node.operator.traits.generates
        return node.changed(params=node.params | {"max_lag": lag}) if made else node

    return graph.map(change)
