"""DPO: direct preference optimisation on a data set of pairs (arXiv:2305.18290).

Use it when preferences have been collected, and nothing is to be generated.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.data import preferences
from operators.forward import logprobs
from operators.losses import dpo_loss
from operators.train import train


@declares
def dpo(
    base: str,
    data: str,
    *,
    batch: int = 64,
    beta: float = 0.1,
    lr: Number = 5e-7,
    minibatches: int = 1,
    adapter: Adapter = None,
) -> Graph:
    """Raise the chosen answer against the rejected one, measured from the base model.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV with prompt, chosen and rejected.
        batch: pairs per Step.
        beta: how far the policy may move from the base.
        lr: learning rate, or a schedule of the Step.
        minibatches: updates per Step.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    rows, pairs = preferences(data, batch=batch)
    reference = logprobs(Model("reference", base), rows)
    loss = dpo_loss(pairs, reference=reference, beta=beta)
    sink = train(policy, rows, loss=loss, lr=lr, minibatches=minibatches)
    return Graph("dpo", sink)
