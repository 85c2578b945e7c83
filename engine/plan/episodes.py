"""Rows of several turns in a plan: which nodes write them, and where their environments run.

Owns: both. Does not own: how many keys wait between turns (passes/park_keys.py), an environment
(operators/environments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dataflow.node import Node
from dataflow.schema import Episode

PARKED_PART = "parked"
"""Of a node's bytes: the keys of rows between two turns."""


def writes_turns(node: Node) -> bool:
    """Whether a node generates rows of several turns."""
    makes_episodes = any(issubclass(schema, Episode) for schema in node.schemas)
    return node.operator.traits.generates and makes_episodes


def describe_environments(node: Node) -> Iterator[str]:
    """Say for each environment of a node in which processes its episodes run, and by which
    interpreter.
    """
    environment = node.params.get("environment")
    kinds = getattr(environment, "kinds", None)
    if not isinstance(kinds, Mapping):
        kinds = {"": environment}
    for kind, each in kinds.items():
        place = _describe_place(each)
        if place:
            name = f"{kind}: " if kind else ""
            yield f"environments: {name}{place}"


def _describe_place(environment: Any) -> str:
    """Where an environment's episodes run; empty for what says nothing of it."""
    isolation = getattr(environment, "isolation", None)
    if isolation is None:
        return ""
    count = int(environment.processes)
    processes = "1 process" if count == 1 else f"{count:,} processes"
    if isolation == "shared":
        how = f"all episodes in {processes}, with an event loop each"
    else:
        how = f"each episode in a process of its own, forked from {processes}"
    python = environment.python or "the run's python"
    return f"{_name_target(environment)}, {how}, {python}"


def _name_target(environment: Any) -> str:
    """What is run, by its name, or the names of several functions."""
    target = environment.target
    targets = target if isinstance(target, tuple) else (target,)
    names = [each if isinstance(each, str) else getattr(each, "__name__", "") for each in targets]
    return ", ".join(filter(None, names)) or str(environment.adapter)
