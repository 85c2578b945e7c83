"""Environments: what answers a model's turns, and where it runs.

Owns: the values that a graph names (which environment, in which processes), what a class must have,
functions as tools, several environments in one data set. Does not own: environments of other
packages (environment_kinds.py), running one (kernels/environments/), an episode
(kernels/interacting.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from dataflow.calls import call_error, declares, require, signature_of
from dataflow.operator import EVERY_COLUMN
from dataflow.prompt_types import Message

_CLASSES = ("native", "trl")
"""Adapters whose target is the user's own class."""
_PLACES = ("python", "processes", "isolation", "memory_mb", "cpu_seconds", "open_files")


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
    its `reset` takes, `*` for all; required: those without which it cannot.
    """

    adapter: str
    target: Any
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    columns: tuple[str, ...] = (EVERY_COLUMN,)
    required: tuple[str, ...] = ()
    python: str | None = None
    """The interpreter of its processes; None: that of the run."""
    processes: int = 1
    """Templates from which its episodes' processes are forked."""
    isolation: Literal["process", "shared"] = "process"
    memory_mb: int | None = None
    """Address space of an episode's process; None: no limit. As are the next two."""
    cpu_seconds: int | None = None
    open_files: int | None = None

    def __str__(self) -> str:
        """As a drawing shows it: `Game`, `tools(search, answer)`, `isolated(Game, processes=2)`."""
        targets = self.target if isinstance(self.target, tuple) else (self.target,)
        names = ", ".join(map(_name_target, targets))
        shown = names if self.adapter in _CLASSES else f"{self.adapter}({names})"
        settings: list[str] = []
        for each in fields(self):
            setting = getattr(self, each.name)
            if each.name in _PLACES and setting != each.default:
                settings.append(f"{each.name}={setting}")
        return f"isolated({shown}, {', '.join(settings)})" if settings else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentsByColumn:
    """Several environments, of which a dataset column names one for each row.

    column: of texts. kinds: the environments by these texts.
    """

    column: str
    kinds: Mapping[str, Environment]

    def __str__(self) -> str:
        kinds = [f"{name}: {kind}" for name, kind in self.kinds.items()]
        return f"environments_by({self.column}, {', '.join(kinds)})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The dataset columns that are asked for: those of all kinds, and the one that names."""
        names: dict[str, None] = {self.column: None}
        for kind in self.kinds.values():
            names.update(dict.fromkeys(kind.columns))
        return tuple(names)

    @property
    def required(self) -> tuple[str, ...]:
        """The column that names: what one kind cannot do without, rows of others may lack."""
        return (self.column,)


AnyEnvironment = Environment | EnvironmentsByColumn

EnvironmentClass = Callable[..., Any] | AnyEnvironment
"""What `interact` takes: a class, a function that makes an environment, or an environment as
`tools`, `isolated` and others make it.
"""


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
) -> AnyEnvironment:
    """An environment with processes of its own choosing.

    python: an interpreter with the environment's packages; its class is then imported there, by its
    name. processes: templates, from each of which episodes' processes are forked. isolation:
    `process` gives each episode a process; `shared` runs all episodes of a template in one event
    loop, for environments that wait for a server. memory_mb, cpu_seconds, open_files: limits of an
    episode's process. None of this is a sandbox: an environment reads and writes what its user may.

    Of `environments_by`, what is given here holds for each kind; the rest stays as a kind has it.
    """
    placed = as_environment(environment)
    if isinstance(placed, EnvironmentsByColumn):
        kinds: dict[str, Environment] = {}
        for name, kind in placed.kinds.items():
            kinds[name] = replace(
                kind,
                python=python or kind.python,
                processes=max(processes, kind.processes),
                isolation="shared" if "shared" in (isolation, kind.isolation) else "process",
                memory_mb=memory_mb or kind.memory_mb,
                cpu_seconds=cpu_seconds or kind.cpu_seconds,
                open_files=open_files or kind.open_files,
            )
        return replace(placed, kinds=MappingProxyType(kinds))
    return replace(
        placed,
        python=python,
        processes=processes,
        isolation=isolation,
        memory_mb=memory_mb,
        cpu_seconds=cpu_seconds,
        open_files=open_files,
    )


@declares
def tools(*functions: Callable[..., Any]) -> Environment:
    """Plain functions, sync or async, that the model may call as tools.

    What the model is told comes from each function's signature and docstring, in Google's style: a
    type for each parameter, what it does, and under `Args:` what each argument is. A call is
    answered with what the function returned: a string as it is, anything else as JSON. Calls that
    cannot be read, of unknown tools, with wrong arguments, or that raise, are answered with an
    error. The episode is over when the model calls no tool. Functions keep nothing between
    episodes; for that, write a class.

        def convert(amount: float, currency: Literal["EUR", "USD"]) -> float:
            \"""Converts an amount of pounds.

            Args:
                amount: In pounds.
                currency: What to convert to.
            \"""

        episodes = interact(policy, prompts, tools(convert), n=8, ...)

    Raises GraphError for a function without a docstring or without a type for each parameter, and
    for two of one name.
    """
    names: list[str] = []
    for function in functions:
        names.append(_require_tool(function))
    expected = "one or more functions, each of another name"
    fits = bool(names) and len(set(names)) == len(names)
    require("tools", "the tools", names, fits=fits, expected=expected, fix="tools(search, answer)")
    return Environment(adapter="tools", target=tuple(functions), columns=())


def _require_tool(function: Any) -> str:
    """Its name. Raises GraphError for what the model could not be told of."""
    like = 'def search(query: str) -> str, with a docstring """What it does."""'
    signature = signature_of(function, "tools", like)
    name = function.__name__
    if not name.isidentifier():
        raise call_error("tools", f"expected a function with a name, found {name}", like)
    if not inspect.getdoc(function):
        raise call_error(f"tools {name}", "expected a docstring, found none", like)
    for parameter in signature.parameters.values():
        if parameter.annotation is parameter.empty:
            problem = f"parameter {parameter.name!r} has no type"
            raise call_error(f"tools {name}", problem, f"{parameter.name}: str, or what it is")
    return name


@declares
def environments_by(column: str, kinds: Mapping[str, Any]) -> EnvironmentsByColumn:
    """Several environments in one data set: each row's `column` names the one that it is for.

    kinds: environments by the texts of that column, each as `interact` takes it, with its own
    processes and interpreter where it is `isolated`.

        environments_by("task", {"game": GuessNumber, "search": tools(search)})

    Raises GraphError for what is no environment, and for kinds within kinds.
    """
    is_name = isinstance(column, str) and bool(column)
    require(
        "environments_by",
        "column",
        column,
        fits=is_name,
        expected="a column's name",
        fix='environments_by("task", {...})',
    )
    is_table = isinstance(kinds, Mapping) and bool(kinds)
    fix = 'environments_by("task", {"game": GuessNumber})'
    require("environments_by", "kinds", kinds, fits=is_table, expected="a dict", fix=fix)
    environments: dict[str, Environment] = {}
    for name, kind in kinds.items():
        require(
            "environments_by",
            "a kind",
            name,
            fits=isinstance(name, str),
            expected="a text",
            fix=fix,
        )
        environment = as_environment(kind)
        if isinstance(environment, EnvironmentsByColumn):
            problem = f"kind {name!r} is an environments_by itself"
            raise call_error("environments_by", problem, "one column that names all kinds")
        environments[name] = environment
    return EnvironmentsByColumn(column=column, kinds=MappingProxyType(environments))


def as_environment(environment: Any) -> AnyEnvironment:
    """A user's own class, or a function that makes an environment, as an Environment; one that is
    an Environment already stays as it is. Raises GraphError for what has no `reset`.
    """
    if isinstance(environment, Environment | EnvironmentsByColumn):
        return environment
    if not callable(environment):
        problem = f"expected an environment's class, found {environment!r:.60}"
        raise call_error("interact", problem, "environment=MyEnvironment, the class itself")
    if not isinstance(environment, type):
        return Environment(adapter="native", target=environment)
    reset = getattr(environment, "reset", None)
    if not callable(reset):
        problem = f"expected a class with `reset`, found {environment.__name__}"
        raise call_error("interact", problem, "def reset(self, **row) -> str | None")
    adapter = "trl"
    if callable(getattr(environment, "step", None)):
        adapter = "native"
    parameters = _row_parameters(reset)
    required = (each.name for each in parameters if each.default is each.empty)
    return Environment(
        adapter=adapter,
        target=environment,
        columns=reset_columns(reset),
        required=tuple(required),
    )


def reset_columns(reset: Callable[..., Any]) -> tuple[str, ...]:
    """The dataset columns that a method `reset(self, seed=None, **row)` takes; `*` for all."""
    names = tuple(each.name for each in _row_parameters(reset))
    kinds = {each.kind for each in inspect.signature(reset).parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    return (*names, EVERY_COLUMN) if takes_all else names


def _name_target(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _row_parameters(reset: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a method `reset` that are dataset columns, by their names."""
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each for each in parameters if each.kind in by_name and each.name != "seed"]
