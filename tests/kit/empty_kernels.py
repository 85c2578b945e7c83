"""Kernels of nothing: rows of the right shape, computed from nothing and without torch.

A Worker with one of them has what the engine needs of a Worker, and nothing else. A reward tells
what its process has imported that no such Worker needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Piece, Session
from dataflow.schema import Advantage, Prompt, Reward, Rollout, Schema

HEAVY = ("torch", "transformers", "zmq", "pandas", "pyarrow.parquet", "pyarrow.dataset", "asyncio")
"""Modules that take memory and time."""
IMPORTED = "reward/imported"
"""A column, and with `/mean` behind it a metric: how many of `HEAVY` a row's Worker has."""
_TOKENS = 4


class EmptyKernel:
    """Opens and closes."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._node = node

    def close(self) -> None:
        pass

    def made(self, keys: Keys, columns: Mapping[str, Any], schema: type[Schema]) -> Batch:
        """A batch of those columns that somebody reads."""
        wanted = {name: columns[name] for name in self._node.returns}
        return Batch.make(keys, wanted, schema)


class EmptyPrompts(EmptyKernel):
    """A source that has a million rows."""

    rows = 1_000_000

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        columns = {name: ["what?"] * len(chunk.keys) for name in self._node.returns}
        yield Batch.make(chunk.keys, columns, Prompt)


class EmptyReader(EmptyKernel):
    """Takes a Model's weights, of which there are none."""

    version = 0

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        assert not list(pieces)
        self.version = version


class EmptyGenerate(EmptyReader):
    """Answers of four tokens."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        keys = chunk.keys.expand(self._node.params["n"])
        ids, ones = _tokens(keys, np.int32), _tokens(keys, np.uint8, 1)
        columns = {
            "prompt_ids": ids,
            "completion_ids": ids,
            "completion_mask": ones,
            "completion": ["nothing"] * len(keys),
            "sampler_logprobs": _tokens(keys, np.float32),
            "version": _tokens(keys, np.int32, self.version),
            "finish": ["stop"] * len(keys),
        }
        yield self.made(keys, columns, Rollout)


class EmptyReward(EmptyKernel):
    """Tells what is imported."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        keys = chunk.keys
        parity = (keys.sample % 2).astype(np.float32)
        imported = np.full(len(keys), sum(name in sys.modules for name in HEAVY), np.float32)
        columns = {"reward": parity, IMPORTED: imported}
        yield Batch.make(keys, columns, Reward)


class EmptyAdvantage(EmptyKernel):
    """No row is better than another."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        yield self.made(chunk.keys, {"advantage": _tokens(chunk.keys, np.float32)}, Advantage)


class EmptyTrain(EmptyKernel):
    """The writer of a Model without weights."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        return {"optim/updates": 1.0}

    def pieces(self) -> Iterable[Piece]:
        return ()

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)

    def restore(self, directory: Path) -> None:
        pass

    save_weights = save


def _tokens(keys: Keys, dtype: Any, value: float = 0) -> Ragged:
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * _TOKENS
    return Ragged(np.full(len(keys) * _TOKENS, value, dtype), offsets)
