"""The kernel of `reward` with real child processes, opened for the caller's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.schema import Completion
from operators.kernels.scoring import HostReward
from tests.kit.kernels import FakeSession


class ScoringSession(FakeSession):
    """A Session of the kernel of `reward`."""

    @property
    def failed(self) -> dict[tuple[int, int, int], str]:
        """Key of a row -> why it failed; no row fails twice."""
        by_key = dict(self.tombstones)
        assert len(by_key) == len(self.tombstones)
        return by_key

    def logged(self) -> list[tuple[str, float]]:
        """(name, value) of each metric."""
        return [(name, value) for name, of in self.metrics.items() for value, _ in of]


@contextmanager
def scoring(
    *fns: Callable[..., Any], kind: type[HostReward] = HostReward, **params: Any
) -> Iterator[tuple[HostReward, ScoringSession]]:
    """The kernel, open for these functions. params: of `reward`; scope, inproc and models: of its
    node.
    """
    kernel, session = kind(), ScoringSession()
    own = {name: params.pop(name) for name in ("scope", "inproc", "models") if name in params}
    node = KernelNode(name="score", operator="reward", params={"fns": fns, **params}, **own)
    try:
        kernel.open(node, Layout(), session)
        yield kernel, session
    finally:
        kernel.close()


def answers(completions: list[str], keys: Keys | None = None, **columns: Any) -> Chunk:
    """A chunk of these completions, the first at position 10; columns: further or replaced ones."""
    rows = len(completions)
    keys = keys if keys is not None else Keys.of(range(10, 10 + rows))
    ids = Ragged(np.arange(rows, dtype=np.int32), np.arange(rows + 1))
    texts = {"prompt": [f"p{i}" for i in range(rows)], "completion": completions}
    batch = Batch.make(keys, texts | {"completion_ids": ids} | columns, Completion)
    return Chunk(id=1, step=3, keys=keys, inputs={"rows": batch})


def rewards(kernel: HostReward, chunk: Chunk) -> list[float]:
    [batch] = kernel.run(chunk)
    return batch.array("reward").to_pylist()
