"""The cases of parallel training of a part of a Model, and `main`, which each rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dataflow.adapters import lora, subset
from tests.kit.kernels import FakeSession
from tests.kit.train_ranks import FIRST, GRPO, SECOND, Case, train
from tests.kit.training import gloo_world, weights_of

PARTS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": lora(rank=4)},
    "recomputed adapter": {"adapter": lora(rank=4), "recompute": "layers"},
    "subset": {"trainable": subset(last=1)},
    "norms": {"trainable": subset(parts=("norm",))},
}
CASES: dict[str, Case] = {}
for _name, _part in PARTS.items():
    CASES[_name] = Case(
        loss=GRPO, owners=(0, 1, 0, 1, 1, 0), params={"minibatches": 2, "lr": 1e-2, **_part}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWorld:
    """How two ranks train: with whole weights, split ones, parts of each matrix, or of the
    tokens.
    """

    shard: bool = False
    tensor: int = 1
    context: int = 1
    cases: Sequence[str] = tuple(CASES)


WORLDS = {
    "whole": PartWorld(),
    "split": PartWorld(shard=True),
    "1 x 2": PartWorld(tensor=2, cases=("subset", "norms")),
    "tokens": PartWorld(context=2),
}


def session_of(number: int) -> FakeSession:
    return FakeSession(5, "train_policy", rank=number, world=2, group=dist.group.WORLD)


def report_of(case: Case, kernel: Any, folder: Path, share: int | None = None) -> dict[str, Any]:
    """A Step, saved, and a second; and that second again after what was saved."""
    metrics = train(case, kernel, FIRST, share)
    kernel.save(folder / "saved")
    kernel.save_weights(folder / "weights")
    metrics += train(case, kernel, SECOND, share)
    return {"metrics": metrics, "weights": weights_of(kernel)}


def main(number: int, world: PartWorld, folder: Path, bases: Mapping[str, str]) -> None:
    """All cases, in the same order on both ranks; the results go to a file."""
    with gloo_world(folder / "store", number, 2):
        results: dict[str, Any] = {}
        for name in world.cases:
            alike = world.tensor * world.context
            shares = 2 // alike
            case = CASES[name]
            case = replace(case, owners=tuple(owner % shares for owner in case.owners))
            split = {"shard": world.shard, "tensor": world.tensor, "context": world.context}
            kernel = case.open(bases, session=session_of(number), **split)
            share = number // alike
            results[name] = report_of(case, kernel, folder / name, share)
            again = case.open(bases, session=session_of(number), **split)
            again.restore(folder / name / "saved")
            train(case, again, SECOND, share)
            results[name]["restored"] = weights_of(again)
        torch.save(results, folder / f"rank {number}.pt")
