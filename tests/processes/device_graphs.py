"""Graphs with columns declared `device`: vectors for each token and a number for each row, made by
one operator of the user's, read by another, by a loss, or by both; importable, so that Workers find
them.

Owns: what is run. Does not own: model and data (conftest.py), nor what is asserted.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dataflow.batch import Ragged
from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Model
from dataflow.schema import Reward, Rollout, Schema, column
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train

from run_graphs import vowels  # isort: skip

WIDTH = 256
GATE = "STEERING_GATE"
"""Where the environment names a FIFO, the first call of the loss waits until something is written
into it.
"""


class Hidden(Schema):
    """What a model might have had in mind at each token, and of the row as a whole."""

    row = "completion"
    hidden = column(pa.list_(pa.float32(), WIDTH), "T", device=True)
    total = column(pa.float64(), device=True)
    norm = column(pa.float32(), "T")


@operator()
def states(rollout: Columns[Rollout]) -> Columns[Hidden]:
    """Exact functions of the token ids, so that every run gives the same bits."""
    ids = rollout["completion_ids"]
    found = torch.from_numpy(ids.values.astype(np.float32))[:, None] + torch.arange(WIDTH) / 8
    total = torch.zeros(len(rollout), dtype=torch.float64)
    total.index_add_(0, torch.from_numpy(ids.segments()), found.sum(1).to(torch.float64))
    norm = ids.like(found.norm(dim=1).numpy())
    return Columns.make(Hidden, like=rollout, hidden=ids.like(found), total=total, norm=norm)


@operator(scope="group")
def steered(score: Columns[Reward], hidden: Columns[Hidden]) -> Columns[Reward]:
    """The reward, and a little of what is on the device."""
    of_tokens: Ragged = hidden["hidden"]
    assert of_tokens.values.shape == (of_tokens.offsets[-1], WIDTH)
    rows = torch.from_numpy(of_tokens.segments())
    mean = (
        torch.zeros(len(hidden)).index_add_(0, rows, of_tokens.values.mean(1))
        + hidden["total"].float() / 1e4
    )
    return score.set(reward=score["reward"] + mean.numpy() / 1e3)


@loss(scope="token")
def beside(now: Now, hidden: Tensors[Hidden]) -> Terms:
    """A loss that reads vectors of tokens and numbers of rows where they lie; a test may hold its
    first call back.
    """
    gate = os.environ.get(GATE, "")
    if os.path.exists(gate):
        with open(gate, "rb", buffering=0) as held:
            held.read(1)
        os.unlink(gate)
    assert now.logprobs is not None
    weight = hidden["hidden"].mean(1) / 100 + hidden["total"][now.row].float() / 1e5
    return Terms(-now.logprobs * weight, {"policy/steer": (weight.sum(), now.mask.sum())})


def steering(folder: Path, *, max_lag: int = 0) -> Graph:
    """REINFORCE with a reward, and a loss, that read device columns of the groups that are kept."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    asked = prompts(str(folder / "train.parquet"), batch=4)
    rollout = generate(policy, asked, n=4, max_tokens=6, max_lag=max_lag, name="rollout")
    hidden = states(rollout)
    score = reward(vowels, rollout, name="score")
    rollout, hidden, score = select(rollout, hidden, score, where=mixed_groups(score))
    score = steered(score, hidden)
    advantage = group_advantage(rollout, score, name="advantage")
    return Graph(
        "steering",
        train(
            policy, rollout, loss=policy_gradient_loss(advantage) + 0.1 * beside(hidden), lr=1e-3
        ),
    )
