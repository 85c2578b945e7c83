"""A train kernel on a tiny model, Assignments for it, and ranks of it as processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataflow.batch import Batch
from dataflow.kernel import AssignedRows, Assignment, Layout
from dataflow.loss import Loss, LossTerm
from dataflow.model import Model
from operators import losses
from operators.kernels.torch import base_piece
from operators.kernels.torch.train import TorchTrain
from tests.kit.forked import forking
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.rows import random_rows, token_column


def loss_of(
    function: Any, *, weight: Any = 1.0, now: tuple[str, ...] = (), label: str = "", **params: Any
) -> Loss:
    """A loss of one term."""
    label, given = label or function.name, tuple(params.items())
    return Loss((LossTerm(function=function, weight=weight, now=now, label=label, params=given),))


CLIPPED = {"clip": 0.2, "beta": 0.0, "kl": "k3", "dual_clip": None}
PG = loss_of(losses.POLICY_GRADIENT)
PPO = loss_of(losses.CLIPPED_POLICY, **CLIPPED)
SUPERVISED = loss_of(losses.SUPERVISED)
OWN = "supervised_loss.rows"
SHOWN = Loss(tuple(replace(term, on=OWN) for term in SUPERVISED.terms))
"""The same on rows of its own."""
LR = 1e-2
"""Of `open_supervised`."""


def opened(
    base: str,
    loss: Loss,
    *,
    tokens: int = 16384,
    head: Any = "lm",
    dtype: Any = "auto",
    trainable: Any = True,
    adapter: Any = None,
    session: FakeSession | None = None,
    shard: bool = False,
    tensor: int = 1,
    context: int = 1,
    recompute: Any = "none",
    offload: Any = "none",
    **params: Any,
) -> TorchTrain:
    """A train kernel of a Model on this base; params: those of the train node."""
    session = session or FakeSession(seed=5, node="train_policy")
    layout = Layout(
        tokens=tokens,
        data=session.world // (tensor * context),
        tensor=tensor,
        context=context,
        shard=shard,
        recompute=recompute,
        offload=offload,
    )
    part = {"trainable": trainable, "adapter": adapter}
    model = Model("policy", base, head=head, dtype=dtype, **part)
    given = {"loss": loss, "lr": 1e-3, "clip_norm": 1.0} | params
    return open_kernel(
        TorchTrain(), model, node="train_policy", layout=layout, session=session, **given
    )


def open_supervised(model: Model, session: FakeSession | None = None, **layout: Any) -> TorchTrain:
    """The train kernel of a Model on demonstrations, at the rate LR."""
    return open_kernel(
        TorchTrain(),
        model,
        node="train_policy",
        layout=Layout(tokens=16384, **layout),
        session=session or FakeSession(seed=5, node="train_policy"),
        loss=SUPERVISED,
        lr=LR,
        clip_norm=1.0,
    )


def steps_of_rows(steps: int = 10) -> list[Batch]:
    """Demonstrations of so many Steps."""
    return [random_rows(3, 2, seed=seed) for seed in range(steps)]


def assignment(rows: Batch, step: int = 1, **ports: Batch) -> Assignment:
    """A Step of these rows; ports: batches by port, `__` for the dot."""
    inputs = {"rows": rows} | {name.replace("__", "."): batch for name, batch in ports.items()}
    return Assignment(sequence=step, step=step, keys=rows.keys, inputs=inputs)


def with_own(given: Assignment, demos: Batch) -> Assignment:
    """The same Step with rows of its own for SHOWN."""
    others = {OWN: AssignedRows(keys=demos.keys)}
    return replace(given, inputs={**given.inputs, OWN: demos}, others=others)


def with_advantage(
    rows: Batch, step: int = 1, name: str = "policy_gradient_loss", seed: int = 7
) -> Assignment:
    """A Step of these rows with random advantages for the loss of this name."""
    advantage = token_column(rows, "advantage", seed=seed)
    return assignment(rows, step, **{f"{name}__advantage": advantage})


def weights_of(kernel: TorchTrain) -> dict[str, Tensor]:
    """Copies of the weights; with split weights only the first rank has any."""
    pieces = [piece for piece in kernel.pieces() if piece.name != base_piece.NAME]
    return {piece.name: piece.data.clone() for piece in pieces}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two values of the same weight."""
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def as_ranks(world: int, main: Callable[..., None], *arguments: Any, limit: float) -> None:
    """Call main(rank, *arguments) in a process for each rank; all end within `limit` seconds."""
    context = forking()
    ranks = [
        context.Process(target=main, args=(number, *arguments), daemon=True)
        for number in range(world)
    ]
    try:
        for rank in ranks:
            rank.start()
        ended = time.monotonic() + limit
        for rank in ranks:
            rank.join(max(0.0, ended - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world


@contextlib.contextmanager
def gloo_world(store: Path, rank: int, size: int) -> Iterator[None]:
    """Inside it this process is a rank of a world, with one thread. store: a file for all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), size, rank)
    yield
    dist.destroy_process_group()


def assert_metrics_alike(found: dict[str, float], wanted: dict[str, float], rel: float) -> None:
    """Metrics of a Step are the same, except those about packing; nearly, of a sample of each
    rank's weights.
    """
    packing, sampled = {"train/micro_batches", "train/fed_tokens"}, "optim/changed"
    assert found.keys() == wanted.keys()
    assert found.get(sampled) == pytest.approx(wanted.get(sampled), abs=0.02)
    for name in found.keys() - packing - {sampled}:
        assert found[name] == pytest.approx(wanted[name], rel=rel, abs=1e-6), name
