"""The cases of parallel training, and `main`, which each rank runs in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataflowError
from dataflow.kernel import AssignedRows, Assignment
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.schema import Advantage, Returns
from operators import losses
from operators.kernels.torch import heads, optimizer, parallel
from operators.kernels.torch.attention import compute_hidden
from operators.kernels.torch.packing import pack
from operators.kernels.torch.parallel import Ranks
from operators.kernels.torch.shared_attention import TreePass
from operators.kernels.torch.train import TorchTrain
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession
from tests.kit.rows import random_rows, rollout, token_column
from tests.kit.side_modules import READER
from tests.kit.step_parts import cut_step
from tests.kit.train_worlds import THREE, World
from tests.kit.training import (
    CLIPPED,
    OWN,
    SHOWN,
    SUPERVISED,
    assignment,
    gloo_world,
    loss_of,
    opened,
    weights_of,
    with_own,
)

FIRST, SECOND = [1], [2]
"""The Steps before a nap or a checkpoint, and after it."""


def _by_group(now: Now) -> Terms:
    assert now.logprobs is not None
    return Terms((0.1 * now.group_sum(now.row_sum(now.logprobs))).square())


def _picky(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """Raises for an advantage of 3; its gradient is not finite for an advantage of 5."""
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


PICKY = loss_of(loss_function(_picky, name="picky"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A train node; owners: the share that has each prompt of a Step, in the order of positions;
    own: the same of the rows that a supervised term has of its own, if there are any. parts: the
    part of a Step in which each prompt comes to ranks; at once if there are none.
    """

    loss: Loss
    owners: Sequence[int]
    base: str = "qwen2"
    answers: Callable[[int], Batch] = field(default=lambda step: random_rows(6, 3, seed=step))
    params: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 0
    own: Sequence[int] = ()
    parts: Sequence[int] = ()

    def assignment(self, step: int) -> Assignment:
        """The whole Step, as one rank has it."""
        rows = self.answers(step)
        ports = {}
        for label in (term.label for term in self.loss.terms):
            if label == "value_loss":
                column = token_column(rows, "returns", seed=step, schema=Returns)
                ports["value_loss__returns"] = column
            elif label in ("clipped_policy_loss", "picky"):
                ports[f"{label}__advantage"] = token_column(rows, "advantage", seed=step)
        given = assignment(rows, step, **ports)
        return with_own(given, random_rows(len(self.own), 1, seed=step + 50)) if self.own else given

    def open(self, bases: Mapping[str, str], **split: Any) -> TorchTrain:
        """The kernel of one rank; split: session, shard, tensor."""
        head = "scalar" if self.base == "critic" else "lm"
        params = {"optimizer": AdamW(eps=1e-3), "tokens": 24, "head": head} | dict(self.params)
        return opened(bases[self.base], self.loss, **split, **params)


def part(given: Assignment, case: Case, share: int) -> Assignment:
    """One share of an assignment."""
    mine = _rows_of(given.keys, case.owners, share)
    inputs = {name: batch.take(mine) for name, batch in given.inputs.items() if name != OWN}
    others = {}
    if OWN in given.inputs:
        demos = given.inputs[OWN]
        theirs = _rows_of(demos.keys, case.own, share)
        inputs[OWN] = demos.take(theirs)
        keys = demos.keys.take(theirs)
        others[OWN] = AssignedRows(keys=keys, mine=theirs, total=len(demos))
    keys = given.keys.take(mine)
    own = {"mine": mine, "total": len(given.keys)}
    return replace(given, keys=keys, inputs=inputs, others=others, **own)


def _rows_of(keys: Keys, owners: Sequence[int], share: int) -> np.ndarray:
    groups = np.unique(keys.position, return_inverse=True)[1]
    return np.flatnonzero(np.asarray(owners)[groups] == share)


def owners_of(case: Case, index: int) -> Case:
    """The case as of one part: the owners of its prompts alone."""

    def pick(owners: Sequence[int]) -> Sequence[int]:
        return [owner for owner, each in zip(owners, case.parts, strict=False) if each == index]

    return replace(case, owners=pick(case.owners), own=pick(case.own))


def train_in_parts(case: Case, kernel: TorchTrain, step: int, share: int) -> dict[str, float]:
    """The metrics of a Step that comes part by part; a nap in between."""
    for index, each in enumerate(cut_step(case.assignment(step), case.parts)):
        kernel.train_part(part(each, owners_of(case, index), share))
        kernel.sleep()
        kernel.wake()
    return dict(kernel.finish_parts(step))


def _mute_prompt(step: int) -> Batch:
    """Six prompts; the last one's rows have no tokens."""
    rows = random_rows(6, 3, seed=step)
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    kept = [answers[i].tolist() if i < 15 else [] for i in range(18)]
    return rollout(rows.keys.position, [prompts[i].tolist() for i in range(18)], kept, seed=step)


GRPO = loss_of(losses.CLIPPED_POLICY, **CLIPPED) + 0.1 * loss_of(losses.ENTROPY)
TWO_SETS = {
    "loss": GRPO + 0.3 * SHOWN,
    "params": {"minibatches": 2, "own_rows": {OWN: {"temperature": 1.0}}, "temperature": 0.7},
}
CASES: dict[str, Case] = {
    "grpo": Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), params={"epochs": 2, "minibatches": 2}),
    "value": Case(loss=loss_of(losses.VALUE, clip=None), owners=(0, 0, 1, 0, 1, 1), base="critic"),
    "group": Case(
        loss=loss_of(loss_function(_by_group, scope="group", name="group")),
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
    "qwen3": Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), base="qwen3", params={"minibatches": 2}),
    "two sets": Case(owners=(0, 1, 0, 1, 1, 0), own=(1, 0, 1, 1), **TWO_SETS),
    "no row of a set": Case(owners=(0, 1, 0, 1, 1, 0), own=(1, 1, 1, 1), **TWO_SETS),
}
CASES["side"] = Case(loss=GRPO, owners=(0, 1, 0, 1, 1, 0), params={"adapter": READER})
FITTED = {"recompute": "layers", "offload": "optimizer"}
"""A layout that changes no bit."""
CASES |= {
    "in parts": replace(
        CASES["grpo"], params={}, owners=(0, 1, 2, 1, 1, 0), parts=(2, 0, 1, 0, 1, 2)
    ),
    "a part on one rank": replace(CASES["grpo"], params={}, parts=(0, 1, 0, 2, 1, 0)),
    "values in parts": replace(CASES["value"], parts=(0, 1, 1, 0, 0, 1)),
    "groups in parts": replace(CASES["group"], params={}, parts=(0, 1, 2, 3, 4, 5)),
    "two sets in parts": replace(
        CASES["two sets"],
        params={**TWO_SETS["params"], "minibatches": 1},
        parts=(0, 1, 2, 1, 0, 1),
    ),
}
CASES["fitted in parts"] = replace(CASES["in parts"], params=FITTED)
CASES["fitted"] = replace(CASES["grpo"], params={**CASES["grpo"].params, **FITTED})
SAVED = Case(loss=GRPO, owners=(1, 1, 0, 1, 0, 0), params={"minibatches": 2})
NARROW = Case(loss=SUPERVISED, owners=(1, 1, 0, 1, 0, 0), params={"dtype": "bfloat16", "lr": 1e-5})
STATES = {
    "saved": SAVED,
    "narrow": NARROW,
    "waiting": replace(NARROW, params={**NARROW.params, **FITTED}),
}
"""Cases of checkpoints."""
STILL = Case(
    loss=SUPERVISED, owners=(0, 1, 0, 1, 1, 0), base="llama", params={"optimizer": AdamW(eps=1e30)}
)
"""Its updates are too small for float32: no weight of this base is 0."""
FAULTY = Case(loss=PICKY, owners=(0, 1, 0, 1, 0, 1))


def changed(given: Assignment, row: int, value: float) -> Assignment:
    """The assignment with this advantage at the first trained token of a row."""
    batch = given.inputs["picky.advantage"]
    column, mask = batch.ragged("advantage"), given.inputs["rows"].ragged("completion_mask")
    values = column.values.copy()
    values[column.offsets[row] + int(np.argmax(mask[row] > 0))] = value
    return with_advantage(given, column.like(values))


def with_advantage(given: Assignment, column: Ragged) -> Assignment:
    """The assignment with another column for PICKY."""
    other = Batch.make(given.keys, {"advantage": column}, Advantage)
    return replace(given, inputs={**given.inputs, "picky.advantage": other})


def look(kernel: TorchTrain) -> torch.Tensor:
    """The backbone's last hidden states for a few tokens, without training."""
    rows = random_rows(2, 2)
    packed = pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(4))
    ids, positions = torch.from_numpy(packed.ids), torch.from_numpy(packed.positions)

    def ask() -> torch.Tensor:
        return compute_hidden(kernel._module, ids, positions, TreePass(packed))

    if kernel._split:
        return kernel._split.look(ask)
    with torch.no_grad():
        return ask()


def train(
    case: Case, kernel: TorchTrain, steps: Sequence[int], share: int | None = None
) -> list[dict[str, float]]:
    """Metrics of some Steps; share: whose rows of them, of all if None."""
    if case.parts and share is not None:
        return [train_in_parts(case, kernel, step, share) for step in steps]
    given = [case.assignment(step) for step in steps]
    return [dict(kernel.step(g if share is None else part(g, case, share))) for g in given]


def train_with_a_nap(case: Case, kernel: TorchTrain, share: int | None = None) -> dict[str, Any]:
    """Two Steps; in between it naps, and split matrices move to other memory."""
    usual, heads.CHUNK = heads.CHUNK, case.chunk or heads.CHUNK
    metrics = train(case, kernel, FIRST, share)
    looked = look(kernel)
    kernel.sleep()
    if kernel._slices:
        kernel._module._apply(torch.clone)
    kernel.wake()
    metrics += train(case, kernel, SECOND, share)
    heads.CHUNK = usual
    return {"metrics": metrics, "weights": weights_of(kernel), "looked": looked}


def error_of(train_rows: Callable[[Assignment], object], given: Assignment) -> str:
    """The error with which a Step, or a part of one, ends."""
    try:
        train_rows(given)
    except (DataflowError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misplaced(given: Assignment, rank: int) -> Assignment:
    """On every rank but 0: a column that is not aligned with its rows."""
    if rank == 0:
        return given
    rows = given.inputs["rows"]
    other = token_column(rows.take(np.arange(len(rows))[::-1].copy()), "advantage")
    return with_advantage(given, other.ragged("advantage"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of the ranks of a world."""

    rank: int
    world: World
    folder: Path
    bases: Mapping[str, str]

    def session(self) -> FakeSession:
        """Of this rank."""
        size, group = self.world.size, dist.group.WORLD
        return FakeSession(5, "train_policy", rank=self.rank, world=size, group=group)

    def open(self, case: Case) -> TorchTrain:
        """The kernel of this rank."""
        world = self.world
        split = {"shard": world.shard, "tensor": world.tensor, "context": world.context}
        return case.open(self.bases, session=self.session(), **split)

    @property
    def share(self) -> int:
        """Whose rows it has."""
        return self.rank // self.world.alike

    def mine(self, case: Case) -> Case:
        """The case with as many owners as there are shares."""
        shares = self.world.shares
        owners, own = (tuple(x % shares for x in some) for some in (case.owners, case.own))
        return replace(case, owners=owners, own=own)

    def limits(self) -> list[float]:
        """The time limits of collectives, in seconds, of each of its groups."""
        world, cpu = self.world, torch.device("cpu")
        ranks = Ranks(self.session(), cpu, "node", world.tensor, world.context)
        assert ranks.mesh is not None
        groups = [ranks._data, ranks.mesh.get_group()]
        assert [group.size() for group in groups] == [world.size // world.tensor, world.tensor]
        if world.context > 1:
            groups.append(ranks.context_group)
            assert ranks.context_group.size() == world.context
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]

    def case(self, case: Case) -> dict[str, Any]:
        """What it comes to in two Steps."""
        case, kernel = self.mine(case), self.open(case)
        report = train_with_a_nap(case, kernel, self.share)
        return report | ({"held": held(kernel)} if self.world.tensor > 1 else {})

    def state(self, name: str, case: Case) -> dict[str, Any]:
        """A Step, saved and sent, and a second; and the second after what one rank saved."""
        case, kernel = self.mine(case), self.open(case)
        train(case, kernel, FIRST, self.share)
        kernel.save(self.folder / f"{name} of many")
        kernel.save_weights(self.folder / f"{name} of many, weights")
        sent, metrics = weights_of(kernel), train(case, kernel, SECOND, self.share)
        other = self.open(case)
        other.restore(self.folder.parent / f"{name} of one")
        train(case, other, SECOND, self.share)
        weights, restored = weights_of(kernel), weights_of(other)
        return {"metrics": metrics, "sent": sent, "weights": weights, "restored": restored}

    def still(self) -> list[dict[str, float]]:
        """The metrics of a Step that moves no weight."""
        case = self.mine(STILL)
        return train(case, self.open(case), FIRST, self.share)

    def gradients(self) -> list[torch.Tensor | None]:
        """Of a weight that only the last rank has used, and of one that nobody has."""
        used, unused = (torch.nn.Parameter(torch.zeros(20, 30)) for _ in range(2))
        if self.rank == self.world.size - 1:
            used.grad = torch.full((20, 30), 21.0)
        Ranks(self.session(), torch.device("cpu"), "node").sum_gradients([used, unused])
        return [used.grad, unused.grad]

    def faults(self) -> dict[str, Any]:
        """Each rank's errors for faults in rows of the last share; then a good Step."""
        case = self.mine(FAULTY)
        kernel, whole = self.open(case), case.assignment(1)
        row = 9 if self.world.shares > 1 else 0
        without_last = replace(case, owners=(*case.owners[:5], 9))
        uneven = without_last if self.rank == self.world.size - 1 else case
        errors = {
            name: error_of(kernel.step, part(changed(whole, row, value), case, self.share))
            for name, value in (("loss", np.inf), ("gradient", 5.0), ("raised", 3.0))
        }
        errors["part"] = error_of(
            kernel.train_part, part(changed(whole, row, np.inf), case, self.share)
        )
        errors["column"] = error_of(
            kernel.step, misplaced(part(whole, case, self.share), self.rank)
        )
        errors["uneven"] = error_of(kernel.step, part(whole, uneven, self.share))
        metrics = train(case, kernel, FIRST, self.share)
        return {"errors": errors, "metrics": metrics, "weights": weights_of(kernel)}


def held(kernel: TorchTrain) -> dict[str, torch.Tensor]:
    """This rank's own part of each weight."""
    named = ((name, p.detach()) for name, p in kernel._module.named_parameters())
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in named}


def main(number: int, world: World, folder: Path, bases: Mapping[str, str]) -> None:
    """Everything that a rank does, in the same order on all ranks; the results go to a file."""
    with gloo_world(folder / "store", number, world.size):
        # Several buckets, as in a model of a usable size.
        parallel.BUCKET, optimizer.BUCKET = 1000, 3000
        # As on a GPU: state that is offloaded is copied, and its memory given back.
        optimizer.has_own_memory = lambda device: True
        rank = Rank(rank=number, world=world, folder=folder, bases=bases)
        results: dict[str, Any] = {name: rank.case(CASES[name]) for name in world.cases}
        for name, case in STATES.items():
            results[name] = rank.state(name, case)
        results["faults"] = rank.faults()
        results["still"] = rank.still()
        if world.tensor > 1:
            results["limits"] = rank.limits()
        else:
            results["gradients"] = rank.gradients()
        torch.save(results, folder / f"rank {number}.pt")


def main_that_counts(number: int, folder: Path, bases: Mapping[str, str]) -> None:
    """What each of two context ranks keeps for backward passes, to a file."""
    world = World(context=2, cases=())
    with gloo_world(folder / "store", number, world.size):
        rank = Rank(rank=number, world=world, folder=folder, bases=bases)
        case = rank.mine(CASES["grpo"])
        torch.save(count_kept(case, rank.open(case)), folder / f"rank {number}.pt")


def count_kept(case: Case, kernel: TorchTrain) -> int:
    """Bytes that a Step keeps for backward passes besides weights, each tensor once a pass."""
    weights = {p.untyped_storage().data_ptr() for p in kernel._module.parameters()}
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kernel.step(case.assignment(1))
    return sum(sizes)


def main_of_three(number: int, folder: Path, bases: Mapping[str, str]) -> None:
    """The same of what three ranks do."""
    with gloo_world(folder / "store", number, THREE.size):
        parallel.BUCKET = 1000
        rank = Rank(rank=number, world=THREE, folder=folder, bases=bases)
        results = {name: rank.case(CASES[name]) for name in THREE.cases}
        torch.save(results, folder / f"rank {number}.pt")
