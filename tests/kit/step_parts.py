"""Steps that are trained part by part: every loss of the vocabulary with rows for it, cuts into
parts, and what reaches the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Batch, Keys
from dataflow.kernel import AssignedRows, Assignment
from dataflow.loss import Loss, LossFunction
from dataflow.model import Model
from dataflow.operator import Input
from dataflow.schema import Advantage, Logprobs, Preference, RankTerms, Returns, Reward, Values
from dataflow.top_logprobs import TopLogprobs
from operators import losses, policy_losses
from operators.kernels.torch.models import load_model
from operators.kernels.torch.train import TorchTrain
from tests.kit.kernels import FakeSession
from tests.kit.rows import random_rows, token_column
from tests.kit.training import OWN, assignment, loss_of

K = 5
"""Tokens that a teacher tells."""


def declared_losses() -> dict[str, LossFunction]:
    """Every loss of the vocabulary, by the name of its declaration."""
    names = {**vars(policy_losses), **vars(losses)}
    return {name: each for name, each in names.items() if isinstance(each, LossFunction)}


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "CLIPPED_POLICY": {"clip": 0.2, "beta": 0.1, "kl": "k3", "level": "sequence"},
    "CLIPPED_WEIGHT": {"cap": 1.5},
    "DPO": {"beta": 0.1},
    "TRAJECTORY_BALANCE": {"beta": 0.5},
    "VALUE": {"clip": 0.2},
    "DISTILLATION": {"direction": "forward"},
}


def make_loss_of(name: str) -> Loss:
    """A loss of one term."""
    return loss_of(declared_losses()[name], label="loss", **SETTINGS.get(name, {}))


def make_step(name: str, rows: Batch, step: int = 1) -> Assignment:
    """A Step of these rows with all ports of a loss, numbers drawn at random."""
    ports: dict[str, Batch] = {}
    for number, port in enumerate(declared_losses()[name].ports):
        ports[f"loss__{port.name}"] = _make_port(port, rows, seed=10 * step + number)
    return assignment(rows, step, **ports)


def _make_port(port: Input, rows: Batch, seed: int) -> Batch:
    schema = port.schema
    draw = np.random.default_rng(seed)
    if schema is TopLogprobs:
        return _make_teacher(rows, draw)
    if schema is Preference:
        signs = np.where(rows.keys.sample % 2 == 0, 1, -1).astype(np.int8)
        return Batch.make(rows.keys, {"sign": signs}, Preference)
    if schema is Reward:
        return Batch.make(rows.keys, {"reward": draw.uniform(-1, 1, len(rows))}, Reward)
    if schema is RankTerms:
        columns = {name: draw.uniform(0, 1, len(rows)) for name in ("score", "term", "slope")}
        return Batch.make(rows.keys, columns, RankTerms)
    names = {Advantage: "advantage", Logprobs: "logprobs", Returns: "returns", Values: "values"}
    low, high = (-7.0, -3.0) if schema is Logprobs else (-1.0, 1.0)
    return token_column(rows, names[schema], seed=seed, schema=schema, low=low, high=high)


def _make_teacher(rows: Batch, draw: np.random.Generator) -> Batch:
    answers = rows.ragged("completion_ids")
    count = len(answers.values)
    by_token = draw.permuted(np.tile(np.arange(98, dtype=np.int32), (count, 1)), axis=1)
    logprobs = np.log(draw.dirichlet(np.ones(K + 1), count)[:, :K]).astype(np.float32)
    columns = {
        "top_ids": answers.like(by_token[:, :K].copy()),
        "top_logprobs": answers.like(logprobs),
        "logprobs": answers.like(logprobs[:, 0].copy()),
    }
    return Batch.make(rows.keys, columns, TopLogprobs.of(K))


def rows_for(name: str, seed: int = 0, groups: int = 5) -> Batch:
    """Rows of some prompts: of pairs, where a loss needs them."""
    return random_rows(groups, 2 if name == "DPO" else 3, seed=seed)


# --- parts ----------------------------------------------------------------------------------------


def take_groups(whole: Assignment, positions: Sequence[int]) -> Assignment:
    """The part of a Step with these groups, of each row set that has some of them. A rank's part:
    of its own rows, among those of all ranks.
    """
    inputs: dict[str, Batch] = {}
    others: dict[str, AssignedRows] = {}
    for name, batch in whole.inputs.items():
        inputs[name] = batch.take(_find_rows(batch.keys, positions))
    for name, rows in whole.others.items():
        others[name] = AssignedRows(keys=inputs[name].keys)
        assert rows.mine is None
    inputs = {name: batch for name, batch in inputs.items() if len(batch)}
    others = {name: rows for name, rows in others.items() if len(rows.keys)}
    keys = whole.keys.take(_find_rows(whole.keys, positions))
    return replace(whole, keys=keys, inputs=inputs, others=others)


def _find_rows(keys: Keys, positions: Sequence[int]) -> np.ndarray:
    return np.flatnonzero(np.isin(keys.position, positions))


def cut_step(whole: Assignment, part_of_group: Sequence[int]) -> list[Assignment]:
    """A Step's parts, of whole groups. part_of_group: of each group, in the order of positions; a
    number that no group has is a part without a row.
    """
    positions = find_positions(whole)
    parts = range(max(part_of_group, default=-1) + 1)
    groups = [positions[np.flatnonzero(np.array(part_of_group) == part)] for part in parts]
    return [take_groups(whole, group.tolist()) for group in groups]


def find_positions(whole: Assignment) -> np.ndarray:
    """The groups of a Step, of all row sets."""
    positions = [whole.keys.position, *(rows.keys.position for rows in whole.others.values())]
    return np.unique(np.concatenate(positions))


def train_in_parts(kernel: TorchTrain, parts: Sequence[Assignment]) -> dict[str, float]:
    """Train a Step in these parts; returns its metrics."""
    for part in parts:
        kernel.train_part(part)
    return dict(kernel.finish_parts(parts[0].step))


# --- numbers --------------------------------------------------------------------------------------


@contextmanager
def keeping_gradients(kernel: TorchTrain) -> Iterator[list[Tensor]]:
    """What reaches the optimizer of an update instead of which nothing happens."""
    gradients: list[Tensor] = []
    usual: Callable[..., None] = kernel._optimizer.step

    def keep(lr: float, norm: Tensor) -> None:
        del lr, norm
        for master in kernel._optimizer.masters:
            gradient = torch.zeros_like(master) if master.grad is None else master.grad.clone()
            gradients.append(gradient.flatten())
        kernel._optimizer.clear()

    kernel._optimizer.step = keep
    yield gradients
    kernel._optimizer.step = usual


def find_distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of the difference, as a share of the first's."""
    one, other = torch.cat(list(some)), torch.cat(list(others))
    return float((one - other).norm() / one.norm())


class _NormInOneType:
    """transformers' RMSNorm computes in float32 whatever its input is."""

    @staticmethod
    def forward(norm: Any, states: Tensor) -> Tensor:
        variance = states.square().mean(-1, keepdim=True)
        return norm.weight * (states * torch.rsqrt(variance + norm.variance_epsilon))


def make_double_session(base: str, head: Any) -> FakeSession:
    """A Session that gives a module in float64."""
    module: nn.Module = load_model(Model("policy", base, trainable=True, head=head)).double()
    for each in module.modules():
        if type(each).__name__.endswith("RMSNorm"):
            each.forward = MethodType(_NormInOneType.forward, each)
    session = FakeSession(seed=5, node="train_policy")
    session.modules["policy"] = module
    return session


def without_own(whole: Assignment) -> Assignment:
    """The Step without the rows of its own for SHOWN."""
    inputs = {name: batch for name, batch in whole.inputs.items() if name != OWN}
    return replace(whole, inputs=inputs, others={})
