"""What the loop asks of the Workers of a run, wherever they are.

Owns: the contract, and the requests that are the loop's own and no decision of the
coordinator (files). Does not own: an implementation: engine/launch/inproc.py (one Worker in
this process) and engine/launch/supervisor.py (a Supervisor with processes on this host).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.messages import Event, From, ToWorker
from engine.coordinator.refs import Gather
from engine.observe.reports import Doing, Report, SpanOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the state of these nodes (train nodes: model, optimizer; readers: the follower that
    they have) into `directory`/<its path>; flush samples. `rows`: finished untrained rows to write
    under `directory`/rows, by node.
    """

    directory: Path
    nodes: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, tuple[Keys, Gather]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Read back what Save wrote after this Step."""

    directory: Path
    step: int
    nodes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRows:
    """Put rows from a file into the outbox, as if the kernel of the node whose name the file has
    had made them; answers with their Ref.
    """

    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Write a train node's model alone, as a Hugging Face directory."""

    node: str
    directory: Path


Ask = Save | Restore | KeepRows | SaveWeights


class WorkerGone(RunError):
    """A Worker was lost while the loop waited for it. `worker`: its name."""

    def __init__(self, worker: str, problem: str) -> None:
        super().__init__(f"{worker}: {problem}")
        self.worker = worker


class Workers(Protocol):
    """The Workers of a run. All methods are called from the loop's thread."""

    def open(self) -> Iterator[Event | From]:
        """Start every Worker and open its kernels; yields what they tell, SourceOpened and
        WorkerOpened among it.

        Raises what a kernel refuses its node with, WorkerGone where a Worker dies meanwhile;
        nothing is left running.
        """
        ...

    def tell(self, instruction: ToWorker) -> None:
        """Hand an instruction to its Worker; never blocks."""
        ...

    def next(self, timeout: float | None = None) -> Event | From | None:
        """The next event, in the order of each Worker. None: none came within so many seconds
        (None: however long it takes); or, where `busy` is false, none will come.

        Raises the first cause where a kernel raised: the same type of error, with node, row and
        traceback in its text.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether some Worker has an instruction that it has not ended, or is being started."""
        ...

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """Let these Workers do something with files, all at the same time (ranks of one node save
        in lock-step), each after the weights and whatever else but chunks it was told before; wait
        for every answer, by Worker. Events that come meanwhile are kept for `next`. Raises as
        `next` does; WorkerGone where one is lost meanwhile.
        """
        ...

    def forget(self) -> None:
        """Instructions that no Worker has begun yet are wanted no longer, but for Release."""
        ...

    def respawn(self, workers: Sequence[str]) -> None:
        """Kill what is left of these and start them anew with the next epoch; they are told of as
        WorkerOpened.
        """
        ...

    def reports(self) -> list[Report]:
        """Metrics of all Workers since the last call."""
        ...

    def spans(self) -> list[SpanOf]:
        """What was done since the last call."""
        ...

    def doing(self) -> list[Doing]:
        """What each Worker is doing now; callable from any thread."""
        ...

    def stacks(self) -> list[str]:
        """Where the Workers of this host that are doing something stand, each in a process of its
        own; takes up to a second, and is for what hangs. Callable from any thread.
        """
        ...

    def close(self) -> None:
        """End every Worker, whatever it is doing; afterwards no process, file descriptor or memory
        of them is left.
        """
        ...
