"""Supervised fine-tuning: the warm start before reinforcement.

Use it before reinforcement: it teaches a format, and what rewards would not find.
"""

from __future__ import annotations

from dataflow.adapters import Adapter
from dataflow.calls import declares
from dataflow.graph import Graph
from dataflow.model import Model, Number
from operators.data import demonstrations
from operators.losses import supervised_loss
from operators.train import train


@declares
def sft(
    base: str, data: str, *, batch: int = 128, lr: Number = 1e-5, adapter: Adapter = None
) -> Graph:
    """Imitate demonstrations.

    Args:
        base: Hugging Face model directory or hub name.
        data: Parquet, JSONL or CSV with prompt and completion, or messages.
        batch: rows per Step.
        lr: learning rate, or a schedule of the Step.
        adapter: as lora(rank=16): only weights beside those of the base are trained; None: all.
    """
    policy = Model("policy", base, trainable=True, adapter=adapter)
    rows = demonstrations(data, batch=batch)
    sink = train(policy, rows, loss=supervised_loss(), lr=lr)
    return Graph("sft", sink)
