"""The kernel contract: all that the engine asks of a kernel, and all that a kernel sees of the
engine.

Owns: the protocols and the values that cross them. Does not own: any kernel
(operators/kernels), any Worker (engine/worker).

A kernel implements what its work kind needs:

    work kind                        protocol
    host, decode, forward, source    RowKernel: rows in, rows out
    train                            TrainKernel; several ranks call everything in lock-step, and
                                     rank 0 writes the files
    evaluate                         EvaluateKernel
    readers of a Model               ModelReader
    sources                          Cursor: the place in the data

What it can do besides it declares by inheriting from Interruptible, Sleeper or Probeable.

A kernel never blocks on another kernel and never reads a clock to decide anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dataflow.batch import Batch, Keys, Ragged

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one node is split. All ones in one process; `threads` are those of each rank's kernel.

    data: shares of a Step's rows. tensor: ranks that have the same share, and a part of each matrix
    of attention and MLP (Megatron-LM, arXiv:1909.08053, section 3). Rank number d * tensor + t is
    part t of share d.
    """

    replicas: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    threads: int = 1
    tokens: int = 16384
    """Token budget of one forward or of one training micro-batch."""
    slots: int = 256
    """Rows that one replica decodes at once."""
    shard: bool = False
    """Whether the data-parallel ranks of a train node each keep a part of weights and optimizer
    (FSDP2), not all.
    """

    @property
    def partial(self) -> bool:
        """Whether a rank has only a part of the weights, so that nothing else can compute with its
        module alone.
        """
        return self.shard or self.tensor > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNode:
    """What a kernel is told of its node: a Node with its ports and source lines left out.

    reads: for each input, the columns that the plan lets travel, in that input's batch.
    returns: the output columns that somebody downstream reads; a kernel may leave the others out.
    """

    name: str
    operator: str
    models: Mapping[str, Any] = field(default_factory=dict)
    """Model per state parameter of the operator (`policy`, `model`)."""
    params: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    returns: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    """The user's function of a user operator."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The Schema of each input's port."""
    scope: str = "row"
    keeps: str | None = None
    """Of an operator that says which rows stay: what of a group it promises to keep
    (Operator.keeps).
    """
    inproc: bool = False
    """Whether user functions are to run in this process, for breakpoints; there is no time limit
    then.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows for one call of `run`, decided before it starts: the unit of work and of reissue.

    Every input declared `rows` has the same keys in the same order, sorted by (position, sample);
    an input declared `parent` has been looked up, so it has that order and length too. The input
    that a Reduce is `of` has rows of its own: each with the key of the row of the chunk that it
    descends from, sorted; none, one or several of each. step: the Step that these rows are for
    where that is known (0 where it is not). A source's chunk has no inputs; its keys say which
    positions to make.
    """

    id: int
    step: int
    keys: Keys
    inputs: Mapping[str, Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The rows of one Step for a train node. `inputs` as in Chunk.

    keys: those of the rows in `inputs`. Where the node has several ranks, `whole` is the keys of
    all rows of the Step and `mine` the ascending indices into them of the rows that this rank has;
    each row is with exactly one share, so with layout.tensor ranks.
    """

    sequence: int
    step: int
    keys: Keys
    inputs: Mapping[str, Batch]
    whole: Keys | None = None
    mine: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A named part of a Model's weights; `data` is a tensor, and stays one."""

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
        """The torch.distributed process group of the replica's ranks; None where there is one."""
        ...

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """uint64 [rows]: the random stream of each row in this node; draw with
        `dataflow.randomness.uniform`.
        """
        ...

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Add to a metric of the current Step; what is shown is sum(value * count) / sum(count)."""
        ...

    def tombstone(self, key: tuple[int, int, int], error: str, *, failed: bool = True) -> None:
        """Say that this row failed for good; its policy (drop the group, stop the run) is the
        engine's. failed=False: the node's own policy gives it up (a prompt that is too long), which
        no error budget counts.
        """
        ...

    def module(self, model: Any, make: Callable[[], T]) -> T:
        """The module of a Model: made by `make`, or the one of a kernel that the plan lets this one
        share with.
        """
        ...

    def allocate(self, count: int, dtype: npt.DTypeLike) -> np.ndarray:
        """`count` numbers of this dtype, [count], in memory from which other Workers read: a column
        that is built there is not copied when the batch with it is yielded. For large columns
        (below some 64 KiB the copy is as cheap):

            values = session.allocate(tokens, np.float32)
            ...
            yield Batch.make(keys, {"logprobs": Ragged(values, offsets)}, Logprobs)

        Give it to Batch.make as it is, or a contiguous part of it, in the column's declared type
        (its element's type in a list column, whose offsets are int64): what has to be converted is
        a copy. Any other column of the batch may lie anywhere. The contents are whatever was there
        before, not zeros. The memory is the kernel's until it yields a batch with it; from then on
        it must not be changed, since others read it, and it is used again once the engine has
        released those rows and no view of it is left here. What is never yielded is free with its
        last view: keep none from chunk to chunk. Where no other process reads (one process), it is
        ordinary memory; in an outbox it begins on a 64-byte boundary. Raises KernelError for a
        negative count or a dtype of objects.
        """
        ...


class Kernel(Protocol):
    """What every kernel has."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load what is needed. Called once, before anything else."""
        ...

    def close(self) -> None:
        """Let everything go; called once, also after a failure."""
        ...


class RowKernel(Kernel, Protocol):
    """Rows in, rows out."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield finished rows, each row of the chunk's output once, in any order and in any number
        of batches.

        Metrics belong before the last rows: what comes after them may miss their Step's line.
        """
        ...


class Interruptible(ABC):
    """A row kernel whose running rows can go on under other weights."""

    @property
    def interruptible(self) -> bool:
        """Whether its node's parameters allow it; if not, weights are loaded between chunks."""
        return True

    @abstractmethod
    def interrupt(self) -> None:
        """Called from another thread while `run` is under way: yield soon, an empty batch where no
        row is finished. The engine then calls `load` and goes on with the iterator; rows keep their
        tokens.
        """
        ...


class Sleeper(ABC):
    """A kernel that can give its devices back between its turns."""

    @abstractmethod
    def sleep(self) -> None:
        """Let the devices' memory go; state moves to the host."""
        ...

    @abstractmethod
    def wake(self) -> None:
        """Take it up again; afterwards everything is as it was."""
        ...


class TrainKernel(Kernel, Protocol):
    """The only writer of a Model."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """All updates of one Step; returns its metrics."""
        ...

    def pieces(self) -> Iterable[Piece]:
        """The weights as they are now."""
        ...

    def save(self, directory: Path) -> None:
        """Write model (a Hugging Face directory), optimizer and random state."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote; afterwards a Step gives the same bits as it would have before."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write the model alone, as a Hugging Face directory."""
        ...


class ModelReader(Protocol):
    """A kernel that computes with a Model that changes during the run."""

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Take these weights, or move towards them by `rate`. No pieces at all: the module is
        shared and has them.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write the weights of a follower, which no train node keeps."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...


class Probeable(ABC):
    """A writer or reader of a Model that says what it computes with its weights, for the engine's
    probe of a weight edge; an edge is probed where both ends can be.
    """

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids that its Model knows."""
        ...

    @abstractmethod
    def probe(self, ids: Ragged) -> np.ndarray:
        """float32: of each token of these rows but a row's first, its log-prob given those before
        it at temperature 1; with a scalar head the value before it. Changes nothing; of several
        ranks all call it.
        """
        ...


class EvaluateKernel(Kernel, Protocol):
    """A sink that measures all rows of an evaluation."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Its metrics; the score is the one whose name ends in /reward."""
        ...


class Cursor(Protocol):
    """A source's place in its data."""

    @property
    def rows(self) -> int:
        """Rows of one data epoch."""
        ...

    def position(self) -> int:
        """The first position that was not made yet."""
        ...

    def seek(self, position: int) -> None: ...
