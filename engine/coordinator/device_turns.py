"""DeviceTurns: Workers on the same devices take turns, between the core and the world.

    told(instructions) -> instructions    what the core says, as far as its Workers are awake; the rest is held
    heard(event) -> instructions          what an event lets go on

Owns: who of a lease is awake. Does not own: who shares devices (the plan), nor what sleeping
means (a Worker's kernels give up their devices; its outbox goes on serving rows).

A Worker of a lease begins asleep, also after a respawn: it gives its devices back before it tells
that it has opened. Each lease goes through these states:

    state       waits for                                            left by
    free        somebody to be told something                        any instruction: Wake -> waking
    waking      the next holder to have its devices                  Woken: what was held goes out -> held
    held        the holder to end what it was told, while another    the last answer: Sleep -> sleeping
                Worker of the lease has something to do
    sleeping    the holder to have given its devices up              Slept: Wake of who waits longest -> waking

From the moment that another Worker of the lease waits, what the holder is told anew waits behind
that one's turn: so nobody starves. What a Worker is told while it waits joins its last turn: so
turns are long where much is told at once.

What is under way always ends without anything else being told to the same Worker but Go and
Release, which pass at once, and without another Worker's turn, but for what ranks do together: that
begins when all of them have their devices. So it joins no turn that others wait behind. All ranks
are told at once; then of two such things the one that was told first comes first in every lease,
and no two leases can wait for each other. Two ranks of one node are never in one lease (the plan
sees to it): each would wait for the other.

What one rank of a node could not fetch, no rank begins; but each of the others still says that it
is prepared, or that it could not fetch its rows either, and one that sleeps takes its turn for
that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from engine.coordinator.messages import (
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    FetchFailed,
    Instruction,
    Load,
    Loaded,
    Offer,
    Offered,
    Prepared,
    Record,
    Recorded,
    Respawn,
    RunChunk,
    Sleep,
    Slept,
    Stepped,
    Task,
    TrainStep,
    Wake,
    Woken,
    WorkerLost,
)
from engine.plan.plan import Plan


@dataclass(slots=True)
class _Turn:
    """What a Worker is told once it has the devices."""

    worker: str
    held: list[Task] = field(default_factory=list)


@dataclass(slots=True)
class _SharedDevices:
    """One set of devices. under_way: the ids of what each Worker was told and has not ended. turns:
    who waits for the devices, the longest first; while it wakes, the holder is the first of them.
    """

    under_way: dict[str, set[int]]
    state: Literal["free", "waking", "held", "sleeping"] = "free"
    holder: str = ""
    turns: deque[_Turn] = field(default_factory=deque)


class DeviceTurns:
    """Every lease of a plan. In a plan without one, everything passes as it is."""

    def __init__(self, plan: Plan) -> None:
        self._leases = [_SharedDevices({name: set() for name in workers}) for workers in plan.turns]
        self._lease_of = {name: lease for lease in self._leases for name in lease.under_way}
        self._in_lock_step = frozenset(n.name for n in plan.nodes if n.ranks > 1)
        self._ended_epoch: dict[str, int] = {}
        """The last incarnation of each Worker that has died: a death that is told twice is one."""
        self._prepared: dict[int, set[str]] = {}
        """Assignment -> the ranks that wait for Go."""
        self._dropped: set[int] = set()
        """Assignments that some rank could not fetch."""

    # --- what the core says -----------------------------------------------------------------------

    def told(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        """What may go out now, in order; in each Worker nothing overtakes but Go and Release."""
        if not self._leases:
            return list(instructions)
        return [each for instruction in instructions for each in self._told(instruction)]

    def _told(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case Respawn():
                return [
                    instruction,
                    *(each for name in instruction.workers for each in self._lost(name)),
                ]
            case RunChunk() | TrainStep() | Evaluate() | Record() | Offer() | Load():
                lease = self._lease_of.get(instruction.worker)
                return [instruction] if lease is None else self._leased(lease, instruction)
        return [instruction]

    def _leased(self, lease: _SharedDevices, instruction: Task) -> list[Instruction]:
        name = instruction.worker
        if lease.state == "held" and lease.holder == name and not lease.turns:
            lease.under_way[name].add(instruction.id)
            return [instruction]
        self._turn(lease, instruction).held.append(instruction)
        return _moved(lease)

    def _turn(self, lease: _SharedDevices, instruction: Task) -> _Turn:
        """The last turn of whoever is told this; the last one of all, where it is for several
        ranks.
        """
        together = _node_of(instruction) in self._in_lock_step
        among = list(lease.turns)[-1:] if together else lease.turns
        found = next((turn for turn in reversed(among) if turn.worker == instruction.worker), None)
        if found is None:
            found = _Turn(instruction.worker)
            lease.turns.append(found)
        return found

    # --- what the world says ----------------------------------------------------------------------

    def heard(self, event: Event) -> list[Instruction]:
        """What an event lets go on."""
        if not self._leases:
            return []
        match event:
            case Woken():
                return self._woken(event.worker)
            case Slept():
                return self._slept(event.worker)
            case WorkerLost() if event.epoch > self._ended_epoch.get(event.worker, -1):
                self._ended_epoch[event.worker] = event.epoch
                return self._lost(event.worker)
            case FetchFailed():
                return self._unfetched(event)
            case Prepared():
                return self._prepares(event)
            case Stepped() | Offered() | Loaded():
                return self._ended(event.id, event.worker)
            case ChunkDone() | Evaluated() | Recorded():
                return self._ended(event.id)
        return []

    def _woken(self, name: str) -> list[Instruction]:
        lease = self._lease_of[name]
        lease.state = "held"
        return _moved(lease)

    def _slept(self, name: str) -> list[Instruction]:
        lease = self._lease_of[name]
        lease.state, lease.holder = "free", ""
        return _moved(lease)

    def _unfetched(self, event: FetchFailed) -> list[Instruction]:
        """It was not begun; of an assignment, who is prepared for it waits for no Go."""
        self._dropped.add(event.id)
        out = self._ended(event.id, event.worker)
        for rank in self._prepared.pop(event.id, ()):
            out += self._ended(event.id, rank)
        return out

    def _prepares(self, event: Prepared) -> list[Instruction]:
        """A rank waits for Go from now on; for nothing, where another one could not fetch its rows."""
        if event.id in self._dropped:
            return self._ended(event.id, event.worker)
        self._prepared.setdefault(event.id, set()).add(event.worker)
        return []

    def _ended(self, task: int, name: str = "") -> list[Instruction]:
        """A task has been answered, by this Worker (where no name is given: by whoever was told)."""
        out: list[Instruction] = []
        for lease in self._leases:
            for worker, under_way in lease.under_way.items():
                if name in ("", worker):
                    under_way.discard(task)
            out += _moved(lease)
        return out

    def _lost(self, name: str) -> list[Instruction]:
        """A Worker is gone, with everything that it was told: the core tells anew what it still
        wants done.
        """
        lease = self._lease_of.get(name)
        if lease is None:
            return []
        lease.under_way[name].clear()
        lease.turns = deque(turn for turn in lease.turns if turn.worker != name)
        if lease.holder == name:
            lease.state, lease.holder = "free", ""
        return _moved(lease)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = []
        for lease in self._leases:
            if lease.state in ("waking", "sleeping"):
                lines.append(f"worker {lease.holder}: is {lease.state}")
            waiting = dict.fromkeys(
                turn.worker for turn in lease.turns if turn.worker != lease.holder
            )
            lines += [
                f"worker {name}: waits for the devices that {lease.holder} has" for name in waiting
            ]
        return lines


def _moved(lease: _SharedDevices) -> list[Instruction]:
    """Hand the devices on, as far as is possible without a further event."""
    out: list[Instruction] = []
    while lease.state == "held" and lease.turns and lease.turns[0].worker == lease.holder:
        turn = lease.turns.popleft()
        lease.under_way[turn.worker].update(task.id for task in turn.held)
        out += turn.held
    if not lease.turns:
        return out
    if lease.state == "held" and not lease.under_way[lease.holder]:
        lease.state = "sleeping"
        return [*out, Sleep(worker=lease.holder)]
    if lease.state == "free":
        lease.state, lease.holder = "waking", lease.turns[0].worker
        return [*out, Wake(worker=lease.holder)]
    return out


def _node_of(instruction: Task) -> str:
    """The node that this is for, where it can be one with several ranks."""
    match instruction:
        case TrainStep():
            return instruction.node
        case Offer():
            return instruction.writer
    return ""
