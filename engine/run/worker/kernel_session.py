"""The session: all of the engine that a kernel sees.

Owns: random streams, metrics, tombstones and modules of one node, its access to the outbox's
memory. Does not own: the kernels, that memory (engine/channels), how waits are noted
(outside_waits.py), where reports go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataflow.batch import Keys
from dataflow.errors import KernelError
from dataflow.processor_time import ProcessorTime
from dataflow.randomness import row_seeds
from engine.protocol.reports import Report
from engine.run.worker.outside_waits import NodeWaits

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """A row that was given up; see `dataflow.kernel.Session.tombstone`."""

    key: tuple[int, int, int]
    error: str
    failed: bool
    row_only: bool


Allocate = Callable[[int], np.ndarray]
"""A number of bytes -> uint8 [bytes]: `engine.channels.contract.Outbox.allocate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRanks:
    """A Worker's place among the ranks of a node. group: their torch.distributed process group."""

    rank: int = 0
    world: int = 1
    group: Any = None


class NodeSession:
    """The Session of one node (see dataflow.kernel.Session)."""

    def __init__(
        self,
        node: str,
        seed: int,
        modules: dict[str, Any],
        names: Mapping[str, str],
        ranks: SessionRanks | None = None,
        memory: Allocate | None = None,
        waits: NodeWaits | None = None,
    ) -> None:
        """modules: this Worker's, by name. names: which of them the node uses for each Model.
        waits: where waits are noted; nobody does without it.
        """
        ranks = ranks or SessionRanks()
        self.seed = seed
        self.rank, self.world, self.group = ranks.rank, ranks.world, ranks.group
        self._node = node
        self._modules = modules
        self._names = names
        self._memory = memory or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._waits = waits
        self._reports: list[Report] = []
        self._tombstones: list[Tombstone] = []
        self._elsewhere = ProcessorTime()
        self._least_tokens = 0

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """uint64 [rows], keyed by seed, node and row."""
        return row_seeds(self.seed, self._node, keys)

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Kept until the Worker reports."""
        self._reports.append((name, float(value), float(count)))

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Noted while it lasts."""
        if self._waits is None:
            return nullcontext()
        return self._waits.waiting(reason)

    def note_least_tokens(self, count: int) -> None:
        """Kept until the next batch is told."""
        self._least_tokens = count

    def take_least_tokens(self) -> int:
        """What was noted since the last call; 0 if nothing was."""
        count, self._least_tokens = self._least_tokens, 0
        return count

    def flight(self, count: int) -> None:
        """Noted until there is another count."""
        if self._waits is not None:
            self._waits.flight(count)

    def count_computed(self, elsewhere: ProcessorTime) -> None:
        """Kept until the Worker asks."""
        self._elsewhere += elsewhere

    def tombstone(
        self,
        key: tuple[int, int, int],
        error: str,
        *,
        failed: bool = True,
        row_only: bool = False,
    ) -> None:
        """Kept until the Worker reports."""
        row = Tombstone(key=key, error=error, failed=failed, row_only=row_only)
        self._tombstones.append(row)

    def module(self, model: Any, make: Callable[[], T]) -> T:
        """The module that the plan lets this node use for a Model, made at its first use."""
        return self.shared(self._names[model.name], make)

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """What this Worker has under a name, made at its first use."""
        if name not in self._modules:
            self._modules[name] = make()
        return self._modules[name]

    def allocate(self, count: int, dtype: npt.DTypeLike) -> np.ndarray:
        """[count] of the outbox's memory, one allocation a call."""
        kind = np.dtype(dtype)
        if count < 0 or kind.hasobject:
            problem = f"expected at least 0 numbers of a fixed size, found {count} of {kind}"
            fix = "Fix: the length of the column, and the type that its schema declares."
            raise KernelError(f"{self._node}: allocate: {problem}. {fix}")
        return self._memory(count * kind.itemsize).view(kind)

    def reports(self) -> list[Report]:
        """Metrics since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def elsewhere(self) -> ProcessorTime:
        """What other processes computed since the last call."""
        elsewhere, self._elsewhere = self._elsewhere, ProcessorTime()
        return elsewhere

    def tombstones(self) -> list[Tombstone]:
        """Rows given up since the last call."""
        tombstones, self._tombstones = self._tombstones, []
        return tombstones
