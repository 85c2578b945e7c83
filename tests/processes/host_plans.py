"""Plans of several Workers whose kernels start fast (no torch), and functions that misbehave on
request.

Owns: the plans. Does not own: what is asserted of the Supervisor that runs them
(test_supervisor.py).
"""

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
from engine.coordinator.messages import RunChunk
from engine.coordinator.refs import Gather, Ref
from engine.plan.plan import Fetch, Plan, PlannedInput, PlannedNode
from operators.data import prompts
from operators.kernels.scoring_process import Children

HERE = "host_plans"


class Numbers:
    """A source of 100 rows that are their own positions."""

    rows = 100

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._session = session

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """The positions as texts."""
        self._session.metric("numbers/made", 1.0, len(chunk.keys))
        yield Batch.make(
            chunk.keys, {"prompt": [str(p) for p in chunk.keys.position.tolist()]}, Prompt
        )

    def close(self) -> None:
        """Say so in the log."""
        print("numbers closed")


class Closed(Numbers):
    """Refuses to open."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Always."""
        raise DataError(f"{node.name}: closed today. Fix: come tomorrow.")


class WithChild(Numbers):
    """Has a process for a function, as the kernel of rewards has."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Start it."""
        super().open(node, layout, session)
        self._children = Children(["waits"], [waits], 60.0)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Never gets an answer."""
        self._children.score({0: pa.record_batch({"completion": ["x"]})})
        yield from super().run(chunk)

    def close(self) -> None:
        """End it."""
        self._children.close()


def waits(completions: Sequence[str], **columns: object) -> list[float]:
    """For nothing."""
    threading.Event().wait()
    return []


@operator()
def doubled(prompt: Columns[Prompt]) -> Columns[Reward]:
    print("doubling", len(prompt), "rows")
    return Columns.make(
        Reward, like=prompt, reward=np.array([2.0 * float(p) for p in prompt["prompt"]], np.float32)
    )


@operator()
def refuses(prompt: Columns[Prompt]) -> Columns[Reward]:
    raise LookupError("nothing of the kind")


@operator()
def hangs(prompt: Columns[Prompt]) -> Columns[Reward]:
    threading.Event().wait()
    return doubled.fn(prompt)


@operator()
def holds(prompt: Columns[Prompt]) -> Columns[Reward]:
    """Holds the interpreter's lock: for longer than there are atoms."""
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
    """Writes a frame that is a pickle to the control socket; the process of the run must not read
    it.
    """
    payload = pickle.dumps(Bomb(prompt["prompt"][0]))
    os.write(int(sys.argv[3]), len(payload).to_bytes(8, "little") + b"\0" + payload)
    return hangs.fn(prompt)


class Bomb:
    """Unpickled, it ends the process with a code of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (99,)


@operator()
def environment(prompt: Columns[Prompt]) -> Columns[Reward]:
    """The number of OpenMP threads, and whether torch is there."""
    values = [float(os.environ["OMP_NUM_THREADS"]), float("torch" in sys.modules)] * len(prompt)
    return Columns.make(Reward, like=prompt, reward=np.array(values[: len(prompt)], np.float32))


def plan(
    second: OperatorDeclaration = doubled,
    *,
    workers: tuple[str, str] = ("source", "host"),
    source: str = f"{HERE}:Numbers",
    threads: int = 1,
) -> Plan:
    """`numbers` -> an operator, each in a Worker of its own."""
    origin = prompts("none.parquet", batch=4, name="numbers")
    node = second(origin)
    program = Graph("host", node.node)
    layout = Layout(threads=threads)
    numbers = PlannedNode(
        name="numbers",
        operator="prompts",
        work="source",
        scope="row",
        region="stream",
        relation="source",
        source="numbers",
        kernel=source,
        workers=(workers[0],),
        returns=("prompt",),
    )
    planned = PlannedNode(
        name=node.node.name,
        operator=node.node.name,
        work="host",
        scope="row",
        region="stream",
        relation="same",
        source="numbers",
        inputs=(
            PlannedInput(
                name="prompt",
                gate="numbers",
                fetches=(Fetch(producer="numbers", columns=("prompt",)),),
            ),
        ),
        kernel="operators.kernels.host:ColumnFunction",
        workers=(workers[1],),
        layout=layout,
        returns=("reward",),
    )
    return Plan(
        graph="host",
        digest="",
        seed=1,
        nodes=(numbers, planned),
        sources=(),
        recorder=workers[0],
        program=program,
    )


def chunk(number: int, positions: range, worker: str = "source") -> RunChunk:
    """Rows of the source."""
    return RunChunk(id=number, node="numbers", worker=worker, step=1, keys=Keys.of(positions))


def chunk_of(number: int, ref: Ref, *, node: str = "doubled", worker: str = "host") -> RunChunk:
    """The operator on the rows of one block."""
    rows = np.arange(len(ref.keys))
    gather = Gather(
        producer="numbers",
        columns=("prompt",),
        refs=((ref.worker, ref.block),),
        block=np.zeros(len(rows), np.int64),
        row=rows,
    )
    return RunChunk(
        id=number, node=node, worker=worker, step=1, keys=ref.keys, inputs={"prompt": (gather,)}
    )
