"""Generation: one operator that turns prompts into rollouts.

Owns: the declaration. Does not own: any sampler (kernels/torch, kernels/vllm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dataflow.calls import require
from dataflow.limits import choice, number, whole
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.operator import Expand, Input, Operator, declares
from dataflow.schema import Prompt, Rollout

GENERATE = Operator(
    path="operators.generate:GENERATE",
    name="generate",
    work="decode",
    rows=Expand("prompt", "n"),
    inputs=(Input(name="prompt", schema=Prompt),),
    outputs=(Rollout,),
    reads=("policy",),
    kernels={"torch": "operators.kernels.torch.generate:TorchGenerate"},
    limits={
        "n": whole(1, like=8),
        "max_tokens": whole(1, like=512),
        "max_prompt_tokens": whole(1, like=512, optional=True),
        "temperature": number(0.0, like=1.0),
        "top_p": number(0.0, 1.0, above=True, like=1.0),
        "top_k": whole(0, like=0),
        "max_lag": whole(0, like=0),
        "on_update": choice("interrupt", "drain"),
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
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    max_lag: int = 0,
    on_update: Literal["interrupt", "drain"] = "interrupt",
    name: str = "generate",
) -> Port[Rollout]:
    """n answers to each prompt; temperature 0.0 is greedy, top_k 0 and top_p 1.0 cut nothing off.

    max_lag: how many versions old the weights that made a row may be when it is trained; 0 is synchronous. on_update:
    whether new weights interrupt running rows (their tokens stay, each with its version) or wait for them.
    """
    params = {
        "n": n,
        "max_tokens": max_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": _stops(stop),
        "max_lag": max_lag,
        "on_update": on_update,
    }
    return Node(GENERATE, name, states={"policy": policy}, inputs={"prompt": prompt}, params=params).port()


def _stops(stop: Sequence[str] | str) -> tuple[str, ...]:
    """Stop strings; a text is one of them, not its characters."""
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    fits = all(isinstance(text, str) and text for text in found)
    require("generate", "stop", stop, fits=fits, expected="a text or a list of texts", fix='stop=["</answer>"]')
    return found
