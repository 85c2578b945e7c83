"""Generation: one operator that turns prompts into rollouts.

Owns: the declaration. Does not own: any sampler (kernels/torch, kernels/vllm).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from dataflow.limits import choice, flag, number, texts, whole
from dataflow.model import Model
from dataflow.needs import Needs
from dataflow.node import Node, Port
from dataflow.operator import Expand, Input, Operator, declares
from dataflow.schema import Prompt, Rollout, TruncatedRollout, Weight
from operators.vllm_needs import VLLM

Inputs = dict[str, Port[Any]]
"""Of a node, by name."""

WEIGHT = Input(name="weight", schema=Weight, optional=True, columns=())
"""How much each row is expected to take: the coordinator knows it, and no kernel gets it."""

_PROMPT = Input(name="prompt", schema=Prompt, columns=Prompt.shown)

_KERNELS = {
    "torch": "operators.kernels.torch.generate:TorchGenerate",
    "vllm": "operators.kernels.vllm.generate:VllmGenerate",
}

KEYED = Needs(params={"sampler": ("keyed",)})

GENERATE = Operator(
    path="operators.generate:GENERATE",
    name="generate",
    work="decode",
    rows=Expand("prompt", "n"),
    inputs=(_PROMPT, WEIGHT),
    outputs=(Rollout,),
    reads=("policy",),
    kernels=_KERNELS,
    needs={"torch": replace(KEYED, ranks=True), "vllm": VLLM},
    replayed="operators.kernels.torch.forward:TorchLogprobs",
    limits={
        "n": whole(1, like=8),
        "max_tokens": whole(1, like=512),
        "max_prompt_tokens": whole(1, like=512, optional=True),
        "overlong_prompt": choice("error", "drop", "truncate"),
        "empty_prompt": choice("error", "drop"),
        "temperature": number(0.0, like=1.0),
        "top_p": number(0.0, 1.0, above=True, like=1.0),
        "top_k": whole(0, like=0),
        "stop": texts(like="</answer>"),
        "max_lag": whole(0, like=0),
        "on_update": choice("interrupt", "drain"),
        "sampler": choice("keyed", "vllm"),
        "merge": flag(),
    },
)


@declares
def generate(
    policy: Model,
    prompt: Port[Prompt],
    *,
    n: int = 1,
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    overlong_prompt: Literal["error", "drop", "truncate"] = "error",
    empty_prompt: Literal["error", "drop"] = "error",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: str | Sequence[str] = (),
    max_lag: int = 0,
    on_update: Literal["interrupt", "drain"] = "interrupt",
    sampler: Literal["keyed", "vllm"] = "keyed",
    merge: bool = False,
    weight: Port[Weight] | None = None,
    name: str = "generate",
) -> Port[Rollout]:
    """n answers to each prompt; temperature 0.0 is greedy, top_k 0 and top_p 1.0 truncate nothing.

    The answers are rows of their own, even with n=1; `mean_over` leads from them back to the
    prompt's rows. stop: one or more strings that end an answer when written; they are part of it.
    Log-probs are recorded before top-k and top-p; if these truncate, the rows are a
    TruncatedRollout, which also has the log of the probability that they kept. overlong_prompt:
    what happens to a prompt with more than max_prompt_tokens, or so many that max_tokens more
    exceed the positions of a Model that reads the rows: `error` ends the run, `drop` drops its
    whole group and admits another prompt, `truncate` keeps its last tokens. The metric
    prompt/overlong counts such prompts. empty_prompt: what happens to a prompt without tokens, as
    a task that another generation wrote may be: `error` and `drop` as above, counted by
    prompt/empty. max_lag: how many versions old the weights that made a row
    may be when it is trained; 0 is synchronous. on_update: whether new weights interrupt running
    rows (their tokens stay, each with its version) or wait for them. sampler: `keyed` draws each
    token by seed, node, row and place, so that all kernels write the same tokens; `vllm` is vLLM's
    own, with a seed for each row, and takes neither top_k nor top_p. merge: whether it computes
    with the policy's adapter merged into copies of the matrices that have one, in float32 from the
    base for each version, and rounded last: nothing is computed beside them then, and in bfloat16
    the rounding may be more than an early update. A version with which its log-probs are beyond
    rounding from the trainer's ends the run. weight: how much each prompt's answers are expected to
    take, heavier ones first: `weight_of(scores(ranker, tasks))`, a column of the data, or any
    Weight of the prompt's rows. It changes the order of work and no row; without it, the tokens
    that are known count.
    """
    params = {
        "n": n,
        "max_tokens": max_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "overlong_prompt": overlong_prompt,
        "empty_prompt": empty_prompt,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": tuple_of_stops(stop),
        "max_lag": max_lag,
        "on_update": on_update,
        "sampler": sampler,
        "merge": merge,
    }
    schema = Rollout
    if truncates(temperature, top_p, top_k):
        schema = TruncatedRollout
    inputs = weighted_inputs(prompt, weight)
    return Node(
        GENERATE, name, states={"policy": policy}, inputs=inputs, params=params, schemas=(schema,)
    ).port()


def weighted_inputs(prompt: Port[Prompt], weight: Port[Weight] | None) -> Inputs:
    """The inputs of a generation: the prompt, and the weight where there is one."""
    inputs: Inputs = {"prompt": prompt}
    if weight is not None:
        inputs["weight"] = weight
    return inputs


def tuple_of_stops(stop: object) -> object:
    """A tuple of strings; what is neither a string nor iterable stays, for the limit to refuse."""
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, Iterable):
        return tuple(stop)
    return stop


def truncates(temperature: float, top_p: float, top_k: int) -> bool:
    """Whether a sampler draws from a part of its distribution. A greedy one does not draw."""
    return temperature != 0.0 and (top_p != 1.0 or top_k != 0)
