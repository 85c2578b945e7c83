"""Kernels that answer everything, and record what they were asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Piece, Session
from dataflow.kernel_abilities import Interruptible, Joinable, PartTrainer, Sleeper
from dataflow.schema import Rollout
from engine.channels.contract import BlockRequest, PeerLost, Requests
from engine.channels.inproc import InprocChannel

SOON = 20.0
"""Seconds."""
WEIGHTS = [Piece("a", np.arange(3)), Piece("b", np.ones((2, 2)))]


class Scripted(Interruptible, PartTrainer, Sleeper):
    """Answers everything, and records it in `asked`."""

    rows = 10

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self.session = session
        self.asked: list[Any] = []
        self.drains = node.params.get("on_update") != "interrupt"

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Each row alone, in a batch of its own; between them one without rows."""
        for row in range(len(chunk.keys)):
            ids = pa.array([[row]], pa.large_list(pa.int32()))
            yield Batch.make(chunk.keys.take(np.array([row])), {"completion_ids": ids}, Rollout)
            yield Batch.make(Keys.of([]), {}, Rollout)

    @property
    def interruptible(self) -> bool:
        return not self.drains

    def interrupt(self) -> None:
        self.asked.append("interrupt")

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        self.asked.append((version, [piece.name for piece in pieces]))

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        self.asked.append(assignment)
        self.session.metric("train/of_the_session", 1.0)
        return {"train/of_the_step": 1.0}

    def train_part(self, assignment: Assignment) -> None:
        self.asked.append(assignment.keys.position.tolist())

    def finish_parts(self, step: int) -> Mapping[str, float]:
        self.asked.append("finish")
        return {"train/of_the_step": float(step)}

    def forget_parts(self) -> None:
        self.asked.append("forget")

    def pieces(self) -> Iterator[Piece]:
        import torch

        for piece in WEIGHTS:
            yield Piece(piece.name, torch.from_numpy(piece.data))
        self.asked.append("pieces")

    def sleep(self) -> None:
        self.asked.append("sleep")

    def wake(self) -> None:
        self.asked.append("wake")

    def close(self) -> None:
        pass


class Joining(Scripted, Joinable):
    """Takes further chunks, and runs them one after another."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        self.waiting = [chunk]
        while self.waiting:
            yield from super().run(self.waiting.pop(0))

    def join(self, chunk: Chunk) -> None:
        self.asked.append(("join", chunk.id))
        self.waiting.append(chunk)


class PeersAreGone(InprocChannel):
    """Of a Worker whose peers have died."""

    def fetch(self, requests: Sequence[BlockRequest]) -> NoReturn:
        raise PeerLost("data", "its process is gone")


class HeldChannel(InprocChannel):
    """Whose fetches beside the kernels go on when they are let, or find their peer gone."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.is_gone = False

    def fetch_beside(self, requests: Requests) -> list[pa.RecordBatch]:
        assert self.may_go_on.wait(SOON)
        if self.is_gone:
            raise PeerLost("train", "its process is gone")
        return super().fetch(requests)
