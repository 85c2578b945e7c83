"""A plain loop over a Hugging Face model: padded forwards, textbook formulas, torch's AdamW.

Imports nothing from the engine or the operators, except to record what our train kernel did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer

from dataflow.batch import Batch
from operators.kernels.torch import loss_backward
from operators.kernels.torch.optimizer import Optimizer
from operators.kernels.torch.train import TorchTrain
from tests.kit.rows import padded_logits


@dataclass(slots=True)
class Update:
    """One update. rows: those that its losses read; gradient: unclipped."""

    rows: set[int]
    gradient: dict[str, Tensor]


@dataclass(slots=True)
class TrainedStep:
    """One Step of one of our train nodes."""

    node: str
    inputs: Mapping[str, Batch]
    updates: list[Update] = field(default_factory=list)

    @property
    def rows(self) -> Batch:
        return self.inputs["rows"]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[TrainedStep]:
    """All Steps that train kernels of this process carry out from now on."""
    steps: list[TrainedStep] = []
    read: set[int] = set()
    step, optimize = TorchTrain.step, Optimizer.step
    reduce_term = loss_backward.reduce_term

    def note_step(self: Any, assignment: Any) -> Any:
        steps.append(TrainedStep(self._loop.node, assignment.inputs))
        return step(self, assignment)

    def note_terms(
        terms: Any, scope: str, name: str, now: Any, weights: Any, rows: np.ndarray
    ) -> Tensor:
        read.update(rows.tolist())
        return reduce_term(terms, scope, name, now, weights, rows)  # type: ignore[arg-type]

    def note_update(self: Any, lr: float, norm: Tensor) -> None:
        pairs = zip(self._names, self._weights, strict=True)
        gradient = {name: p.grad.clone() for name, p in pairs if p.grad is not None}
        steps[-1].updates.append(Update(set(read), gradient))
        read.clear()
        optimize(self, lr, norm)

    monkeypatch.setattr(TorchTrain, "step", note_step)
    monkeypatch.setattr(loss_backward, "reduce_term", note_terms)
    monkeypatch.setattr(Optimizer, "step", note_update)
    return steps


class Learner:
    """A module with its optimizer, and all its versions."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module = module
        self.adam = torch.optim.AdamW(
            module.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.versions: list[dict[str, Tensor]] = []
        self.end_step()

    def end_step(self) -> None:
        """The next Step begins with this version."""
        named = self.module.named_parameters()
        self.versions.append({name: weight.detach().clone() for name, weight in named})

    def at(self, version: int) -> nn.Module:
        """A copy with the weights of a version."""
        other = copy.deepcopy(self.module)
        other.load_state_dict(self.versions[version], strict=False)
        return other


def critic(base: str, lr: float) -> Learner:
    """The base's backbone with a head of zeros, as a critic without one starts."""
    module = AutoModelForTokenClassification.from_pretrained(
        base, num_labels=1, attn_implementation="eager"
    ).eval()
    nn.init.zeros_(module.score.weight)
    nn.init.zeros_(module.score.bias)
    return Learner(module, lr)


def ids_of(rows: Batch, row: int) -> Tensor:
    return torch.from_numpy(rows.ragged("completion_ids")[row].astype(np.int64))


def logprobs(module: nn.Module, rows: Batch, temperature: float = 1.0) -> list[Tensor]:
    """Of each row's completion tokens."""
    logits = padded_logits(module, rows)
    chances = [(x / temperature).log_softmax(-1) for x in logits]
    return [x[range(len(x)), ids_of(rows, i)] for i, x in enumerate(chances)]


def cut_logprobs(
    module: nn.Module, rows: Batch, temperature: float, top_p: float, wanted: Sequence[Tensor]
) -> list[Tensor]:
    """Of each row's wanted completion tokens, among those that top-p keeps; 0 for the others."""
    by_row = []
    for i, logits in enumerate(padded_logits(module, rows)):
        chances = (logits / temperature).double().softmax(-1)
        ids, one = ids_of(rows, i), torch.zeros(len(logits))
        for t in torch.nonzero(wanted[i]).flatten().tolist():
            order = chances[t].argsort(descending=True)
            before = chances[t][order].cumsum(0) - chances[t][order]
            kept = order[before < top_p]
            assert ids[t] in kept, "a token that top-p had cut off"
            one[t] = (chances[t][ids[t]] / chances[t][kept].sum()).log()
        by_row.append(one)
    return by_row


def values(module: nn.Module, rows: Batch) -> list[Tensor]:
    """Before each of a row's completion tokens."""
    return [x[:, 0] for x in padded_logits(module, rows)]


def rewards(base: str, rows: Batch, fn: Callable[..., Sequence[float | None]]) -> list[float]:
    """The user's function on the rows' texts."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [ids_of(rows, i).tolist() for i in range(len(rows))]
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    return [float(x or 0.0) for x in fn(completions=texts)]


def groups(rows: Batch) -> list[list[int]]:
    by_position: dict[int, list[int]] = {}
    for row, position in enumerate(rows.keys.position.tolist()):
        by_position.setdefault(position, []).append(row)
    return list(by_position.values())


def column(step: TrainedStep, key: str, name: str) -> list[Tensor]:
    """One of our columns, by row."""
    ragged = step.inputs[key].ragged(name)
    return [torch.from_numpy(ragged[i].copy()) for i in range(len(ragged))]


def flags(rows: Batch, name: str) -> list[Tensor]:
    """A column of the rows themselves, by row."""
    ragged = rows.ragged(name)
    return [torch.from_numpy(ragged[i].copy()) for i in range(len(ragged))]


def require_close(
    ours: Sequence[Tensor], wanted: Sequence[Tensor], what: str, atol: float = 2e-5
) -> None:
    """Row by row, token by token."""
    for row, (a, b) in enumerate(zip(ours, wanted, strict=True)):
        said = lambda m, r=row: f"{what} of row {r}: {m}"
        torch.testing.assert_close(a, b.detach().float(), rtol=1e-4, atol=atol, msg=said)


def spread(numbers: Iterable[float], rows: Batch) -> list[Tensor]:
    """A row's number on each of its tokens."""
    return [torch.full((len(ids_of(rows, i)),), float(x)) for i, x in enumerate(numbers)]


def generalised(reward: Tensor, value: Tensor, gamma: float, lam: float) -> Tensor:
    """arXiv:1506.02438, equation 16, backwards."""
    advantages, after, running = torch.zeros_like(reward), 0.0, 0.0
    for t in reversed(range(len(reward))):
        running = float(reward[t]) + gamma * after - float(value[t]) + gamma * lam * running
        advantages[t], after = running, float(value[t])
    return advantages


def token_mean(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).mean()
