"""Kernels without an engine: a recording Session, kernels opened with it, chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.processor_time import ProcessorTime
from dataflow.randomness import row_seeds
from dataflow.schema import MESSAGE, Prompt


class FakeSession:
    """A Session that records metrics; of one process if no group is given."""

    def __init__(
        self,
        seed: int = 0,
        node: str = "rollout",
        *,
        rank: int = 0,
        world: int = 1,
        group: Any = None,
    ) -> None:
        self.seed, self.rank, self.world, self.group, self._node = seed, rank, world, group, node
        self.metrics: dict[str, list[tuple[float, float]]] = {}
        self.elsewhere: list[ProcessorTime] = []
        self.waits: list[str] = []
        self.flights: list[int] = []
        self.modules: dict[Any, Any] = {}
        self.tombstones: list[tuple[tuple[int, int, int], str]] = []
        self.lost_alone: list[tuple[int, int, int]] = []
        """Those of the tombstones whose groups go on."""
        self.charged: list[bool] = []
        """Of each tombstone, whether it counts against the error budget."""

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """Like the engine's: keyed by seed, node and row."""
        return row_seeds(self.seed, self._node, keys)

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Remember it."""
        self.metrics.setdefault(name, []).append((value, count))

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Remember it as it ends."""
        yield
        self.waits.append(reason)

    def flight(self, count: int) -> None:
        """Remember it."""
        self.flights.append(count)

    def count_computed(self, elsewhere: ProcessorTime) -> None:
        """Remember it."""
        self.elsewhere.append(elsewhere)

    def tombstone(
        self,
        key: tuple[int, int, int],
        error: str,
        *,
        failed: bool = True,
        row_only: bool = False,
    ) -> None:
        """Remember it."""
        self.tombstones.append((key, error))
        self.charged.append(failed)
        if row_only:
            self.lost_alone.append(key)

    def module(self, model: Any, make: Callable[[], Any]) -> Any:
        """One module per Model name."""
        return self.shared(model.name, make)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """One for each name."""
        if name not in self.modules:
            self.modules[name] = make()
        return self.modules[name]

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """Not initialised, as in an outbox: here filled with what no column can take for zeros."""
        return np.full(count * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)


def open_kernel(
    kernel: Any,
    model: Model | str,
    *,
    layout: Layout | None = None,
    session: Any = None,
    node: str = "rollout",
    returns: tuple[str, ...] = (),
    **params: Any,
) -> Any:
    """The kernel, opened for a Model (or for a base, as Model "policy") with these parameters."""
    model = Model("policy", model) if isinstance(model, str) else model
    models = {"policy": model, "model": model}
    kernel.open(
        KernelNode(name=node, operator=node, models=models, params=params, returns=returns),
        layout or Layout(),
        session or FakeSession(node=node),
    )
    return kernel


def prompt_chunk(prompts: Sequence[Any], positions: Sequence[int] | None = None) -> Chunk:
    """A chunk of the operator `generate` with these prompts (strings or message lists)."""
    keys = Keys.of(range(len(prompts)) if positions is None else positions)
    column = prompts if isinstance(prompts[0], str) else pa.array(prompts, pa.list_(MESSAGE))
    batch = Batch.make(keys, {"prompt": column}, Prompt)
    return Chunk(id=0, step=1, keys=keys, inputs={"prompt": batch})


def rows_chunk(rows: Batch, **inputs: Batch) -> Chunk:
    """A chunk of these rows for a forward kernel."""
    return Chunk(id=0, step=1, keys=rows.keys, inputs={"rows": rows} | inputs)
