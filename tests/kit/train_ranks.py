"""What each of two ranks does in the tests of data-parallel training: a process of its own runs
`main`.

Owns: the cases, the Steps of a case as one rank or as one of two sees them. Does not own: what is
expected (test_parallel.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.kernel import Assignment
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.schema import Advantage, Returns
from operators import losses
from operators.kernels.torch import heads, parallel
from operators.kernels.torch.attention import hidden
from operators.kernels.torch.packing import pack
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.shared_attention import TreePass
from operators.kernels.torch.train import TorchTrain
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession
from tests.kit.rows import random_rows, rollout, token_column
from tests.kit.training import CLIPPED, assignment, opened, term

STEPS = (1, 2, 3)


def _by_group(now: Now) -> Terms:
    assert now.logprobs is not None
    return Terms((0.1 * now.group_sum(now.row_sum(now.logprobs))).square())


def _picky(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """Raises for an advantage of 3; has no gradient in numbers where one is 5."""
    assert now.logprobs is not None
    given = advantage["advantage"]
    if bool((given == 3.0).any()):
        raise ValueError("an advantage of 3")
    terms = -given * now.logprobs
    steep = torch.nonzero(given == 5.0).flatten()
    return Terms(
        terms.index_add(
            0, steep, (now.logprobs - now.logprobs.detach())[steep].clamp_min(0.0).sqrt()
        )
    )


PICKY = Loss((term(loss_function(_picky, name="picky")),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A train node; `owners`: the rank that has each prompt of a Step, in the order of positions."""

    loss: Loss
    owners: Sequence[int]
    base: str = "qwen2"
    answers: Callable[[int], Batch] = field(default=lambda step: random_rows(6, 3, seed=step))
    params: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 0

    def assignment(self, step: int) -> Assignment:
        """The whole Step, as one rank has it."""
        rows = self.answers(step)
        ports = {
            "clipped_policy_loss__advantage": token_column(rows, "advantage", seed=step),
            "picky__advantage": token_column(rows, "advantage", seed=step),
            "value_loss__returns": token_column(rows, "returns", seed=step, schema=Returns),
        }
        labels = {t.label for t in self.loss.terms}
        return assignment(
            rows, step, **{name: b for name, b in ports.items() if name.split("__")[0] in labels}
        )

    def open(
        self,
        bases: Mapping[str, str],
        session: FakeSession | None = None,
        shard: bool = False,
        tensor: int = 1,
    ) -> TorchTrain:
        """The kernel of one rank."""
        params = {
            "optimizer": AdamW(eps=1e-3),
            "tokens": 24,
            "head": "scalar" if self.base == "critic" else "lm",
        }
        return opened(
            bases[self.base],
            self.loss,
            session=session,
            shard=shard,
            tensor=tensor,
            **(params | dict(self.params)),
        )


def part(given: Assignment, owners: Sequence[int], rank: int) -> Assignment:
    """What one rank is given of an assignment."""
    groups = np.unique(given.keys.position, return_inverse=True)[1]
    mine = np.flatnonzero(np.asarray(owners)[groups] == rank)
    return Assignment(
        sequence=given.sequence,
        step=given.step,
        keys=given.keys.take(mine),
        inputs={name: batch.take(mine) for name, batch in given.inputs.items()},
        whole=given.keys,
        mine=mine,
    )


def _mute_prompt(step: int) -> Batch:
    """Six prompts, of which the last one's rows have no token at all."""
    rows = random_rows(6, 3, seed=step)
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    kept = [answers[i].tolist() if i < 15 else [] for i in range(18)]
    return rollout(rows.keys.position, [prompts[i].tolist() for i in range(18)], kept, seed=step)


GRPO = Loss((term(losses.CLIPPED_POLICY, **CLIPPED),)) + 0.1 * Loss((term(losses.ENTROPY),))
CASES: dict[str, Case] = {
    "grpo": Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), params={"epochs": 2, "minibatches": 2}),
    "value": Case(
        loss=Loss((term(losses.VALUE, clip=None),)), owners=(0, 0, 1, 0, 1, 1), base="critic"
    ),
    "group": Case(
        loss=Loss((term(loss_function(_by_group, scope="group", name="group")),)),
        owners=(1, 0, 0, 0, 1, 0),
        base="llama",
        params={"minibatches": 2},
    ),
    "one prompt": Case(
        loss=GRPO,
        owners=(0, 0, 0, 0, 0, 1),
        params={"minibatches": 3, "aggregate": "sequence_mean", "clip_norm": 0.1},
    ),
    "no row": Case(
        loss=GRPO, owners=(0, 0, 0, 0, 0, 0), params={"minibatches": 2, "aggregate": "sequence_sum"}
    ),
    "mute": Case(
        loss=GRPO, owners=(0, 0, 0, 0, 0, 1), answers=_mute_prompt, params={"minibatches": 6}
    ),
    "chunked": Case(loss=GRPO, owners=(0, 1, 1, 1, 0, 1), chunk=300),
}
SAVED = Case(loss=GRPO, owners=(1, 1, 0, 1, 0, 0), params={"minibatches": 2})
NARROW = Case(
    loss=Loss((term(losses.SUPERVISED),)),
    owners=(1, 1, 0, 1, 0, 0),
    params={"dtype": "bfloat16", "lr": 1e-5},
)
FAULTY = Case(loss=PICKY, owners=(0, 1, 0, 1, 0, 1))


def changed(given: Assignment, row: int, value: float) -> Assignment:
    """With this advantage at the first trained token of a row."""
    batch = given.inputs["picky.advantage"]
    column, mask = batch.ragged("advantage"), given.inputs["rows"].ragged("completion_mask")
    values = column.values.copy()
    values[column.offsets[row] + int(np.argmax(mask[row] > 0))] = value
    made = Batch.make(batch.keys, {"advantage": column.like(values)}, Advantage)
    return Assignment(
        sequence=given.sequence,
        step=given.step,
        keys=given.keys,
        inputs=dict(given.inputs) | {"picky.advantage": made},
    )


def weights(kernel: TorchTrain) -> dict[str, torch.Tensor]:
    """Copies of the weights; with split weights the first rank alone has any."""
    return {piece.name: piece.data.clone() for piece in kernel.pieces()}


def look(kernel: TorchTrain) -> torch.Tensor:
    """What the backbone says of a few tokens, last hidden states, without training."""
    rows = random_rows(2, 2)
    packed = pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(4))
    ids, positions = torch.from_numpy(packed.ids), torch.from_numpy(packed.positions)

    def ask() -> torch.Tensor:
        return hidden(kernel._module, ids, positions, TreePass(packed))

    if kernel._split:
        return kernel._split.look(ask)
    with torch.no_grad():
        return ask()


def train(
    case: Case, kernel: TorchTrain, steps: Sequence[int], rank: int | None = None
) -> list[dict[str, float]]:
    """Metrics of some Steps."""
    given = [case.assignment(step) for step in steps]
    return [dict(kernel.step(g if rank is None else part(g, case.owners, rank))) for g in given]


def said(kernel: TorchTrain, given: Assignment) -> str:
    """The error that a Step ends with."""
    try:
        kernel.step(given)
    except (DataflowError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misplaced(given: Assignment, rank: int) -> Assignment:
    """On rank 1: a column that is not aligned with its rows."""
    if rank == 0:
        return given
    rows = given.inputs["rows"]
    other = token_column(rows.take(np.arange(len(rows))[::-1].copy()), "advantage")
    shifted = Batch.make(rows.keys, {"advantage": other.ragged("advantage")}, Advantage)
    return Assignment(
        sequence=1,
        step=given.step,
        keys=given.keys,
        inputs=dict(given.inputs) | {"picky.advantage": shifted},
        whole=given.whole,
        mine=given.mine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of two ranks."""

    rank: int
    folder: Path
    bases: Mapping[str, str]

    def open(self, case: Case, shard: bool) -> TorchTrain:
        session = FakeSession(
            seed=5, node="train_policy", rank=self.rank, world=2, group=dist.group.WORLD
        )
        return case.open(self.bases, session, shard)

    def case(self, case: Case, shard: bool) -> dict[str, Any]:
        """Three Steps, with a nap after the first."""
        usual, heads.CHUNK = heads.CHUNK, case.chunk or heads.CHUNK
        kernel = self.open(case, shard)
        metrics = train(case, kernel, STEPS[:1], self.rank)
        looked = look(kernel)
        kernel.sleep()
        kernel.wake()
        metrics += train(case, kernel, STEPS[1:], self.rank)
        heads.CHUNK = usual
        return {"metrics": metrics, "weights": weights(kernel), "looked": looked}

    def state(self, name: str, case: Case, shard: bool) -> dict[str, Any]:
        """Two Steps, saved, and a third; and the third after what one rank saved."""
        kernel = self.open(case, shard)
        train(case, kernel, STEPS[:2], self.rank)
        target = self.folder / f"{name} of two{', split' if shard else ''}"
        kernel.save(target)
        metrics = train(case, kernel, STEPS[2:], self.rank)
        other = self.open(case, shard)
        other.restore(self.folder / f"{name} of one")
        train(case, other, STEPS[2:], self.rank)
        return {"metrics": metrics, "weights": weights(kernel), "restored": weights(other)}

    def gradients(self) -> list[torch.Tensor | None]:
        """Sums of gradients of 600 numbers, of which rank 0 has the first and the second, and rank
        1 the second and the third; nobody has the fourth.
        """
        session = FakeSession(rank=self.rank, world=2, group=dist.group.WORLD)
        parameters = [torch.nn.Parameter(torch.zeros(20, 30)) for _ in range(4)]
        for number in (self.rank, self.rank + 1):
            parameters[number].grad = torch.full((20, 30), float(10 * number + self.rank))
        Ranks(session, torch.device("cpu"), "node").sum_gradients(parameters)
        return [p.grad for p in parameters]

    def faults(self, shard: bool) -> dict[str, Any]:
        """What each rank says of faults that are on rank 1 alone; and a Step after them."""
        case = FAULTY
        kernel, whole = self.open(case, shard), case.assignment(1)
        mine = part(whole, case.owners, self.rank)
        lonely = part(whole, (0, 1, 0, 1, 0, 2), self.rank)
        found = {
            "loss": said(kernel, part(changed(whole, 9, np.inf), case.owners, self.rank)),
            "gradient": said(kernel, part(changed(whole, 9, 5.0), case.owners, self.rank)),
            "raised": said(kernel, part(changed(whole, 9, 3.0), case.owners, self.rank)),
            "column": said(kernel, misplaced(mine, self.rank)),
            "lonely": said(kernel, lonely),
        }
        return {
            "said": found,
            "metrics": train(case, kernel, [1], self.rank),
            "weights": weights(kernel),
        }


def main(number: int, folder: Path, bases: Mapping[str, str]) -> None:
    """Everything that a rank does, in the same order on both; the results go into a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    # Several buckets, as in a model of a usable size.
    parallel.BUCKET = 1000
    rank = Rank(rank=number, folder=folder, bases=bases)
    found: dict[Any, Any] = {"gradients": rank.gradients()}
    for shard in (False, True):
        for name, case in CASES.items():
            found[name, shard] = rank.case(case, shard)
        for name, case in (("saved", SAVED), ("narrow", NARROW)):
            found[name, shard] = rank.state(name, case, shard)
        found["faults", shard] = rank.faults(shard)
    torch.save(found, folder / f"rank {number}.pt")
    dist.destroy_process_group()
