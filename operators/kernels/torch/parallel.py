"""The ranks of a train node: their collectives, and weights split over data-parallel ranks.

Owns: the grid of ranks (data, tensor) and the collectives of training (shared facts, sums of
gradients and metrics, faults, FSDP2). Does not own: which rows a rank has (the coordinator), who
is in the group (the engine), the formulas (train.py), matrices split over tensor ranks (slices.py).

All ranks make the same calls in the same order; with one rank, every call here returns at once.
The creator of a group gives it a timeout, so that a dead rank is an error and not an endless wait.

Weights are either whole on each rank (gradients are summed once per update, in a few flat
buckets), or split (FSDP2: each layer is gathered before it computes, and its gradients are summed
into parts afterwards). With split weights every forward and backward is a collective, so ranks
with fewer micro-batches feed extra tokens that do not count.

Tensor ranks have the same rows and so the same micro-batches, each of them a collective: they do
the same and fail the same. Sums over rows count only the first of them. With both, what FSDP2
splits is each tensor rank's part, among the ranks that have the same part:

    rank of the grid 2 x 2      share 0, part 0    share 0, part 1    share 1, part 0    ...
    columns of a matrix of 8    0 1                4 5                2 3                6 7
    rows of a norm of 8         0 1 2 3            0 1 2 3            4 5 6 7
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from dataflow.errors import KernelError, ShortOfMemory
from dataflow.kernel import Piece, Session
from dataflow.memory_limits import is_out_of_memory
from operators.kernels.torch.decoder_layers import find_decoder_layers

T = TypeVar("T")

SIZE_BYTES, FIRST_BYTES = 8, 4096
"""Of a message between ranks: how long it is, and how much of it is sent along at once."""

DATA, TENSOR = "data", "tensor"
"""The dimensions of the grid of ranks."""

BUCKET = 1 << 24
"""Gradient elements per all-reduce, to within one weight: 64 MB in float32."""


class Ranks:
    """One rank's view of the ranks that train a Model together.

    device: where the module is. tensor, context: of the consecutive ranks with the same rows, how
    many divide matrices, and how many tokens. mesh: this rank and the others with its tokens,
    data_mesh: those with its part of the weights; None if there are no tensor ranks. context_group:
    those that have its rows and its part of the weights; None if there are no context ranks.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        node: str,
        tensor: int = 1,
        context: int = 1,
    ) -> None:
        self.rank, self.world, self.tensor = session.rank, session.world, tensor
        self.alike = tensor * context
        """How many consecutive ranks have the same rows."""
        self._group = session.group if self.world > 1 else None
        self._device, self._node = device, node
        if self.world > 1 and self._group is None:
            raise KernelError(
                f"{node}: expected a process group for its {self.world} ranks, found none. Fix:"
                " plan it with one rank."
            )
        if self.world % self.alike:
            raise KernelError(
                f"{node}: expected ranks in shares of {self.alike}, found {self.world}. Fix: a"
                " multiple of tensor * context."
            )
        self._data = self._group
        self.mesh: DeviceMesh | None = None
        self.data_mesh: DeviceMesh | None = None
        if tensor > 1:
            grid = _make_grid(session.group, tensor, device)
            self._data, self.mesh = grid.get_group(DATA), grid[TENSOR]
            self.data_mesh = grid[DATA]
        self.context_group: Any = None
        if context > 1:
            self.context_group = _make_context_group(session.group, tensor, context, device)

    @property
    def lead(self) -> int:
        """1 on the rank that reports numbers that all ranks have, else 0."""
        return int(self.rank == 0)

    @property
    def counts(self) -> bool:
        """Whether this rank reports its rows: one of the ranks with the same rows does."""
        return self.rank % self.alike == 0

    def whole(self, mine: np.ndarray, numbers: np.ndarray, rows: int) -> np.ndarray:
        """Put together numbers of each row of the Step, int64 [kinds, rows]; each rank gives those
        of its own rows (indices `mine`), int64 [kinds, own rows].

        Raises KernelError on every rank if a row is not on the ranks of exactly one share.
        """
        if self.world == 1:
            return numbers
        # One sum for all kinds, with the number of ranks that have each row in the last line.
        table = np.zeros((len(numbers) + 1, rows), dtype=np.int64)
        table[:-1, mine], table[-1, mine] = numbers, 1
        *sums, holders = self._sum(torch.from_numpy(table)).numpy()
        if (holders != self.alike).any():
            row = int(np.argmax(holders != self.alike))
            count = "one" if self.alike == 1 else str(self.alike)
            raise KernelError(
                f"{self._node}: expected each of {rows} rows with exactly {count} of {self.world}"
                f" ranks, found row {row} with {holders[row]}. Fix: assignments of one sequence"
                " number on all ranks."
            )
        # Each of the ranks of a share has added the same numbers.
        return np.stack(sums) // self.alike

    def together(
        self,
        parts: Sequence[T] = (),
        idle: Callable[[], None] | None = None,
        *,
        meets: bool = True,
    ) -> Turns[T]:
        """A block that may fail on one rank alone: see Turns."""
        return Turns(self, parts, idle, meets=meets)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over data-parallel ranks; None if no rank has one."""
        if self.world == self.tensor:
            return
        # Weights that begin in the same multiple of BUCKET elements share a bucket.
        sizes = [parameter.numel() for parameter in parameters]
        starts = np.cumsum([0, *sizes])[:-1]
        first_of_bucket = np.flatnonzero(np.diff(starts // BUCKET)) + 1
        cuts = [0, *first_of_bucket.tolist(), len(parameters)]
        for low, high in pairwise(cuts):
            self._sum_bucket(parameters[low:high])

    @torch.no_grad()
    def _sum_bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        # How many ranks have each gradient follows the gradients: as with one rank, a weight that
        # nothing used must stay out of the optimizer.
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(g.flatten() for g in grads), has])
        dist.all_reduce(flat, group=self._data)
        sizes = [parameter.numel() for parameter in parameters]
        *sums, had = flat.split([*sizes, len(parameters)])
        for parameter, total, ranks in zip(parameters, sums, had.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if ranks else None

    def most(self, number: int) -> int:
        """Find the maximum over all ranks."""
        return int(self._reduce(torch.tensor([number]), dist.ReduceOp.MAX))

    def add_up(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add up by name over the shares of rows; a rank need not have every name."""
        return self._by_name(numbers, 0.0, lambda table: table.sum(axis=0))

    def greatest(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Find the maxima by name; a rank need not have every name."""
        return self._by_name(numbers, -math.inf, lambda table: table.max(axis=0))

    def _by_name(
        self,
        numbers: Mapping[str, float],
        missing: float,
        combine: Callable[[np.ndarray], np.ndarray],
    ) -> dict[str, float]:
        """Combine numbers of all ranks by name.

        combine: of all ranks' float64 [ranks, names]; missing: the number of a rank without a name.
        """
        if self.world == 1:
            return dict(numbers)
        numbers = numbers if self.counts else {}
        # Names and numbers in one message: on CPUs a collective takes as long as waking a process.
        numbers_by_rank: list[dict[str, float]] = []
        own_message = json.dumps(dict(numbers)).encode()
        for message in self._exchange(own_message):
            numbers_by_rank.append(json.loads(message))
        names: dict[str, None] = {}
        for rank_numbers in numbers_by_rank:
            names |= dict.fromkeys(rank_numbers)
        if not names:
            return {}
        table: list[list[float]] = []
        for rank_numbers in numbers_by_rank:
            table.append([rank_numbers.get(name, missing) for name in names])
        combined = combine(np.array(table, dtype=np.float64))
        return dict(zip(names, combined.tolist(), strict=True))

    def agree(self, error: BaseException | None) -> None:
        """On ranks without an error, raise the text of the first failing rank as KernelError; as
        ShortOfMemory, if memory ran out on all that fail.
        """
        failing = torch.tensor([self.world if error is None else self.rank])
        first = int(self._reduce(failing, dist.ReduceOp.MIN))
        if first == self.world:
            return
        kind = "" if error is None else "short" if is_out_of_memory(error) else "fault"
        messages = self._exchange(json.dumps((kind, str(error or ""))).encode())
        if error is not None:
            return
        texts: dict[str, str] = {}
        for message in reversed(messages):
            rank_kind, text = json.loads(message)
            texts[rank_kind] = text
        if "fault" in texts:
            raise KernelError(texts["fault"])
        raise ShortOfMemory(texts["short"])

    def _sum(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def _reduce(self, tensor: Tensor, how: Any) -> Tensor:
        moved = tensor.to(self._device)
        dist.all_reduce(moved, how, group=self._group)
        return moved.cpu()

    def _exchange(self, message: bytes) -> list[bytes]:
        """Send a message to every rank. Returns those of all, by rank."""
        # all_gather takes equal lengths: the first one has the size and what there is room for.
        head = len(message).to_bytes(SIZE_BYTES, "little") + message[:FIRST_BYTES]
        messages: list[bytes] = []
        sizes: list[int] = []
        for received in self._gather_bytes(head, SIZE_BYTES + FIRST_BYTES):
            sizes.append(int.from_bytes(received[:SIZE_BYTES], "little"))
            messages.append(received[SIZE_BYTES:])
        rest = max(sizes) - FIRST_BYTES
        if rest > 0:
            rests = self._gather_bytes(message[FIRST_BYTES:], rest)
            messages = [first + other for first, other in zip(messages, rests, strict=True)]
        return [whole[:size] for whole, size in zip(messages, sizes, strict=True)]

    def _gather_bytes(self, message: bytes, length: int) -> list[bytes]:
        """Send at most so many bytes to every rank; those of all, by rank, with zeros behind."""
        padded = bytearray(message.ljust(length, b"\0"))
        rows = self._gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    def _gather(self, tensor: Tensor) -> Tensor:
        """[n] -> [world, n]."""
        moved = tensor.to(self._device)
        by_rank = [torch.empty_like(moved) for _ in range(self.world)]
        dist.all_gather(by_rank, moved, group=self._group)
        return torch.stack(by_rank).cpu()


def _make_grid(group: Any, tensor: int, device: torch.device) -> DeviceMesh:
    """Lay all ranks out as a grid [share, part]: groups of ranks with the same tokens ("tensor")
    and of ranks with the same part of the weights ("data"), which context ranks have, too.

    All ranks create all subgroups, in the same order, with the timeout of the whole group: the
    default is half an hour.
    """
    limit = group._get_backend(device).options._timeout
    places = torch.arange(group.size()).view(-1, tensor)
    by_share = [dist.new_group(ranks.tolist(), timeout=limit) for ranks in places]
    by_part = [dist.new_group(ranks.tolist(), timeout=limit) for ranks in places.T]
    share, part = divmod(group.rank(), tensor)
    groups = [by_part[part], by_share[share]]
    return DeviceMesh.from_group(groups, device.type, mesh=places, mesh_dim_names=(DATA, TENSOR))


def _make_context_group(group: Any, tensor: int, context: int, device: torch.device) -> Any:
    """The group of the ranks that have this rank's rows and part of the weights, made as in
    `_make_grid`.
    """
    limit = group._get_backend(device).options._timeout
    own_group = None
    for share in torch.arange(group.size()).view(-1, context, tensor):
        for ranks in share.T.tolist():
            made_group = dist.new_group(ranks, timeout=limit)
            if group.rank() in ranks:
                own_group = made_group
    return own_group


class Turns(Generic[T]):
    """A block that all ranks leave together, and one rank's micro-batches inside it.

        with ranks.together(parts, idle) as turns:
            for part in turns: ...

    If the block fails on one rank, it fails on all. idle: what a rank does while others still have
    micro-batches; given if a micro-batch is a collective of all ranks (split weights). With tensor
    ranks, a micro-batch is a collective of the ranks with the same rows, which fail alike. Without
    `meets` this rank is alone in the block, and no micro-batch of it may be a collective.
    """

    def __init__(
        self,
        ranks: Ranks,
        parts: Sequence[T],
        idle: Callable[[], None] | None,
        *,
        meets: bool = True,
    ) -> None:
        self._ranks, self._parts, self._meets = ranks, parts, meets
        self._idle = idle if ranks.world > 1 else None
        self._collective = self._idle is not None or ranks.alike > 1
        self._most, self._begun, self._inside = len(parts), 0, False
        self.is_left_together = ranks.world == 1
        """Whether the block was left on all ranks, so that none of them waits for another."""

    def __enter__(self) -> Turns[T]:
        if self._idle is not None:
            self._most = self._ranks.most(len(self._parts))
        return self

    def __iter__(self) -> Iterator[T]:
        for part in self._parts:
            self._begun, self._inside = self._begun + 1, True
            yield part
            self._inside = False

    def through(self, output: Tensor) -> None:
        """After a loss failed on this rank: join the other ranks' backward with a zero gradient.

        output: the model's.
        """
        if self._collective:
            (0.0 * output.sum()).backward()
            self._inside = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ranks.world == 1 or not self._meets:
            return
        if not (error is None or isinstance(error, Exception)):
            return
        if self._collective and self._inside:
            return  # Inside a forward or backward ranks cannot agree: the engine ends the others.
        if self._idle is not None:
            # Also after an error: the other ranks' micro-batches are collectives of all.
            for _ in range(self._most - self._begun):
                self._idle()
        with ExitStack() as at_the_end:
            at_the_end.callback(setattr, self, "is_left_together", True)
            self._ranks.agree(error)


class Sharded(nn.Module):
    """A module whose weights are split over ranks; every computation with it runs inside `forward`.

    `forward` gathers what is in no layer (embeddings, last norm, head): callers of a backbone or a
    head alone never pass through the module's own forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], T]) -> T:
        """Return what `call` does: only tensors and tuples, so that FSDP can hook its backward."""
        return call()

    @torch.no_grad()
    def look(self, call: Callable[[], T]) -> T:
        """Like `forward`, but no backward follows: so what was gathered is split again here."""
        output = self(call)
        cast(FSDPModule, self).reshard()
        return output


def split_module(
    module: nn.Module, session: Session, device: torch.device, mesh: DeviceMesh | None = None
) -> Sharded:
    """Split a module's weights over the ranks of a mesh, or all of the session's, in place; these
    must start with the same weights, or the same part of each.

    DeviceMesh accepts only groups that torch.distributed knows (init_process_group, new_group), and
    needs a default one. Gradients are summed in float32, not averaged: the losses are already
    divided by totals over all ranks.
    """
    mesh = mesh or DeviceMesh.from_group(session.group, device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    sharded = Sharded(module)
    # Layers first: the whole then takes what is in none of them.
    for part in (*find_decoder_layers(module), sharded):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in sharded.modules():
        if isinstance(part, FSDPModule):
            # The plain sum is gloo's only reduction.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
    return sharded


def gather_whole(tensor: Tensor) -> Tensor:
    """Gather a split tensor (every rank must call); any other is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:
        # A tensor rank's part first, as no more is needed of hosts that have other shares.
        of_part = (Replicate(), *tensor.placements[1:])
        tensor = tensor.redistribute(placements=of_part)
    return tensor.full_tensor()


def part_like(target: Tensor, tensor: Tensor) -> Tensor:
    """Cut this rank's part out of a whole tensor if the target is split; nothing is sent. One that
    is cut is returned unchanged.
    """
    if not isinstance(target, DTensor) or isinstance(tensor, DTensor):
        return tensor
    moved = tensor.to(device=target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)


def collect_pieces(ranks: Ranks, pieces: Iterable[Piece], *, is_sharded: bool) -> Iterable[Piece]:
    """Gather whole pieces on the first rank, one at a time; the others only take part.

    is_sharded: whether FSDP splits them. If tensor ranks alone do, only those with the first rank's
    rows take part.
    """
    if ranks.rank >= ranks.tensor and not is_sharded:
        return ()
    gathered = (Piece(piece.name, gather_whole(piece.data)) for piece in pieces)
    if ranks.rank == 0:
        return gathered
    for _ in gathered:
        pass
    return ()
