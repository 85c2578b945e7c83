"""An importable graph with `device` columns, made and read by a user's operators and by a loss."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dataflow.batch import Ragged
from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.schema import Reward, Rollout, Schema, column
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from tests.kit.run_graphs import rolled_out, vowels

WIDTH = 256
GATE = "STEERING_GATE"
"""If the environment names a FIFO, the loss first waits until something is written to it."""


class HiddenStates(Schema):
    """Imitated hidden states: of each token, and of the whole row."""

    row = "completion"
    hidden = column(pa.list_(pa.float32(), WIDTH), "T", device=True)
    total = column(pa.float64(), device=True)
    norm = column(pa.float32(), "T")


@operator()
def states(rollout: Columns[Rollout]) -> Columns[HiddenStates]:
    """Exact functions of the token ids, so that every run gives the same bits."""
    ids = rollout["completion_ids"]
    vectors = torch.from_numpy(ids.values.astype(np.float32))[:, None] + torch.arange(WIDTH) / 8
    total = torch.zeros(len(rollout), dtype=torch.float64)
    total.index_add_(0, torch.from_numpy(ids.segments()), vectors.sum(1).to(torch.float64))
    norm = ids.like(vectors.norm(dim=1).numpy())
    columns = {"hidden": ids.like(vectors), "total": total, "norm": norm}
    return Columns.make(HiddenStates, like=rollout, **columns)


@operator(scope="group")
def steered(score: Columns[Reward], hidden: Columns[HiddenStates]) -> Columns[Reward]:
    """The reward, plus a little of what is on the device."""
    of_tokens: Ragged = hidden["hidden"]
    assert of_tokens.values.shape == (of_tokens.offsets[-1], WIDTH)
    rows = torch.from_numpy(of_tokens.segments())
    mean = torch.zeros(len(hidden)).index_add_(0, rows, of_tokens.values.mean(1))
    mean = mean + hidden["total"].float() / 1e4
    return score.set(reward=score["reward"] + mean.numpy() / 1e3)


@loss(scope="token")
def beside(now: Now, hidden: Tensors[HiddenStates]) -> Terms:
    """Reads both columns on their device; a test may delay its first call."""
    gate = os.environ.get(GATE, "")
    if os.path.exists(gate):
        with open(gate, "rb", buffering=0) as held:
            held.read(1)
        os.unlink(gate)
    assert now.logprobs is not None
    weight = hidden["hidden"].mean(1) / 100 + hidden["total"][now.row].float() / 1e5
    return Terms(-now.logprobs * weight, {"policy/steer": (weight.sum(), now.mask.sum())})


def steering(folder: Path, *, max_lag: int = 0) -> Graph:
    """REINFORCE with a reward and a loss that read device columns of the kept groups."""
    policy, rollout = rolled_out(folder, 4, max_lag=max_lag)
    hidden = states(rollout)
    score = reward(vowels, rollout, name="score")
    rollout, hidden, score = select(rollout, hidden, score, where=mixed_groups(score))
    score = steered(score, hidden)
    advantage = group_advantage(rollout, score, name="advantage")
    loss = policy_gradient_loss(advantage) + 0.1 * beside(hidden)
    return Graph("steering", train(policy, rollout, loss=loss, lr=1e-3))
