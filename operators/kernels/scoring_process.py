"""The processes of reward functions: one for each function, all called at once.

Owns: which functions run where, calling them at the same time, and their time limit. Does not own:
one process (scoring_parent.py), the child's inside (scoring_child.py), the consequences of a fault
(scoring.py).

Columns are sent as an Arrow IPC stream, numbers come back as msgpack. The only pickle is the
function itself, sent once at the start of a child.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import cloudpickle
import pyarrow as pa

from dataflow.errors import KernelError
from dataflow.shipping import by_value
from operators.kernels.scoring_child import Caught, Scorer, values_due
from operators.kernels.scoring_frames import ScoringOutcome
from operators.kernels.scoring_output import Output, hear_function
from operators.kernels.scoring_parent import Child, await_outcomes
from operators.rewards import RewardFn

_START_SECONDS = 120.0
"""Time for a child to import what its function imports; torch alone takes seconds."""


class Scorers(Protocol):
    """Several functions that can be called on different rows at once."""

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, ScoringOutcome]:
        """Call function i on calls[i]; never raises because of what a function does."""
        ...

    def replace(self, index: int) -> None:
        """Give function i a fresh process: a failure may have left the old one in any state."""
        ...

    def raised_error(self, index: int) -> BaseException | None:
        """What function i raised in its last call, with its frames, if it ran in this process."""
        ...

    def close(self) -> None: ...


class InProcess:
    """The functions called directly, one after another: breakpoints work, time limits do not."""

    def __init__(self, names: Sequence[str], fns: Sequence[RewardFn]) -> None:
        self._scorers = [Scorer(fn) for fn in fns]
        self._outputs = [Output(name) for name in names]

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, ScoringOutcome]:
        """See Scorers."""
        return {index: self._score(index, records) for index, records in calls.items()}

    def _score(self, index: int, records: pa.RecordBatch) -> ScoringOutcome:
        with hear_function(self._outputs[index]):
            return self._scorers[index].score(records)

    def replace(self, index: int) -> None:
        """Do nothing: there is only this process."""

    def raised_error(self, index: int) -> BaseException | None:
        """See Scorers."""
        return self._scorers[index].raised

    def close(self) -> None:
        """End the event loops of async functions."""
        for scorer in self._scorers:
            scorer.close()


class Children:
    """Each function in its own child process; one that timed out or died is replaced."""

    def __init__(self, names: Sequence[str], fns: Sequence[RewardFn], timeout: float) -> None:
        """Start all children at once. Raises KernelError if one cannot be shipped or loaded."""
        # The kernel kills a child when the *thread* that started it ends, so one thread that stays
        # starts them all.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-processes")
        self._timeout = timeout
        self._children: list[Child] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            # All are shipped before one starts: a function that cannot be sent starts none.
            shipped = [ship(name, fn) for name, fn in zip(names, fns, strict=True)]
            self._children = [Child(name, code) for name, code in zip(names, shipped, strict=True)]
            self._start(self._children)
            undo.pop_all()

    def score(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, ScoringOutcome]:
        """See Scorers. The timeout in seconds is for all together, as they run in parallel."""
        called = {index: self._children[index] for index in calls}
        self._start([child for child in called.values() if not child.running])
        for index, child in called.items():
            records = calls[index]
            child.ask(_stream(records), values_due(records))
        await_outcomes(list(called.values()), time.monotonic() + self._timeout)
        return {index: child.take() for index, child in called.items()}

    def replace(self, index: int) -> None:
        """Kill the child; the next call starts another."""
        self._children[index].kill()

    def raised_error(self, index: int) -> BaseException | None:
        """Never known here."""

    def close(self) -> None:
        """End all children and what they started; busy ones are killed."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.end()
        self._starter.shutdown()

    def pids(self) -> list[int]:
        """The running processes of functions, in the order of the functions."""
        return [child.pid for child in self._children if child.running]

    def _start(self, children: Sequence[Child]) -> None:
        """Start all at once; one that was killed while it started is started once more."""
        for again in (True, False):
            for child in children:
                self._starter.submit(child.start).result()
            await_outcomes(children, time.monotonic() + _START_SECONDS)
            children = [child for child in children if not child.is_ready(or_killed=again)]


def ship(name: str, fn: RewardFn) -> bytes:
    """Pickle a function: by name if its module can be imported afresh, else by value.

    Raises KernelError if it holds something that cannot be sent to another process.
    """
    with by_value(), Caught() as caught:
        return cloudpickle.dumps(fn)
    problem = caught.fault.text if caught.fault else ""
    raise KernelError(
        f"reward {name!r}: cannot be sent to a process of its own:"
        f" {problem}. Fix: make locks, connections and files"
        " inside the function, or run with inproc."
    )


def _stream(records: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as writer:
        writer.write_batch(records)
    return sink.getvalue()
