"""Plans of several Workers whose kernels start fast (no torch), and operators that misbehave."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.graph import Graph
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Prompt, Reward
from dataflow.user import Columns, OperatorDeclaration, operator
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_input import Fetch, PlannedInput
from engine.protocol.messages import ChunkDone, From, Reported, RunChunk
from engine.protocol.refs import Gather, Ref
from operators.data import prompts
from operators.kernels.scoring_process import Children


class Numbers:
    """A source of 100 rows that are their own positions."""

    rows = 100

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._session = session

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        self._session.metric("numbers/made", 1.0, len(chunk.keys))
        texts = [str(position) for position in chunk.keys.position.tolist()]
        yield Batch.make(chunk.keys, {"prompt": texts}, Prompt)

    def close(self) -> None:
        print("numbers closed")


WAITING, RELEASED = threading.Event(), threading.Event()
"""Of a kernel in this process."""
LONG_WAIT = 2.5
"""Seconds after which a kernel that nobody releases goes on: some heartbeats."""


class WaitsOutside(Numbers):
    """Waits as for environments, with its rows in flight, until it is released."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        self._session.flight(len(chunk.keys))
        with self._session.waiting("environments"):
            WAITING.set()
            RELEASED.wait(LONG_WAIT)
        self._session.flight(0)
        yield from super().run(chunk)


class ClosedToday(Numbers):
    """Refuses to open."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        raise DataError(f"{node.name}: closed today. Fix: come tomorrow.")


class WithChild(Numbers):
    """Has a process for a function, like the kernel of rewards."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        super().open(node, layout, session)
        self._children = Children(["waits"], [waits], 60.0)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """It never gets an answer."""
        self._children.score({0: pa.record_batch({"completion": ["x"]})})
        yield from super().run(chunk)

    def close(self) -> None:
        self._children.close()


def waits(completions: Sequence[str], **columns: object) -> list[float]:
    threading.Event().wait()
    return []


class PickleBomb:
    """Unpickling it ends the process with a recognisable code."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (99,)


@operator()
def doubled(prompt: Columns[Prompt]) -> Columns[Reward]:
    print("doubling", len(prompt), "rows")
    rewards = np.array([2.0 * float(p) for p in prompt["prompt"]], np.float32)
    return Columns.make(Reward, like=prompt, reward=rewards)


@operator()
def refuses(prompt: Columns[Prompt]) -> Columns[Reward]:
    raise LookupError("nothing of the kind")


@operator()
def hangs(prompt: Columns[Prompt]) -> Columns[Reward]:
    threading.Event().wait()
    return doubled.fn(prompt)


@operator()
def holds(prompt: Columns[Prompt]) -> Columns[Reward]:
    """Holds the interpreter's lock, practically forever."""
    re.match("(a+)+$", "a" * 60 + "b")
    return doubled.fn(prompt)


@operator()
def dies(prompt: Columns[Prompt]) -> Columns[Reward]:
    print("about to die")
    sys.stdout.flush()
    os._exit(7)


@operator()
def exits(prompt: Columns[Prompt]) -> Columns[Reward]:
    print("about to leave")
    sys.exit(7)


@operator()
def garbles(prompt: Columns[Prompt]) -> Columns[Reward]:
    """Writes a pickle to the control socket; the process of the run must not read it."""
    payload = pickle.dumps(PickleBomb(prompt["prompt"][0]))
    os.write(int(sys.argv[3]), len(payload).to_bytes(8, "little") + b"\0" + payload)
    return hangs.fn(prompt)


def plan(
    second: OperatorDeclaration = doubled, *, source: type[Numbers] = Numbers, threads: int = 1
) -> Plan:
    """`numbers` in the Worker `source` -> an operator in the Worker `host`."""
    node = second(prompts("none.parquet", batch=4, name="numbers")).node
    fetch = Fetch(producer="numbers", columns=("prompt",))
    usual = {"scope": "row", "region": "stream", "source": "numbers"}
    numbers = PlannedNode(
        name="numbers",
        operator="prompts",
        work="source",
        relation="source",
        kernel=f"{__name__}:{source.__name__}",
        workers=("source",),
        returns=("prompt",),
        **usual,
    )
    planned = PlannedNode(
        name=node.name,
        operator=node.name,
        work="host",
        relation="same",
        inputs=(PlannedInput(name="prompt", gate="numbers", fetches=(fetch,)),),
        kernel="operators.kernels.host:ColumnFunction",
        workers=("host",),
        layout=Layout(threads=threads),
        returns=("reward",),
        **usual,
    )
    graph = Graph("host", node)
    nodes = (numbers, planned)
    return Plan(
        graph="host", digest="", seed=1, nodes=nodes, sources=(), recorder="source", program=graph
    )


def chunk(number: int, positions: range) -> RunChunk:
    """Rows of the source."""
    return RunChunk(id=number, node="numbers", worker="source", step=1, keys=Keys.of(positions))


def gathered(ref: Ref, column: str = "prompt", *, producer: str = "numbers") -> Gather:
    """One column of a whole block."""
    rows = np.arange(len(ref.keys))
    block = np.zeros(len(rows), np.int64)
    refs = ((ref.worker, ref.block),)
    return Gather(producer=producer, columns=(column,), refs=refs, block=block, row=rows)


def chunk_of(number: int, ref: Ref, *, node: str = "doubled") -> RunChunk:
    """The operator on the rows of one block."""
    inputs = {"prompt": (gathered(ref),)}
    return RunChunk(id=number, node=node, worker="host", step=1, keys=ref.keys, inputs=inputs)


def until(workers: Any, *kinds: type, seconds: float = 30.0) -> list[Any]:
    """The events of a run's Workers, up to the first of one of these kinds."""
    events: list[Any] = []
    while not events or not isinstance(events[-1], kinds):
        event = workers.next(seconds)
        assert event is not None, f"nothing came after {events}"
        events.append(event.event if isinstance(event, From) else event)
    return events


def produced_block(workers: Any, number: int = 1, rows: range = range(4)) -> Ref:
    """Have the source produce a block; returns its Ref."""
    workers.tell(chunk(number, rows))
    reported, produced, _ = until(workers, ChunkDone)
    of_chunk = (("numbers/made", 1.0, float(len(rows))),)
    assert reported == Reported(id=number, worker="source", metrics=of_chunk)
    return produced.ref
