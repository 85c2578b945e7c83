"""Interaction: one operator that turns prompts into episodes of several turns.

Owns: the declaration. Does not own: environments (environments.py), what an episode is
(kernels/interacting.py), samplers (kernels/torch, kernels/vllm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from dataflow.calls import require
from dataflow.limits import choice, number, whole
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.operator import Expand, Input, Operator, declares
from dataflow.prompt_types import Message
from dataflow.schema import (
    Episode,
    Prompt,
    Segment,
    TruncatedEpisode,
    TruncatedSegment,
    Weight,
)
from operators.environments import as_environment
from operators.generate import (
    GENERATE,
    KEYED,
    WEIGHT,
    truncates,
    tuple_of_stops,
    weighted_inputs,
)
from operators.vllm_needs import VLLM

_SHARED_LIMITS = (
    "n", "max_tokens", "max_prompt_tokens", "overlong_prompt", "temperature", "top_p", "top_k",
    "stop", "max_lag", "on_update", "sampler", "merge",
)  # fmt: skip
"""Parameters that mean what they mean to `generate`."""

_PROMPT = Input(
    name="prompt",
    schema=Prompt,
    columns=Prompt.shown,
    ancestors_from="columns",
    required_from="required",
)

_LIMITS = {name: GENERATE.limits[name] for name in _SHARED_LIMITS}

_ROW_LIMITS = {
    "max_turns": whole(1, like=8),
    "max_turn_tokens": whole(1, like=512, optional=True),
    "max_context": whole(2, like=4096, optional=True),
    "parked_tokens": whole(1, like=65536, optional=True),
    "overflow": choice("stop", "drop_group", "segment"),
    "segments": whole(1, like=4),
    "thinking": choice("keep", "template"),
}

_SECONDS = {
    "reset_timeout": number(0.0, above=True, like=60.0),
    "step_timeout": number(0.0, above=True, like=60.0),
    "timeout": number(0.0, above=True, like=1800.0),
}

_FAILURE_LIMITS = {
    "retries": whole(0, like=1),
    "pace": choice("rounds", "free", optional=True),
    "on_error": choice("drop_row", "drop_group", "stop"),
}

_KERNELS = {
    "torch": "operators.kernels.torch.interact:TorchInteract",
    "vllm": "operators.kernels.vllm.interact:VllmInteract",
}

INTERACT = Operator(
    path="operators.interact:INTERACT",
    name="interact",
    work="decode",
    rows=Expand("prompt", "n", times="segments"),
    inputs=(_PROMPT, WEIGHT),
    outputs=(Episode,),
    reads=("policy",),
    kernels=_KERNELS,
    needs={"torch": KEYED, "vllm": VLLM},
    replayed=GENERATE.replayed,
    limits=_LIMITS | _ROW_LIMITS | _SECONDS | _FAILURE_LIMITS,
)


@declares
def interact(
    policy: Model,
    prompt: Port[Prompt],
    environment: Any,
    *,
    n: int = 1,
    max_turns: int,
    max_tokens: int,
    max_turn_tokens: int | None = None,
    max_context: int | None = None,
    overflow: Literal["stop", "drop_group", "segment"] = "stop",
    segments: int = 1,
    compact: Callable[[list[Message]], Sequence[Message]] | None = None,
    thinking: Literal["keep", "template"] = "keep",
    max_prompt_tokens: int | None = None,
    overlong_prompt: Literal["error", "drop", "truncate"] = "error",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: str | Sequence[str] = (),
    max_lag: int = 0,
    on_update: Literal["interrupt", "drain"] = "interrupt",
    sampler: Literal["keyed", "vllm"] = "keyed",
    merge: bool = False,
    reset_timeout: float = 60.0,
    step_timeout: float = 60.0,
    timeout: float = 1800.0,
    parked_tokens: int | None = None,
    retries: int = 1,
    pace: Literal["rounds", "free"] | None = None,
    on_error: Literal["drop_row", "drop_group", "stop"] = "drop_row",
    weight: Port[Weight] | None = None,
    name: str = "interact",
) -> Port[Episode]:
    """n episodes of each prompt: the model writes a turn, the environment answers, and so on, at
    most max_turns times. An Episode is a Rollout, so it takes the place of `generate`'s in a graph.

    environment: a class with `reset(seed=, **row)`, `step(message) -> Turn` and, where it likes,
    `finish(reason) -> reward` and `close()`; a TRL environment; or what `tools(...)` and its
    neighbours make. Each episode has one of its own, in a process of its own (`isolated`), with
    Python's and NumPy's random numbers seeded by the run and the prompt's place in the data, so
    that a group plays one task.

    Tokens are only appended: what the model wrote is never tokenised again, and what answers it is
    rendered by itself, as the chat template has it (prompts that are text: as it is). max_tokens:
    of a row's completion, written and answered; max_turn_tokens: that one turn writes; max_context:
    of prompt and completion. overflow: what happens to an episode whose next answer does not fit:
    `stop` ends it with finish `length`, `drop_group` gives its group up, `segment` begins another
    row of the episode, up to `segments` of them, with the messages that `compact` leaves of those
    that the model was shown and the answer; it does so as soon as a turn of max_turn_tokens would
    not fit. thinking: whether reasoning of earlier turns stays
    where it was written (`keep`), or a user's next turn begins another row wherever the chat
    template would leave it out (`template`). Rows of episodes that may have several are Segments:
    each group has n * segments places, of which those that no episode needed stay empty, and
    `group_advantage` compares episodes.

    reset_timeout, step_timeout: seconds of one call of the environment. timeout: of an episode.
    An environment that raises, hangs or dies ends its episode alone; it is begun again up to
    `retries` times, then on_error says what is lost: its row (its group goes on with those that are
    left), its group, or the run. pace: whether all rows of a chunk write, then all environments
    answer (`rounds`: the same bits however work is divided; the default without lag), or each row
    goes on as soon as it is answered (`free`; the default with lag). parked_tokens: of how many
    tokens the keys stay between two turns, what is beyond is computed again; None: as many as
    there is room for. Others as in `generate`.
    """
    spec = as_environment(environment)
    _require_rows(overflow, segments, compact, thinking)
    params = {
        "environment": spec,
        "columns": spec.columns,
        "required": spec.required,
        "n": n,
        "max_turns": max_turns,
        "max_tokens": max_tokens,
        "max_turn_tokens": max_turn_tokens,
        "max_context": max_context,
        "overflow": overflow,
        "segments": segments,
        "compact": compact,
        "thinking": thinking,
        "max_prompt_tokens": max_prompt_tokens,
        "overlong_prompt": overlong_prompt,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": tuple_of_stops(stop),
        "max_lag": max_lag,
        "on_update": on_update,
        "sampler": sampler,
        "merge": merge,
        "reset_timeout": reset_timeout,
        "step_timeout": step_timeout,
        "timeout": timeout,
        "parked_tokens": parked_tokens,
        "retries": retries,
        "pace": pace,
        "on_error": on_error,
    }
    schema = _choose_schema(segments, is_truncated=truncates(temperature, top_p, top_k))
    inputs = weighted_inputs(prompt, weight)
    return Node(
        INTERACT, name, states={"policy": policy}, inputs=inputs, params=params, schemas=(schema,)
    ).port()


def _choose_schema(segments: object, *, is_truncated: bool) -> type[Episode]:
    has_several = isinstance(segments, int) and segments > 1
    if is_truncated:
        return TruncatedSegment if has_several else TruncatedEpisode
    return Segment if has_several else Episode


_FIX = "overflow='segment', segments=4, compact=lambda messages: messages[:1] + messages[-2:]"


def _require_rows(overflow: str, segments: object, compact: object, thinking: str) -> None:
    """Raise GraphError for settings of segments of which one does nothing without another."""
    compacts = overflow == "segment"
    is_given = compact is not None
    expected = "a function of messages where overflow is 'segment', and only there"
    fits = is_given == compacts and is_given == callable(compact)
    require("interact", "compact", compact, fits=fits, expected=expected, fix=_FIX)
    if not isinstance(segments, int):
        return  # the check says so
    needs_several = compacts or thinking == "template"
    expected = "2 or more with overflow='segment' or thinking='template', 1 without both"
    fits = needs_several == (segments > 1)
    fix = "segments=4, the most rows of an episode"
    require("interact", "segments", segments, fits=fits, expected=expected, fix=fix)
