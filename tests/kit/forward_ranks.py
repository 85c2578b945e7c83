"""What each of several ranks of a replica does with the forward kernels: numbers of rows, before
and after new weights, and how far they are from those of the whole Model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dataflow.batch import Batch
from dataflow.kernel import Layout
from dataflow.model import Model
from operators.kernels.torch import waiting_weights
from operators.kernels.torch.forward import TorchLogprobs, TorchScores, TorchValues
from operators.kernels.torch.models import load_model, pieces
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk
from tests.kit.rows import random_rows
from tests.kit.training import gloo_world

KERNELS: dict[str, tuple[Any, Any, str]] = {
    "logprobs": (TorchLogprobs, "lm", "logprobs"),
    "values": (TorchValues, "scalar", "values"),
    "scores": (TorchScores, "scalar", "reward"),
}
"""Class, head, and the column that it makes."""


def main(number: int, folder: Path, bases: Sequence[str], world: int, way: str) -> None:
    """Writes the greatest differences, by kernel and by version of the weights. bases: a causal
    model and one with a scalar head, then the same with other weights. world: twice the ranks of a
    replica, of which there are two. way: what these divide, tensor or context.
    """
    with gloo_world(folder / "store", number, world):
        halves = [range(world // 2), range(world // 2, world)]
        groups = [dist.new_group(list(half)) for half in halves]
        which, rank = divmod(number, world // 2)
        differences: dict[str, list[float]] = {}
        # A CPU as if it had memory of its own.
        waiting_weights.has_own_memory = lambda device: True
        for name in KERNELS:
            sessions: list[FakeSession] = []
            for _ in range(2):
                group = groups[which]
                sessions.append(FakeSession(5, name, rank=rank, world=world // 2, group=group))
            differences[name] = _compare(name, bases, way, *sessions)
        text = json.dumps(differences)
        (folder / f"{number}.json").write_text(text, encoding="ascii")


def _compare(
    name: str,
    bases: Sequence[str],
    way: str,
    session: FakeSession,
    other_session: FakeSession,
) -> list[float]:
    """other_session: of a kernel whose weights wait on the host, which has the same bits."""
    kernel_class, head, column = KERNELS[name]
    scalar = int(head == "scalar")
    first, second = (
        Model("m", bases[number + scalar], head=head, trainable=True) for number in (0, 2)
    )
    divided: dict[str, Any] = {way: session.world}
    layout = Layout(**divided, tokens=40)
    split = open_kernel(kernel_class(), first, layout=layout, session=session)
    waiting_layout = replace(layout, offload="weights")
    waiting = open_kernel(kernel_class(), first, layout=waiting_layout, session=other_session)
    rows = random_rows(3, 3)
    assert _distance(waiting, split, rows, column) == 0.0
    differences = [_distance(split, _whole(kernel_class, first), rows, column)]
    module = session.module(first, _fail)
    has_parts = any(isinstance(weight, DTensor) for weight in module.parameters())
    assert has_parts == (way == "tensor")
    for kernel in (split, waiting):
        kernel.load(pieces(load_model(second)), 1)
    assert _distance(waiting, split, rows, column) == 0.0
    differences.append(_distance(split, _whole(kernel_class, second), rows, column))
    return differences


def _fail() -> nn.Module:
    raise AssertionError("the kernel has made no module")


def _whole(kernel_class: Any, model: Model) -> Any:
    return open_kernel(kernel_class(), model, layout=Layout(tokens=40))


def _distance(split: Any, whole: Any, rows: Batch, column: str) -> float:
    """Between the numbers of two kernels."""
    numbers: list[np.ndarray] = []
    for kernel in (split, whole):
        (batch,) = kernel.run(rows_chunk(rows))
        is_flat = column == "reward"
        numbers.append(batch.flat(column) if is_flat else batch.ragged(column).values)
    return float(np.abs(numbers[0] - numbers[1]).max())
