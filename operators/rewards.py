"""Reward functions as users write them: TRL's signature, and verl's through an adapter.

Owns: the type, which dataset columns a function wants, its name, the adapter. Does not own: calling
the functions (operators/kernels/scoring.py), the rewards of procedural tasks (operators/tasks.py).

A function is called with keywords only: `prompts`, `completions`, `completion_ids`, dataset columns
by name, and `log_metric` and `log_extra` if it declares them; one of episodes also with those of
EPISODE_COLUMNS, and entries of its environment's state by name. It returns one number per
completion; None: does not apply.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataflow.calls import call_site, declares, require
from dataflow.errors import Fault, GraphError
from dataflow.metric_names import is_part, repair_part
from dataflow.operator import EVERY_COLUMN
from operators.tasks import completion_text

RewardFn = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""Sequence, not list: lists are invariant, and a type checker would refuse every function that
returns list[float].
"""

StepRewardFn = Callable[
    ..., Sequence[Sequence[float | None]] | Awaitable[Sequence[Sequence[float | None]]]
]
"""Returns for each completion one number for each of its steps."""

PASSED = ("prompts", "completions", "completion_ids", "log_metric", "log_extra")
"""Keywords that are not dataset columns."""

EPISODE_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "environments": "environment_state",
        "environment_state": "environment_state",
        "messages": "messages",
        "turn_rewards": "turn_reward",
        "final_reward": "final_reward",
        "finish": "finish",
    }
)
"""Keywords of functions of episodes, and the column that each is made of. `environments` is TRL's,
and so is also passed to a function with **kwargs.
"""

STEPS = "steps"
"""Passed besides to the function of `step_reward`."""

CALL_TIMEOUT = 30.0
"""Seconds that one call of a function may take, where the graph says nothing else."""

_SINGULAR = {"prompt": "prompts", "completion": "completions"}
_LONGEST = 100
"""Most characters of a function's name, which is part of a column's and a metric's."""
_LIKE = "def reward(completions, **kwargs) -> list[float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """The keywords that a function takes. everything: it has **kwargs."""

    names: tuple[str, ...]
    required: frozenset[str]
    everything: bool

    def takes(self, name: str) -> bool:
        """Whether the function can be called with this keyword."""
        return self.everything or name in self.names


def wants(fn: Callable[..., Any]) -> Wants:
    """What a reward function's signature asks for. Raises GraphError if it cannot be called with
    keywords.
    """
    name = _require_name(fn)
    parameters = _require_parameters(name, fn)
    _refuse_peers(name, fn, {p.name for p in parameters})
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in keywords if p.default is p.empty)
    for singular, passed in _SINGULAR.items():
        if singular in required:
            problem = f"it needs {singular!r}, and is called with lists"
            raise _unfit(name, problem, f"{passed!r}, a list with one for each completion")
    if "trainer_state" in required:
        raise _unfit(name, "it needs trainer_state, which only TRL's trainer has")
    names = tuple(p.name for p in keywords if p.name != "trainer_state")
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Wants(names=names, required=required, everything=everything)


def _refuse_peers(name: str, fn: Callable[..., Any], names: Collection[str]) -> None:
    """Raise GraphError for the reward of another system, with what makes it one of ours."""
    if isinstance(fn, type):
        raise _unfit(name, "expected a function, found a class", f"an object of it: {name}(...)")
    if {"solution_str", "ground_truth"} <= set(names):
        problem = f"it has the parameters of verl's compute_score ({_join_sorted(names)})"
        fix = f"verl_reward({name}){_describe_file_for_flag(name, fn)}"
        raise _unfit(name, problem, fix)
    if {"solution_strs", "ground_truths"} <= set(names):
        problem = f"it scores a batch as verl's BatchRewardManager asks it ({_join_sorted(names)})"
        raise _unfit(name, problem, f"{_LIKE}, or a function of one row in verl_reward(...)")
    if {"queries", "prompts"} <= set(names) or {"queries", "labels"} <= set(names):
        problem = f"it has the parameters of OpenRLHF's reward_func ({_join_sorted(names)})"
        fix = (
            "def reward(prompts, completions, answer, **kwargs) -> list[float]: a query is a prompt"
            " with its completion, labels are a column of the data by its name"
        )
        raise _unfit(name, problem, fix)


def _describe_file_for_flag(name: str, fn: Callable[..., Any]) -> str:
    """What a command line needs instead, whose flags name functions: a file of three lines."""
    code = getattr(fn, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return ""
    file = Path(code.co_filename)
    return (
        f"; for a flag, a file {file.stem}_ours.py beside {file.name} with the lines `from"
        f" operators.rewards import verl_reward`, `from {file.stem} import {name}` and `scored ="
        f" verl_reward({name})`, and then {file.stem}_ours.py:scored"
    )


def _join_sorted(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _require_name(fn: Callable[..., Any]) -> str:
    """The function's name. Raises GraphError if it cannot be part of a metric's."""
    name = reward_name(fn)
    if isinstance(name, str) and is_part(name) and len(name) <= _LONGEST:
        return name
    problem = (
        f"expected a name of 1 to {_LONGEST} letters, digits or any of _.:<>-, which is part of its"
        f" metrics' names, found {name!r:.60}"
    )
    fix = f"__name__ = {repair_part(str(name))[:_LONGEST]!r}"
    raise _unfit(type(fn).__name__, problem, fix)


def _require_parameters(name: str, fn: Callable[..., Any]) -> Collection[inspect.Parameter]:
    """The function's parameters. Raises GraphError if some cannot be passed by keyword."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise _unfit(name, f"expected a function with a signature, found {fn!r}") from error
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        problem = "expected parameters that can be given by keyword, found positional-only ones"
        raise _unfit(name, problem)
    return parameters


def reward_columns(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The dataset columns that a function wants by name, then `*` if it has **kwargs."""
    wanted = wants(fn)
    columns = tuple(name for name in wanted.names if name not in PASSED)
    if wanted.everything:
        return (*columns, EVERY_COLUMN)
    return columns


def episode_columns(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The columns that a function of episodes wants: those of the data, or entries of the state, by
    name, those that its keywords are made of, and `*` if it has **kwargs.
    """
    wanted = wants(fn)
    columns = [EPISODE_COLUMNS.get(name, name) for name in reward_columns(fn)]
    if wanted.takes("environments"):
        columns.append(EPISODE_COLUMNS["environments"])
    if wanted.takes("prompts") or wanted.takes("completions"):
        # Where prompts are messages, both are parts of the conversation.
        columns.append(EPISODE_COLUMNS["messages"])
    return tuple(dict.fromkeys(columns))


def engine_names(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The keywords with which a reward node gives its functions the engine's own values. A
    dataset column of such a name is not passed.
    """
    offered = [*PASSED]
    if "split" in params:
        offered.append(STEPS)
    if params.get("episodes"):
        offered += EPISODE_COLUMNS
    wants_by_function = [wants(fn) for fn in params["fns"]]
    names: list[str] = []
    for name in offered:
        if any(wanted.takes(name) for wanted in wants_by_function):
            names.append(name)
    return tuple(names)


def reward_name(fn: Callable[..., Any]) -> str:
    """The name under which a function is logged: its own, or its class's."""
    if isinstance(fn, functools.partial):
        return reward_name(fn.func)
    name = getattr(fn, "__name__", type(fn).__name__)
    return "lambda" if name == "<lambda>" else name


def reward_names(fns: Iterable[RewardFn]) -> tuple[str, ...]:
    """Names in order; the second of a name gets the suffix _2."""
    names: list[str] = []
    for name in map(reward_name, fns):
        # One more candidate than there are names: one of them is free.
        candidates = [name, *(f"{name}_{i}" for i in range(2, len(names) + 2))]
        names.append(next(each for each in candidates if each not in names))
    return tuple(names)


def part_names(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of each function of a reward node, in its metrics and its columns."""
    return params.get("part_names") or reward_names(params["fns"])


@dataclass(frozen=True)
class VerlReward:
    """A verl function as a RewardFn; a value, so graphs with it can be compared and stored."""

    compute_score: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return reward_name(self.compute_score)

    def __call__(
        self,
        completions: Sequence[Any],
        data_source: Sequence[str],
        reward_model: Sequence[dict[str, Any]],
        log_metric: Callable[[str, float], None],
        extra_info: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """One score per completion; awaitable if the function is async."""
        infos = extra_info if extra_info is not None else [None] * len(completions)
        truths = [model.get("ground_truth") for model in reward_model]
        texts = map(completion_text, completions)  # of an episode what the model wrote last
        returned: list[Any] = []
        for source, text, truth, info in zip(data_source, texts, truths, infos, strict=True):
            score = self.compute_score(
                data_source=source, solution_str=text, ground_truth=truth, extra_info=info
            )
            returned.append(score)
        if any(map(inspect.isawaitable, returned)):
            return _await_scores(returned, log_metric)
        return [_read_score(score, log_metric) for score in returned]


@declares
def verl_reward(compute_score: Callable[..., Any]) -> RewardFn:
    """A verl function, `compute_score(data_source, solution_str, ground_truth, extra_info)`, as a
    RewardFn. Of an episode solution_str is the model's last message.

    It returns a number, or a dict with `score`, whose other numbers become metrics; it may be
    async. Reads the columns of verl's Parquet: data_source, reward_model (its ground_truth) and, if
    present, extra_info.
    """
    require(
        "verl_reward",
        "compute_score",
        compute_score,
        fits=callable(compute_score),
        expected="a function",
        fix="verl_reward(compute_score)",
    )
    return VerlReward(compute_score)


async def _await_scores(
    awaitables: Sequence[Awaitable[Any]], log_metric: Callable[[str, float], None]
) -> list[float | None]:
    # Here: it takes 2 MiB in each Worker, for async functions alone.
    import asyncio

    returned = await asyncio.gather(*awaitables)
    return [_read_score(score, log_metric) for score in returned]


def _read_score(returned: Any, log_metric: Callable[[str, float], None]) -> float | None:
    """The score of what verl's function returned, whose other numbers are logged."""
    if not isinstance(returned, dict):
        return returned
    for name, number in returned.items():
        if name != "score" and isinstance(number, int | float):
            log_metric(name, float(number))
    return returned["score"]


def _unfit(name: str, problem: str, fix: str = _LIKE) -> GraphError:
    where = f"reward {name!r}"
    return GraphError(
        Fault(rule="reward", where=where, problem=problem, fix=fix, origin=call_site())
    )
