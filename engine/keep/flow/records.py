"""The records of a run's `events/` folder: what nodes, edges and Workers did in a stretch of time.

Owns: their types. Does not own: their files (segments.py), nor how they are made (fold.py).

Seconds are of the run's clock. What is said of one replica or rank is keyed `node@worker`, a data
edge `producer->consumer`, a weight edge `model->reader@worker`. What is 0 is left out of the files.
"""

from __future__ import annotations

import msgspec

from engine.protocol.progress import PoolProgress, StreamProgress

FORMAT = 1


class ReplicaFlow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node in one Worker. The first seven are seconds, whose sum is the stretch's length.

    for_rows: no input was complete. for_weights: a version was being loaded. for_turn: its Worker
    was busy with another node, or asleep. for_room: there was no room, as admission was full.
    for_outside: its kernel waited for something outside of the run. idle: there was nothing to wait
    for, or the replica was not there.
    """

    busy: float = 0.0
    for_rows: float = 0.0
    for_weights: float = 0.0
    for_turn: float = 0.0
    for_room: float = 0.0
    for_outside: float = 0.0
    idle: float = 0.0
    blames: dict[str, float] = {}
    """Seconds waited, by the `node` or `node@worker` that was being waited for."""
    outside: dict[str, float] = {}
    """The seconds of for_outside, by what was waited for: `environments`."""
    in_flight: int = 0
    """Rows that its kernel had in flight as the stretch ended: episodes that go on."""
    chunks: int = 0
    """Calls of its kernel that have ended."""
    rows: int = 0
    """Rows made, or trained."""
    tokens: int = 0
    version: int = -1
    """Of the weights that it has; -1 without any."""
    device_peak: int = 0
    """Greatest bytes allocated on its GPU while it computed."""


class EdgeFlow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A data edge. rows, bytes: taken by the consumer. The rest: as the stretch ended."""

    rows: int = 0
    bytes: int = 0
    waiting_rows: int = 0
    """Made by the producer, not yet taken."""
    waiting_bytes: int = 0
    """Their bytes, by the mean of those that were taken or, before any was, by the plan."""
    age: float = 0.0
    """Seconds since the oldest of them was made."""


class WeightFlow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A weight edge to one reader in one Worker."""

    offered: int = 0
    """The newest version of the writer."""
    loaded: int = 0
    """The version that the reader has."""
    loads: int = 0
    seconds: float = 0.0
    """From Load to Loaded, all loads of the stretch."""
    bytes: int = 0
    """Pulled or received; 0 for an alias."""


class CutFlow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cut of one source, as the stretch ended."""

    ready: int = 0
    """Finished prompts that are in no Step yet."""
    wanted: int = 0
    """Prompts of a Step."""
    outstanding: int = 0
    """Admitted, not retired."""
    room: int = 0
    """The most that may be outstanding."""
    lags: list[int] = []
    """Trained rows by lag: the number at index k is that of rows of lag k."""


class WorkerFlow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Worker, as the stretch ended; bytes."""

    memory: int = 0
    """Resident, of its process."""
    peak: int = 0
    """Greatest resident, since it began."""
    before: int = 0
    """Resident before its kernels were opened."""
    outbox: int = 0
    device: int = 0
    """Allocated on its GPU."""
    device_peak: int = 0
    doing: str = ""
    """The node that it runs."""
    what: str = ""
    waits_for: str = ""
    """What its kernel waits for outside of the run; empty where it computes."""
    doing_for: float = 0.0
    """Seconds since it began with that, or to wait."""


class Flow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="flow"):
    """A stretch of time: a Step, from the end of the one before to its own, or about a second.

    step: the Step that ended with it; of a second, the last Step that has ended. wall: Unix time at
    its end. start, end: of the run's clock, which begins anew with each attempt.
    """

    step: int
    start: float
    end: float
    wall: float
    phase: int = 0
    nodes: dict[str, ReplicaFlow] = {}
    edges: dict[str, EdgeFlow] = {}
    weights: dict[str, WeightFlow] = {}
    cuts: dict[str, CutFlow] = {}
    workers: dict[str, WorkerFlow] = {}
    streams: dict[str, StreamProgress] = {}
    """By source; as the stretch ended, or as its Step was about to make its update."""
    pools: dict[str, PoolProgress] = {}
    """By generation, as the stretch ended."""


class Began(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="began"):
    """An attempt begins, or goes on, after this Step."""

    step: int
    wall: float
    phase: int = 0


class Lost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lost"):
    """A Worker was lost, after this Step had ended."""

    step: int
    wall: float
    worker: str
    error: str


class Tombstones(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tombstones"):
    """Rows that failed for good, or were given up, after this Step had ended. row_only: their
    groups went on without them.
    """

    step: int
    wall: float
    node: str
    keys: list[tuple[int, int, int]]
    error: str
    """Of the first."""
    failed: bool = True
    row_only: bool = False


Record = Began | Flow | Lost | Tombstones
