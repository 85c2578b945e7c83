"""What each of two ranks does with tiny models of several architectures: log-probs and gradients of
packed rows with split weights, and how far they are from those of the whole module.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing import pack
from operators.kernels.torch.parallel import Ranks, gather_whole, split_module
from operators.kernels.torch.slices import Slices
from tests.kit.differences import far
from tests.kit.kernels import FakeSession
from tests.kit.rows import random_rows
from tests.kit.training import gloo_world

CPU = torch.device("cpu")


def main(number: int, folder: Path, names: Sequence[str], way: str) -> None:
    """Writes the greatest difference (differences.py), or the refusal, of each architecture's model
    in `folder`.

    way: `tensor` (matrices over ranks) or `shard` (weights over ranks).
    """
    with gloo_world(folder / f"store {way}", number, 2):
        session = FakeSession(5, "node", rank=number, world=2, group=dist.group.WORLD)
        differences = {name: _compared(str(folder / name), session, way) for name in names}
        (folder / f"{way} {number}.json").write_text(json.dumps(differences), encoding="ascii")


def _compared(base: str, session: FakeSession, way: str) -> float | str:
    model = Model("policy", base)
    wanted = numbers_of(load_model(model, CPU))
    try:
        found = _split_numbers(load_model(model, CPU), session, way)
    except KernelError as error:
        return str(error)
    assert found.keys() == wanted.keys()
    return max(far(found[name], of) for name, of in wanted.items())


def _split_numbers(module: Any, session: FakeSession, way: str) -> dict[str, Tensor]:
    if way == "shard":
        sharded = split_module(module, session, CPU)
        parts = numbers_of(module, sharded)
        return {n: gather_whole(x) / (1 if n == "logprobs" else 2) for n, x in parts.items()}
    mesh = Ranks(session, CPU, "node", 2).mesh
    assert mesh is not None
    slices = Slices(module, mesh, "node")
    named = dict(module.named_parameters())
    logprobs = _logprobs(module)
    _loss(slices.same(logprobs)).backward()
    slices.sum_gradients(list(named.values()), list(named.values()))
    found = {"logprobs": logprobs.detach()}
    for name, weight in named.items():
        part = slices.gradient(weight)
        part = torch.zeros_like(slices.part(weight)) if part is None else part
        found[name] = slices.gather(weight, part)
    return found


def numbers_of(module: Any, sharded: Any = None) -> dict[str, Tensor]:
    """Log-probs of packed rows, and the gradient of each weight."""
    logprobs = _logprobs(module) if sharded is None else sharded(lambda: _logprobs(module))
    _loss(logprobs).backward()
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in module.named_parameters()
    }
    return {"logprobs": logprobs.detach(), **grads}


def _logprobs(module: Any) -> Tensor:
    rows = random_rows(2, 2, longest=9, vocabulary=95)
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    packed = pack(prompts, answers, np.arange(4))
    written = torch.from_numpy(answers.values.astype(np.int64)[packed.tokens])
    return predictions(module, packed, written).logprobs


def _loss(logprobs: Tensor) -> Tensor:
    return (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).mean()
