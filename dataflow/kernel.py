"""The kernel contract: all that the engine asks of a kernel, and all that a kernel sees of it.

Owns: the protocols and the values that cross them. Does not own: any kernel (operators/kernels),
any Worker (engine/run/worker).

A kernel implements what its work kind needs:

    work kind                        protocol
    host, tokenise, decode,          RowKernel: rows in, rows out
    forward, source
    train                            TrainKernel; several ranks make all calls in lock-step, and
                                     rank 0 writes the files
    evaluate                         EvaluateKernel
    readers of a Model               ModelReader
    sources                          Cursor: the place in the data

It declares further abilities by inheriting from those of kernel_abilities.py.

A kernel never blocks on another kernel and never bases a decision on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dataflow.batch import Batch, Keys
from dataflow.processor_time import ProcessorTime

T = TypeVar("T")

PRINTED = "dataflow.printed"
"""The logger on which kernels log what a user's functions print, a record a line. Records of a
Worker's process are shown by the process of the run, too.
"""


Recompute = Literal["none", "layers"]
Offload = Literal["none", "optimizer", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one node is split; all numbers are 1 in one process.

    data: shares of a Step's rows. tensor: ranks that have the same share, or are one replica, and
    have a part of each matrix of attention and MLP (Megatron-LM, arXiv:1909.08053, section 3).
    context: ranks that have the same share, and compute a part of its tokens
    (DeepSpeed-Ulysses, arXiv:2309.14509). Rank number (d * context + c) * tensor + t has part t of
    the matrices and part c of the tokens of share d. threads: of each rank's kernel.
    """

    replicas: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    threads: int = 1
    tokens: int = 16384
    """Token budget of one forward, or of one micro-batch in training."""
    slots: int = 256
    """Rows that one replica decodes at once."""
    part_tokens: int = 0
    """Tokens of ended rows with which these leave a replica, where a Step is worked on in parts
    while it is generated; 0 where it is not.
    """
    spread: int = 1
    """Into how many spans the samples of one prompt are cut, each of which may be decoded by
    another replica, that feeds the prompt once more; 1: a prompt's samples stay together.
    """
    inner: int = 1
    """Ranks that the kernel itself runs inside of its one Worker, each with a part of each matrix.
    They are no Workers: `tensor` stays 1.
    """
    cache_bytes: int = 0
    """Bytes of keys and values that each of these ranks may keep; 0 where a kernel decides. Nodes
    that share an engine have the same.
    """
    longest: int = 0
    """Tokens of the longest row, prompt and answer, of any node that shares the engine; 0 likewise.
    """
    parked: int = 0
    """Tokens of which a replica may keep the keys of rows between two turns; what is beyond is
    computed again. 0 where no row has several turns.
    """
    shard: bool = False
    """Whether each data-parallel rank of a train node keeps only a part of weights and optimizer
    (FSDP2); with `tensor`, of what its tensor rank has.
    """
    recompute: Recompute = "none"
    """What a train node's backward pass computes again: nothing, or each decoder layer from its
    input, the only activation that is then kept of it (arXiv:1604.06174).
    """
    offload: Offload = "none"
    """What waits in host memory: the optimizer's state between a train node's updates, or the
    weights of log-probs, values or scores between chunks.
    """
    compiled: bool = False
    """Whether torch.compile makes few kernels of each decoder layer's many."""

    @property
    def partial(self) -> bool:
        """Whether a rank has only a part of the weights: its module is useless to others."""
        return self.shard or self.tensor > 1

    @property
    def alike(self) -> int:
        """Ranks that have the same rows."""
        return self.tensor * self.context

    @property
    def in_step(self) -> bool:
        """Whether ranks compute every micro-batch together: with a part of the weights each, or of
        the tokens.
        """
        return self.partial or self.context > 1

    def has_equal_part(self, other: Layout) -> bool:
        """Whether a rank has all of the weights, or the part that one of the other layout has."""
        return self.tensor == other.tensor and not (self.shard or other.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNode:
    """What a kernel knows of its node: a Node without ports and source lines.

    reads: for each input, the columns in its batch, as the plan decided. returns: the output
    columns that somebody reads; a kernel may leave out the others.
    """

    name: str
    operator: str
    models: Mapping[str, Any] = field(default_factory=dict)
    """The Model for each state parameter of the operator (`policy`, `model`)."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """The Table for each such parameter (`table`)."""
    params: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    returns: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    """A user operator's function."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The Schema of each input's port."""
    scope: str = "row"
    keeps: str | None = None
    """For an operator that selects rows: what it promises to keep of a group (Operator.keeps)."""
    inproc: bool = False
    """Whether user functions run in this process, for breakpoints; then without a time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows for one call of `run`, decided before it starts: the unit of work and of reissue.

    Every input declared `rows` has the same keys in the same order, sorted by (position, sample);
    an input declared `parent` has been looked up, so it has that order and length, too. The input
    `of` of a Reduce has rows of its own: each has the key of its ancestor in the chunk, sorted;
    there may be none, one or several for each. Each input of a Concat has a part of the chunk's
    rows, with their keys. step: the Step that these rows are for; 0 if unknown. A source's chunk
    has no inputs; its keys say which positions to produce.
    """

    id: int
    step: int
    keys: Keys
    inputs: Mapping[str, Batch]
    spans: np.ndarray | None = None
    """Of an expand: int32 [rows, 2], the first of each row's samples to make and the one behind the
    last, as `Keys.expand_spans` counts them; None: all of them. The others are in other chunks.
    """
    weights: np.ndarray | None = None
    """float32 [rows]: how much each row is expected to take, heavier rows first; None where nobody
    says. It changes the order of work, and no row.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedRows:
    """Which rows of one set an Assignment has.

    keys: of the rows in its inputs. If the node has several ranks, `total` is the number of the
    set's rows in the Step, and `mine` this rank's ascending indices among them; each row is in
    exactly one share, so on layout.alike ranks. What a rank needs of the others' rows, it asks
    them for, by the session's group.
    """

    keys: Keys
    mine: np.ndarray | None = None
    total: int | None = None

    @property
    def count(self) -> int:
        """How many rows all ranks have."""
        return len(self.keys) if self.total is None else self.total

    @property
    def indices(self) -> np.ndarray:
        """Where this rank's rows are among them, ascending."""
        return np.arange(self.count) if self.mine is None else self.mine


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The rows of one Step for a train node. `inputs` as in Chunk.

    keys, mine, total: of the rows in the input `rows`, as in AssignedRows. others: the same of the
    row sets that terms of the loss have of their own, by the input that has their rows. A set
    without a row in this Step has no inputs, on no rank. lost_rows: of an evaluation, the rows that
    failed and are left out.
    """

    sequence: int
    step: int
    keys: Keys
    inputs: Mapping[str, Batch]
    mine: np.ndarray | None = None
    total: int | None = None
    others: Mapping[str, AssignedRows] = field(default_factory=dict)
    lost_rows: int = 0

    def rows_of(self, row_set: str) -> AssignedRows | None:
        """The rows of a set, by the input that has them; None for one that has none."""
        if row_set == "rows":
            rows = AssignedRows(keys=self.keys, mine=self.mine, total=self.total)
        else:
            rows = self.others.get(row_set)
        # `others` may have a set without a row in this Step.
        return rows if rows is not None and rows.count else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A named part of a Model's weights; `data` is a tensor."""

    name: str
    data: Any


class Session(Protocol):
    """All of the engine that a kernel sees."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number within its replica."""
        ...

    @property
    def world(self) -> int:
        """Ranks of this replica."""
        ...

    @property
    def group(self) -> Any:
        """The torch.distributed process group of the replica's ranks; None if there is one rank."""
        ...

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """uint64 [rows]: each row's random stream in this node; draw with
        `dataflow.randomness.uniform`.
        """
        ...

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Add to a metric of the current Step, which shows sum(value * count) / sum(count)."""
        ...

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """A context in which the kernel only waits for something outside of the run, which `reason`
        names in one word (`environments`). Those seconds are shown as a wait of the node, and are
        time/<node>/<reason>; they stay a part of time/<node>. In the kernel's own thread, not
        within another one, and without a batch yielded in it.
        """
        ...

    def note_least_tokens(self, count: int) -> None:
        """Each row of the running chunk that has not ended has so many tokens at least: told with
        the next batch, where a Step is worked on in parts (Layout.part_tokens).
        """
        ...

    def flight(self, count: int) -> None:
        """So many rows are in flight in the kernel from now on, as episodes that go on; shown while
        the run lasts. It is 0 until the first call.
        """
        ...

    def count_computed(self, elsewhere: ProcessorTime) -> None:
        """Count what other processes computed for this node's rows; what the kernel's own thread
        does, the engine counts.
        """
        ...

    def tombstone(
        self,
        key: tuple[int, int, int],
        error: str,
        *,
        failed: bool = True,
        row_only: bool = False,
    ) -> None:
        """Report that this row failed for good; the engine applies the policy (drop the group, stop
        the run). failed=False: the node's own policy drops it (an overlong prompt), which does not
        count against the error budget. row_only: its group goes on without it, and is dropped only
        if no row of it is left. Of an expand the key is an output row's, for row_only its sample
        too; a row that was yielded cannot be lost any more.
        """
        ...

    def module(self, model: Any, make: Callable[[], T]) -> T:
        """Return a Model's module: made by `make`, or, where the plan lets kernels share one, made
        by the first of them.
        """
        ...

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Return what all kernels of one Worker have under this name, made by the first of them:
        weights of a base, which several Models share and nobody changes.
        """
        ...

    def allocate(self, count: int, dtype: npt.DTypeLike) -> np.ndarray:
        """Allocate `count` numbers of this dtype, [count], in memory that other Workers read: a
        column built there is not copied when its batch is yielded. For large columns (below about
        64 KiB a copy is as cheap):

            values = session.allocate(tokens, np.float32)
            ...
            yield Batch.make(keys, {"logprobs": Ragged(values, offsets)}, Logprobs)

        Pass it to Batch.make unchanged, or a contiguous part of it, in the column's declared type
        (its element's type in a list column, whose offsets are int64): a conversion is a copy.
        Other columns of the batch may be anywhere. The contents are not initialised. The memory is
        the kernel's until it yields a batch with it; from then on it must not be changed, since
        others read it, and it is used again once the engine has released those rows and no view of
        it is left here. What is never yielded is freed with its last view: keep none from chunk to
        chunk. If no other process reads (one process), it is ordinary memory; in an outbox it
        begins on a 64-byte boundary. Raises KernelError for a negative count or a dtype of objects.
        """
        ...


class Kernel(Protocol):
    """What every kernel has."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load what is needed. Called once, before anything else."""
        ...

    def close(self) -> None:
        """Release everything; called once, also after a failure."""
        ...


class RowKernel(Kernel, Protocol):
    """Rows in, rows out."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield finished rows, each row of the chunk's output once, in any order and in any number
        of batches. Report metrics before the last rows: later ones may miss their Step's line.
        """
        ...


class TrainKernel(Kernel, Protocol):
    """The only writer of a Model, or of a Table."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Do all updates of one Step; returns its metrics."""
        ...

    def pieces(self) -> Iterable[Piece]:
        """The weights as they are now."""
        ...

    def save(self, directory: Path) -> None:
        """Write model (a Hugging Face directory), optimizer and random state."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote; the next Step then gives the same bits as without the restart."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write only the model, as a Hugging Face directory; not asked of a Table."""
        ...


class ModelReader(Protocol):
    """A kernel that computes with a Model that changes during the run, or with a Table."""

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Copy these weights, or move towards them by `rate`; no pieces if the shared module has
        them.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write the weights of a follower, which no train node keeps."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...


class EvaluateKernel(Kernel, Protocol):
    """A sink that measures all rows of an evaluation."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Measure the rows; returns metrics. The score is the one whose name ends in /reward."""
        ...


class Cursor(Protocol):
    """A source's place in its data."""

    @property
    def rows(self) -> int:
        """Rows of one data epoch."""
        ...

    def position(self) -> int:
        """The first position that was not produced yet."""
        ...

    def seek(self, position: int) -> None: ...
