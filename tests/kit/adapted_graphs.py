"""Graphs of the other tests, whose trained Models have an adapter each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataflow.adapters import Adapter, lora
from dataflow.graph import Graph, Inputs, States
from dataflow.model import Model, State
from dataflow.node import Node
from engine.api import resume
from tests.kit import runs
from tests.kit.tiny_runs import TinyRuns

RANK = 4


def adapted(
    make: Callable[..., Graph], *arguments: Any, adapter: Adapter = None, **options: Any
) -> Callable[[Path], Graph]:
    """What makes a graph in a folder, with an adapter for each Model that it trains."""

    def make_adapted(folder: Path) -> Graph:
        graph = make(*arguments, folder, **options)
        return with_adapters(graph, adapter or lora(rank=RANK))

    return make_adapted


def with_adapters(graph: Graph, adapter: Adapter) -> Graph:
    """The graph with this adapter in each Model that it trains, and in their followers."""

    def make(node: Node, inputs: Inputs, states: States) -> Node:
        changed = {param: _adapt(state, adapter) for param, state in states.items()}
        return node.rebuilt(inputs, changed)

    return graph.remade(make)


def _adapt(state: State, adapter: Adapter) -> State:
    if not isinstance(state, Model):
        return state
    if state.follows is not None:
        leader = _adapt(state.follows, adapter)
        assert isinstance(leader, Model)
        return replace(state, follows=leader, adapter=adapter)
    return replace(state, adapter=adapter) if state.trainable else state


def require_same_when_resumed(tiny: TinyRuns, graph: Graph) -> None:
    """A run that is resumed after two Steps has the third, and its weights, to the bit."""
    whole = tiny.run(graph, 3, name="whole")
    part = tiny.run(graph, 2, name="part")
    again = resume(part.folder, steps=3)
    assert runs.timeless(runs.metrics(again))[-1] == runs.timeless(runs.metrics(whole))[-1]
    first, second = (list(runs.weights(run).values()) for run in (again, whole))
    assert first == second
