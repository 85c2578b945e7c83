"""What each rank does in the tests of tensor-parallel training: a process of its own runs `main`.

Owns: what a rank does and writes down. Does not own: cases and Steps (parallel_ranks.py), what is
expected (test_tensor_ranks.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from operators.kernels.torch import heads, parallel
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.train import TorchTrain
from tests.kit.kernels import FakeSession
from tests.kit.train_ranks import (
    CASES,
    FAULTY,
    GRPO,
    NARROW,
    SAVED,
    STEPS,
    Case,
    changed,
    look,
    misplaced,
    part,
    said,
    train,
    weights,
)

QWEN3 = Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), base="qwen3", params={"minibatches": 2})
BIASED = Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), base="biased", params={"minibatches": 2})
ALL: dict[str, Case] = CASES | {"qwen3": QWEN3, "biased": BIASED}
QUICK = ("grpo", "value", "group", "chunked", "qwen3", "biased")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of `world` ranks, of which each `tensor` have the same rows."""

    rank: int
    world: int
    tensor: int
    folder: Path
    bases: Mapping[str, str]

    def open(self, case: Case) -> TorchTrain:
        """The kernel of this rank."""
        session = FakeSession(
            seed=5, node="train_policy", rank=self.rank, world=self.world, group=dist.group.WORLD
        )
        return case.open(self.bases, session, tensor=self.tensor)

    @property
    def share(self) -> int:
        """Whose rows it has."""
        return self.rank // self.tensor

    def mine(self, case: Case) -> Case:
        """The case with as many owners as there are shares."""
        return replace(
            case, owners=tuple(owner % (self.world // self.tensor) for owner in case.owners)
        )

    def limits(self) -> list[float]:
        """Seconds after which a collective of each of its groups counts a silent rank as lost."""
        session = FakeSession(rank=self.rank, world=self.world, group=dist.group.WORLD)
        ranks = Ranks(session, torch.device("cpu"), "node", self.tensor)
        assert ranks.mesh is not None
        groups = [ranks._data, ranks.mesh.get_group()]
        assert [group.size() for group in groups] == [self.world // self.tensor, self.tensor]
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in groups
        ]

    def case(self, case: Case) -> dict[str, Any]:
        """Three Steps, with a nap after the first, in which the weights get other memory, as on a
        device.
        """
        usual, heads.CHUNK = heads.CHUNK, case.chunk or heads.CHUNK
        case, kernel = self.mine(case), self.open(case)
        metrics = train(case, kernel, STEPS[:1], self.share)
        looked = look(kernel)
        kernel.sleep()
        kernel._module._apply(torch.clone)
        kernel.wake()
        metrics += train(case, kernel, STEPS[1:], self.share)
        heads.CHUNK = usual
        return {
            "metrics": metrics,
            "weights": weights(kernel),
            "looked": looked,
            "held": held(kernel),
        }

    def state(self, name: str, case: Case) -> dict[str, Any]:
        """Two Steps, saved, and a third; and the third after what one rank saved."""
        case, kernel = self.mine(case), self.open(case)
        train(case, kernel, STEPS[:2], self.share)
        kernel.save(self.folder / f"{name} of many")
        kernel.save_weights(self.folder / f"{name} of many, weights")
        metrics = train(case, kernel, STEPS[2:], self.share)
        other = self.open(case)
        other.restore(self.folder / f"{name} of one")
        train(case, other, STEPS[2:], self.share)
        return {"metrics": metrics, "weights": weights(kernel), "restored": weights(other)}

    def faults(self) -> dict[str, Any]:
        """What each rank says of faults in rows of the last share; and a Step after them."""
        case = self.mine(FAULTY)
        kernel, whole = self.open(case), case.assignment(1)
        row = 9 if self.world > self.tensor else 0
        mine = part(whole, case.owners, self.share)
        found = {
            "loss": said(kernel, part(changed(whole, row, np.inf), case.owners, self.share)),
            "gradient": said(kernel, part(changed(whole, row, 5.0), case.owners, self.share)),
            "raised": said(kernel, part(changed(whole, row, 3.0), case.owners, self.share)),
            "column": said(kernel, misplaced(mine, self.rank)),
            "lonely": said(kernel, part(whole, (*case.owners[:5], 9), self.share)),
            "uneven": said(
                kernel,
                part(
                    whole,
                    (*case.owners[:5], 9 if self.rank == self.world - 1 else case.owners[5]),
                    self.share,
                ),
            ),
        }
        return {
            "said": found,
            "metrics": train(case, kernel, [1], self.share),
            "weights": weights(kernel),
        }


def held(kernel: TorchTrain) -> dict[str, torch.Tensor]:
    """This rank's own part of each weight."""
    found = ((name, p.detach()) for name, p in kernel._module.named_parameters())
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in found}


def main(number: int, world: int, tensor: int, folder: Path, bases: Mapping[str, str]) -> None:
    """Everything that a rank does, in the same order on all; the results go into a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    parallel.BUCKET = 1000
    rank = Rank(rank=number, world=world, tensor=tensor, folder=folder, bases=bases)
    found: dict[str, Any] = {"limits": rank.limits()}
    found |= {name: rank.case(ALL[name]) for name in QUICK}
    for name, case in (("saved", SAVED), ("narrow", NARROW)):
        found[name] = rank.state(name, case)
    found["faults"] = rank.faults()
    torch.save(found, folder / f"rank {number}.pt")
    dist.destroy_process_group()
