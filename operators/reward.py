"""Rewards by the user's own functions.

Owns: the declaration, and which dataset columns the functions read. Does not own: the
functions' signatures (rewards.py), the processes that they run in (kernels/scoring.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from dataflow.calls import call_error, declares, require
from dataflow.limits import choice, number, text
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same
from dataflow.schema import Completion, Episode, Reward, Segment, TokenReward
from operators.rewards import (
    CALL_TIMEOUT,
    STEPS,
    RewardFn,
    StepRewardFn,
    episode_columns,
    reward_columns,
    wants,
)
from operators.weights import require_weights

REWARD = Operator(
    path="operators.reward:REWARD",
    name="reward",
    work="host",
    rows=Same("rows"),
    inputs=(
        Input(
            name="rows",
            schema=Completion,
            columns=("completion", "completion_ids"),
            ancestors=("prompt",),
            readable=True,
            ancestors_from="columns",
            required_from="required",
            engine_names="operators.rewards:engine_names",
            entries_of="environment_state",
        ),
    ),
    outputs=(Reward,),
    parts="reward/*",
    part_names="operators.rewards:part_names",
    kernels={"host": "operators.kernels.scoring:HostReward"},
    limits={
        "timeout": number(0.0, above=True, like=CALL_TIMEOUT),
        "on_error": choice("stop", "drop_group"),
    },
)

GROUP_REWARD = Operator(
    path="operators.reward:GROUP_REWARD",
    name="reward",
    work="host",
    scope="group",
    rows=REWARD.rows,
    inputs=REWARD.inputs,
    outputs=REWARD.outputs,
    parts=REWARD.parts,
    part_names=REWARD.part_names,
    kernels=REWARD.kernels,
    limits=REWARD.limits,
)

_SPLIT = text(like="\n\n", filled=True)

STEP_REWARD = Operator(
    path="operators.reward:STEP_REWARD",
    name="step_reward",
    work="host",
    rows=REWARD.rows,
    inputs=(
        replace(REWARD.inputs[0], columns=("completion", "completion_ids", "completion_mask")),
    ),
    outputs=(TokenReward,),
    parts=REWARD.parts,
    part_names=REWARD.part_names,
    decodes="rows",
    kernels={"host": "operators.kernels.step_scoring:StepReward"},
    limits={**REWARD.limits, "split": _SPLIT},
)


@declares
def reward(
    fn: RewardFn | Sequence[RewardFn],
    rows: Port[Completion],
    *,
    weights: Sequence[float] | None = None,
    scope: Literal["row", "group"] = "row",
    timeout: float = CALL_TIMEOUT,
    on_error: Literal["stop", "drop_group"] = "stop",
    name: str = "reward",
) -> Port[Reward]:
    """A number for each completion, from one function or a weighted sum of several, each in its
    own process.

    A function has TRL's signature: keywords only, `prompts`, `completions`, `completion_ids` and
    every dataset column by name; it may be async, and returns None for a row to which it does not
    apply. It may be called on any chunk of rows; one that compares a prompt's completions needs
    scope="group". timeout: seconds per call. on_error: what happens after an exception, a wrong
    length, a NaN or a time-out.

    Of episodes whose prompts are messages, `prompts` are the messages up to the model's first turn,
    with what the environment's `reset` added, and `completions` all that follow, tool calls and
    answers included, as TRL passes them; of others both are text. Further keywords: `environments`
    (TRL's: an object for each row, with the entries of the environment's exported state as
    attributes), `environment_state` (these as dicts), `messages` (the whole conversation),
    `turn_rewards`, `final_reward` and `finish`. A parameter that is no column of the data gets the
    state's entry of that name, None where a row has none. Of an episode that has several rows, a
    function sees the last one, with the whole conversation; the others have reward 0, as an
    episode's reward is the sum of its rows'.
    """
    fns = _list_functions(fn)
    _require_functions(fns, weights, scope)
    if weights is not None:
        weights = tuple(map(float, weights))
    params: dict[str, Any] = {
        "fns": fns,
        "weights": weights,
        "timeout": timeout,
        "on_error": on_error,
    }
    params |= _list_columns(fns, rows)
    if isinstance(rows, Port) and issubclass(rows.schema, Segment):
        params["segments"] = True
        params["columns"] = tuple(dict.fromkeys([*params["columns"], "finish"]))
    operator = GROUP_REWARD if scope == "group" else REWARD
    return Node(operator, name, inputs={"rows": rows}, params=params).port()


@declares
def step_reward(
    fn: StepRewardFn,
    rows: Port[Completion],
    *,
    split: str = "\n\n",
    timeout: float = CALL_TIMEOUT,
    on_error: Literal["stop", "drop_group"] = "stop",
    name: str = "step_reward",
) -> Port[TokenReward]:
    """A number for each step of each completion, on the step's last token: process rewards
    (Lightman et al., arXiv:2305.20050); `reward` is their sum.

    Steps are the pieces of the answer's text between `split`s, empty ones left out; an answer
    without text has none, and reward 0. The function is called as that of `reward`, with one
    keyword more: `steps`, the list of each completion's steps. It returns for each completion a
    list with a number for each of its steps, or None for a step to which it does not apply, which
    counts 0; a completion with steps and no number at all is an error as in `reward`. A step ends
    at the token that completes its separator, the last one, where no separator follows, at the
    answer's last token. Its number is put on the last trained token up to there (without one, on
    the first trained token), so tool output, which is part of the text, gets none. timeout,
    on_error: as in `reward`.
    """
    _require_steps(fn)
    require(
        "step_reward",
        "split",
        split,
        fits=_SPLIT.accepts(split),
        expected=_SPLIT.describe(),
        fix='split="\\n\\n"',
    )
    params: dict[str, Any] = {
        "fns": (fn,),
        "split": split,
        "timeout": timeout,
        "on_error": on_error,
    }
    params |= _list_columns((fn,), rows, without=STEPS)
    return Node(STEP_REWARD, name, inputs={"rows": rows}, params=params).port()


def _list_columns(fns: Sequence[Any], rows: Any, *, without: str = "") -> dict[str, Any]:
    """The parameters `columns` and `required`, and for rows that are episodes `episodes`. without:
    a keyword that is no column.
    """
    has_episodes = isinstance(rows, Port) and issubclass(rows.schema, Episode)
    columns_of = reward_columns
    if has_episodes:
        columns_of = episode_columns
    columns: dict[str, None] = {}
    required: set[str] = set()
    for fn in fns:
        columns.update(dict.fromkeys(columns_of(fn)))
        required.update(wants(fn).required)
    columns.pop(without, None)
    params: dict[str, Any] = {
        "columns": tuple(columns),
        "required": tuple(column for column in columns if column in required),
    }
    if has_episodes:
        params["episodes"] = True
    return params


def _require_steps(fn: StepRewardFn) -> None:
    """Raise GraphError for anything but one function that takes `steps`."""
    fix = "def f(completions, steps, **kwargs) -> list[list[float]]"
    if not callable(fn):
        if isinstance(fn, Sequence) and not isinstance(fn, str):
            fix = "add(step_reward(f, rows), step_reward(g, rows, name=...))"
        problem = f"expected a function, found {type(fn).__name__} {fn!r:.60}"
        raise call_error("step_reward", problem, fix)
    wanted = wants(fn)
    if not wanted.takes(STEPS):
        problem = f"expected a function that takes `steps`, found {', '.join(wanted.names)}"
        raise call_error("step_reward", problem, fix)


_SCOPE = choice("row", "group")


def _list_functions(fn: Any) -> tuple[RewardFn, ...]:
    """One function, or those of a list; a string is not a list of functions."""
    functions: Any = (fn,)
    if isinstance(fn, Sequence) and not isinstance(fn, str):
        functions = fn
    return tuple(functions)


def _require_functions(
    fns: tuple[RewardFn, ...], weights: Sequence[float] | None, scope: str
) -> None:
    others = [fn for fn in fns if not callable(fn)]
    if others or not fns:
        found_text = f"{type(others[0]).__name__} {others[0]!r:.60}" if others else "none"
        problem = f"expected a function or a list of them, found {found_text}"
        raise call_error("reward", problem, "reward(fn, rollout), the function itself")
    fix = f"scope={_SCOPE.suggestion(scope)!r}"
    require(
        "reward", "scope", scope, fits=_SCOPE.accepts(scope), expected=_SCOPE.describe(), fix=fix
    )
    require_weights("reward", weights, len(fns), "function")
