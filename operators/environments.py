"""Environments: what answers a model's turns, and where it runs.

Owns: the values that a graph names (which environment, in which processes), and what a class must
have. Does not own: running one (kernels/environments/), an episode (kernels/interacting.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from dataflow.calls import call_error, declares
from dataflow.operator import EVERY_COLUMN
from dataflow.prompt_types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment's `step` returns. messages: to the model, in OpenAI's form; a string is
    one user message. reward: of the turn, None for none. done: whether the episode is over.

    Any object with these attributes will do, or a tuple of the three.
    """

    messages: Sequence[Message] | str = ()
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment and the processes that it runs in.

    adapter: how it is spoken to, a module of kernels/environments/child/adapters. target: a class,
    a function of no arguments that makes one, functions, or a name that the adapter knows.
    arguments: what the adapter passes on, as JSON can hold it. columns: the dataset columns that
    its `reset` takes, `*` for all.
    """

    adapter: str
    target: Any
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    columns: tuple[str, ...] = (EVERY_COLUMN,)
    python: str | None = None
    """The interpreter of its processes; None: that of the run."""
    processes: int = 1
    """Templates from which its episodes' processes are forked."""
    isolation: Literal["process", "shared"] = "process"
    memory_mb: int | None = None
    """Address space of an episode's process; None: no limit. As are the next two."""
    cpu_seconds: int | None = None
    open_files: int | None = None


@declares
def isolated(
    environment: Any,
    *,
    python: str | None = None,
    processes: int = 1,
    isolation: Literal["process", "shared"] = "process",
    memory_mb: int | None = None,
    cpu_seconds: int | None = None,
    open_files: int | None = None,
) -> Environment:
    """An environment with processes of its own choosing.

    python: an interpreter with the environment's packages; its class is then imported there, by its
    name. processes: templates, from each of which episodes' processes are forked. isolation:
    `process` gives each episode a process; `shared` runs all episodes of a template in one event
    loop, for environments that wait for a server. memory_mb, cpu_seconds, open_files: limits of an
    episode's process. None of this is a sandbox: an environment reads and writes what its user may.
    """
    return replace(
        as_environment(environment),
        python=python,
        processes=processes,
        isolation=isolation,
        memory_mb=memory_mb,
        cpu_seconds=cpu_seconds,
        open_files=open_files,
    )


def as_environment(environment: Any) -> Environment:
    """A user's own class, or a function that makes an environment, as an Environment; one that is
    an Environment already stays as it is. Raises GraphError for what has no `reset`.
    """
    if isinstance(environment, Environment):
        return environment
    if not callable(environment):
        problem = f"expected an environment's class, found {environment!r:.60}"
        raise call_error("interact", problem, "environment=MyEnvironment, the class itself")
    made = environment if isinstance(environment, type) else None
    if made is not None and not callable(getattr(made, "reset", None)):
        problem = f"expected a class with `reset`, found {made.__name__}"
        raise call_error("interact", problem, "def reset(self, **row) -> str | None")
    is_trl = made is not None and not callable(getattr(made, "step", None))
    columns = reset_columns(made.reset) if made is not None else (EVERY_COLUMN,)  # type: ignore[attr-defined]
    return Environment(adapter="trl" if is_trl else "native", target=environment, columns=columns)


def reset_columns(reset: Callable[..., Any]) -> tuple[str, ...]:
    """The dataset columns that a method `reset(self, seed=None, **row)` takes; `*` for all."""
    columns: list[str] = []
    for parameter in list(inspect.signature(reset).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            columns.append(EVERY_COLUMN)
        elif parameter.name != "seed" and parameter.kind is not parameter.VAR_POSITIONAL:
            columns.append(parameter.name)
    return tuple(columns)
