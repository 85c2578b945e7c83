"""On-policy distillation: a teacher grades the student's own answers (arXiv:2306.13649).

Use it when there is a better model of the same tokenizer.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import distillation_loss
from operators.train import train


@declares
def distill(
    base: str,
    teacher: str,
    data: str,
    *,
    batch: int = 64,
    max_tokens: int = 512,
    top_k: int = 64,
    lr: Number = 1e-5,
    max_lag: int = 0,
    adapter: Adapter = None,
) -> Graph:
    """Reverse KL to a larger model of the same tokenizer, over the teacher's likeliest tokens.

    Args:
        base: Hugging Face model directory or hub name.
        teacher: the teacher's model directory or hub name.
        data: Parquet, JSONL or CSV of prompts, or a reasoning_gym: or hf: source.
        batch: prompts per Step.
        max_tokens: longest answer.
        top_k: how many of the teacher's likeliest tokens are compared.
        lr: learning rate, or a schedule of the Step.
        max_lag: how many versions old a row's weights may be when it is trained; 0 is synchronous.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    grades = logprobs(Model("teacher", teacher), rollout, top_k=top_k)
    loss = distillation_loss(grades, direction="reverse")
    sink = train(policy, rollout, loss=loss, lr=lr)
    return Graph("distill", sink)
