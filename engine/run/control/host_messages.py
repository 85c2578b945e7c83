"""The messages between the process of the run and its part on a host.

    to the host                       sent by (hosts.py)       handled by (host.py)
    Begin (first)                     _begin                   HostedRun
    Relay, RelayRequest               tell, ask                HostedRun._carry_out
    RespawnThere, RetireThere         respawn, retire          the same
    Forget                            forget                   the same
    StacksWanted                      stacks                   the same
    PeerAddresses                     _spread_addresses        the same
    Quit                              close                    desk.py

    to the run                        sent by (host.py)        handled by (hosts.py)
    HostUpdate, HostReply, Failed     HostedRun                _heard
    HostEnded                         HostedRun.run            _wait_for_end
    HostBeat                          desk.py; may be lost     link.py

Owns: these messages. Does not own: their bytes (engine/run/control/wire.py), that none is lost
(numbered_messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.protocol.messages import From, ToWorker, WorkerLost
from engine.protocol.refs import Ref
from engine.protocol.reports import Doing, Report, SpanOf
from engine.protocol.workers import Ask
from engine.run.control.control import Network, PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """One attempt at a run wants the Workers that its plan puts on this host.

    plan: pickled by cloudpickle. folder: the run's, seen by every host, which checks its plan.json
    against `planned`. directory: where relative paths begin. path: folders to import from. options:
    as in a run folder. networks: of this host's Workers. absent: those of them that begin as they
    are respawned, with the epoch of that. lease: seconds of silence after which each side gives the
    other up.
    """

    plan: bytes
    folder: Path
    directory: Path
    planned: str
    path: tuple[str, ...]
    networks: tuple[Network, ...]
    absent: Mapping[str, int]
    lease: float
    options: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """An instruction to a Worker of this host."""

    instruction: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """One request to each of these Workers, answered by one HostReply of this number."""

    number: int
    workers: tuple[str, ...]
    requests: tuple[Ask, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnThere:
    """Restart these Workers, or begin them."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireThere:
    """End these Workers, and report no loss."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksWanted:
    """The next heartbeat is to have the stacks of busy Workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """What has happened on a host. endpoints: where its Workers' channels answer, if that has
    changed. opened: all of them are open. carried: how many of the run's messages it has carried
    out. busy: whether its Workers are, after these.
    """

    events: tuple[From | WorkerLost, ...] = ()
    reports: tuple[Report, ...] = ()
    spans: tuple[SpanOf, ...] = ()
    endpoints: tuple[PeerAddress, ...] = ()
    opened: bool = False
    carried: int = 0
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """All requests of this number were carried out, or (`gone`) a Worker was lost."""

    number: int
    workers: tuple[str, ...] = ()
    refs: tuple[Ref | None, ...] = ()
    gone: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnded:
    """Every Worker of the run on this host has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBeat:
    """A heartbeat. now: by the host's monotonic clock. doing: what its Workers do. stacks: those of
    busy Workers, if they were wanted.
    """

    now: float
    doing: tuple[Doing, ...] = ()
    stacks: tuple[str, ...] = ()


ToHost = Begin | Relay | RelayRequest | RespawnThere | RetireThere | StacksWanted
ToRun = HostUpdate | HostReply | HostEnded | HostBeat
Hosting = ToHost | ToRun
