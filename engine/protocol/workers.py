"""What the loop asks of the Workers of a run.

Owns: the contract, and the requests about files. Does not own: an implementation, which is in
engine/run/worker/in_process_worker.py (one Worker, in this process),
engine/run/launch/supervisor.py (processes of this host) or engine/run/hosts/hosts.py (several
hosts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.protocol.messages import Event, From, ToWorker
from engine.protocol.refs import Gather
from engine.protocol.reports import Doing, Report, SpanOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write state into a directory; flush samples. nodes: the path of each node's state (a train
    node's model and optimizer, a reader's follower). rows: finished untrained rows, by node.
    """

    directory: Path
    nodes: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, tuple[Keys, Gather]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Read what Save wrote after this Step."""

    directory: Path
    step: int
    nodes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRows:
    """Put a file's rows into the outbox, for the node that it is named for; returns their Ref."""

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
        """Start all and open their kernels. Raises a kernel's error or WorkerGone, and ends all."""
        ...

    def tell(self, instruction: ToWorker, /) -> None:
        """Hand an instruction to its Worker; never blocks."""
        ...

    def next(self, timeout: float | None = None) -> Event | From | None:
        """The next event, in order for each Worker. None: none came within `timeout` seconds (0:
        none has come yet), or `busy` is false and none will come. Raises a kernel's error: of the
        same class, with node, row and traceback in its text.
        """
        ...

    def next_while_idle(self, timeout: float) -> Event | From | None:
        """The next event although no Worker is `busy`: one that came as the last of them became
        idle, or the loss of one, of which its peers know before its process has ended. None: none
        came within `timeout` seconds, or none will.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether some Worker has an unfinished instruction or is starting."""
        ...

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """Let these Workers do something with files, all at once (ranks of one node save together),
        each after what it was told before, except chunks. Returns the answers by Worker; keeps
        events for `next`. Raises as `next` does, and WorkerGone where one is lost meanwhile.
        """
        ...

    def forget(self) -> None:
        """Drop instructions that no Worker has begun, except Release."""
        ...

    def respawn(self, workers: Sequence[str]) -> None:
        """Kill what is left of these and start them with the next epoch; a spare one that was never
        there with its first, 0. One for which there is no room opens when there is: until then the
        Workers are busy.
        """
        ...

    def retire(self, workers: Sequence[str]) -> None:
        """End these, whatever they do, and report no loss; never blocks. What they were told is not
        wanted. `respawn` may bring them back.
        """
        ...

    def reports(self) -> list[Report]:
        """Metrics of all Workers since the last call."""
        ...

    def spans(self) -> list[SpanOf]:
        """Spans of all Workers since the last call."""
        ...

    def doing(self) -> list[Doing]:
        """What each Worker is doing now; from any thread."""
        ...

    def live_reports(self) -> list[Report]:
        """Figures of what flows since the last call, where a kernel of the loop's own thread may
        hold `reports` up; from any thread.
        """
        ...

    def stacks(self) -> list[str]:
        """Stacks of this host's busy Worker processes, within a second; from any thread."""
        ...

    def close(self) -> None:
        """End every Worker, whatever it does, and free all that it has."""
        ...
