"""The messages between the process of the run and a Worker's process (engine/run/worker_process).

    to the Worker      sent by (supervisor.py)         handled by (worker_process.py)
    Open               _start, once, first             main
    Command            tell: an instruction            _handle, then the main thread
    Request            ask                             the main thread, which replies
    Connect            peers.py, before its Command    worker_channel.py
    PeerAddresses      meet, _start                    worker_channel.py
    Forget, Quit       forget; close                   _handle

    to the Supervisor  sent by (worker_process.py)     handled by (worker_io.py)
    ChannelBound       the start                       endpoint of the ChildProcess
    WorkerUpdate       worker_updates.py               events, metrics, spans, prints
    RequestReply       _reply                          `ask`, which waits for it
    Beat               each BEAT seconds               heartbeat.py
    Failed             FailureReport                   failures.py

Owns: these messages. Does not own: their bytes (wire.py), the socket (control_socket.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataflow import errors
from engine.channels.descriptors import explain_shortage
from engine.keep.record.place import RecordPlace
from engine.protocol.messages import From, ToWorker
from engine.protocol.refs import Ref
from engine.protocol.reports import Doing, Report, SpanOf
from engine.protocol.workers import Ask

_KINDS = (
    errors.PlanError,
    errors.DataError,
    errors.KernelError,
    errors.RunError,
    errors.CheckpointError,
    errors.StorageError,
)
"""Errors that arrive with their own class; a subclass arrives as the nearest of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A Worker's place in its rank group. The descriptor of their meeting file comes with Open, but
    for ranks on several hosts: these are named, by rank, and meet at the first of them.
    """

    rank: int
    world: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A Worker's part in a run on several hosts.

    address: where its channel answers, at any free port. near: the Workers of its host, itself too.
    private: nobody else is on the network, so nothing is encrypted; else each Worker makes keys for
    itself. lease: seconds for a lost connection to come back.
    """

    worker: str
    address: str
    near: tuple[str, ...]
    private: bool
    lease: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where one incarnation of a Worker is reached.

    endpoint: of its channel; empty while it starts and once it is gone. key: its public CURVE key,
    empty in a private network. meeting: of the first rank's store, if ranks are on several hosts.
    """

    worker: str
    epoch: int
    endpoint: str = ""
    key: bytes = b""
    meeting: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Who the Worker is. plan: pickled by cloudpickle, since it contains the user's functions.

    outbox: bytes of memory for its rows, before they go to files in `spill` (None: the system's
    folder). folder: the run's, for what can be looked at meanwhile. samples: the folder of sample
    files, if it writes them. seat: of a rank. network: if there are several hosts. record: which
    rows are recorded, and where. verify: what is checked of rows from this host (RunOptions).
    """

    worker: str
    epoch: int
    plan: bytes
    outbox: int
    inproc: bool = False
    samples: Path | None = None
    samples_every: int = 1
    seat: Seat | None = None
    network: Network | None = None
    spill: Path | None = None
    record: RecordPlace | None = None
    folder: Path | None = None
    verify: Literal["structure", "content"] = "structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An instruction. The socket belongs to one incarnation and keeps the order, so it has neither
    epoch nor number.
    """

    instruction: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, answered by a RequestReply of the same number."""

    number: int
    request: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Comes with a data socket to another Worker, which replaces an earlier one. serve: this Worker
    answers there. tensors: the file in which both meet to exchange tensors comes, too.
    """

    peer: str
    serve: bool
    tensors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddresses:
    """Where the channels of Workers of all hosts answer, as far as that has changed."""

    entries: tuple[PeerAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelBound:
    """Where this Worker's channel answers other hosts; key, meeting: as in PeerAddress."""

    endpoint: str
    key: bytes = b""
    meeting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop every instruction that has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """Close the kernels and end; at once if a kernel is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUpdate:
    """What has happened. printed: lines of users' functions. ended: how many instructions this
    incarnation has ended or forgotten.
    """

    events: tuple[From, ...] = ()
    reports: tuple[Report, ...] = ()
    spans: tuple[SpanOf, ...] = ()
    printed: tuple[str, ...] = ()
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReply:
    """ref: the block that the request made, if any. lost: the Worker whose loss made it fail."""

    number: int
    ref: Ref | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The Worker is alive and is doing this."""

    doing: Doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A kernel raised. kind: the name of a class of dataflow.errors; text: its message."""

    kind: str
    text: str

    @staticmethod
    def of(error: BaseException, who: str) -> Failed:
        """The message for an exception. One that is no DataflowError is a fault of the engine."""
        if isinstance(error, errors.DataflowError):
            kind = next((k for k in type(error).__mro__ if k in _KINDS), errors.RunError)
            return Failed(kind=kind.__name__, text=str(error))
        if isinstance(error, OSError) and (problem := explain_shortage(error)) is not None:
            text = f"worker {who}: {problem}."
            return Failed(kind=errors.RunError.__name__, text=text)
        raised = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "Fix: report it with the traceback at the end of its log."
        text = f"worker {who}: internal error: {raised}. {fix}"
        return Failed(kind=errors.RunError.__name__, text=text)

    def error(self) -> errors.DataflowError:
        """The exception, for the process of the run to raise."""
        kind = next((k for k in _KINDS if k.__name__ == self.kind), errors.RunError)
        return kind(self.text)


ToWorkerProcess = Command | Request | Connect | PeerAddresses | Forget | Quit
ToSupervisor = ChannelBound | WorkerUpdate | RequestReply | Beat | Failed
Control = Open | ToWorkerProcess | ToSupervisor
