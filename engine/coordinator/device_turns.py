"""DeviceTurns: Workers on the same devices take turns, between the core and the world.

    told(instructions) -> instructions    what the core says, as far as its Workers are awake
    heard(event) -> instructions          what an event lets go on

Owns: who of the Workers on the same devices is awake. Does not own: who shares devices (the plan),
what is outstanding (task_ledger.py), nor what sleeping means (a Worker's kernels give up their
devices; its outbox goes on serving rows).

A Worker that shares devices begins asleep, also after a respawn: it gives them back before it says
that it has opened. Each set of devices goes through these states:

    state       waits for                                     left by
    free        somebody to be told something                 any task: Wake -> waking
    waking      the next holder to have its devices           Woken: what was held goes out -> held
    held        the holder to end what it was told, while     the last answer: Sleep -> sleeping
                another Worker has something to do
    sleeping    the holder to have given its devices up       Slept: Wake of the next -> waking

Once another Worker waits, new tasks of the holder wait behind that one's turn: nobody starves. What
a Worker is told while it waits joins its last turn, so that turns are long.

A task ends without another Worker's turn, except what ranks do together, which begins when all have
their devices: so that joins no turn that others wait behind. All ranks are told at once, so of two
such tasks the earlier one comes first on all devices, and no two sets of devices wait for each
other. Ranks of one node never share devices (by the plan).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan
from engine.protocol import messages as m

_SAID = (m.Woken, m.Slept, m.WorkerLost)
"""Events that say of a Worker whether it has its devices."""


@dataclass(slots=True)
class _Turn:
    """What a Worker is told once it has the devices."""

    worker: str
    held: list[m.Task] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _SharedDevices:
    """One set of devices. place: among all. turns: who waits, longest first; while it wakes, the
    holder is first.
    """

    place: int
    state: Literal["free", "waking", "held", "sleeping"] = "free"
    holder: str = ""
    turns: deque[_Turn] = field(default_factory=deque)

    @property
    def next_is_holder(self) -> bool:
        """Whether the holder has the next turn, too."""
        return self.state == "held" and bool(self.turns) and self.turns[0].worker == self.holder

    def free(self) -> None:
        """Nobody has them."""
        self.state, self.holder = "free", ""


class DeviceTurns:
    """All devices that Workers share. Where none are shared, everything passes as it is."""

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._shared = [_SharedDevices(place) for place in range(len(plan.turns))]
        mates = zip(plan.turns, self._shared, strict=True)
        self._devices_of = {name: devices for names, devices in mates for name in names}
        self._in_lock_step = frozenset(n.name for n in plan.nodes if n.ranks > 1)
        in_step = (n.name for n in plan.nodes if n.ranks > 1 and n.layout.in_step)
        self._parts_in_lock_step = frozenset(in_step)

    # --- what the core says -----------------------------------------------------------------------

    def let_through(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        """Hold tasks back until their Worker has its devices; returns what may go out now, in
        order. Within a Worker only Go and Release overtake.
        """
        out: list[m.Instruction] = []
        for instruction in instructions:
            out += self._let_one_through(instruction)
        return out

    def _let_one_through(self, instruction: m.Instruction) -> list[m.Instruction]:
        if isinstance(instruction, m.Respawn):
            for worker in instruction.workers:
                self._forget_worker(worker)
            return [instruction, *self._hand_on_all(instruction.workers)]
        if not isinstance(instruction, m.Task):
            return [instruction]
        devices = self._devices_of.get(instruction.worker)
        if devices is None:
            return [instruction]
        if devices.state == "held" and devices.holder == instruction.worker and not devices.turns:
            self._outstanding.note_sent(instruction.id, instruction.worker)
            return [instruction]
        self._turn(devices, instruction).held.append(instruction)
        return self._hand_on(devices)

    def _turn(self, devices: _SharedDevices, instruction: m.Task) -> _Turn:
        """This Worker's last turn; for a task of several ranks only if that is the last of all."""
        together = self._is_together(instruction)
        # What ranks do together begins when all have their devices: in a turn that others wait
        # behind, two sets of devices could wait for each other.
        turns = list(devices.turns)[-1:] if together else devices.turns
        for turn in reversed(turns):
            if turn.worker == instruction.worker:
                return turn
        new_turn = _Turn(instruction.worker)
        devices.turns.append(new_turn)
        return new_turn

    def _is_together(self, instruction: m.Task) -> bool:
        """Whether several ranks do this together, and wait for each other in it."""
        match instruction:
            case m.TrainStep() | m.FinishStep() | m.RunChunk():
                return instruction.node in self._in_lock_step
            case m.TrainPart():
                return instruction.node in self._parts_in_lock_step
            case m.Offer():
                return instruction.writer in self._in_lock_step
        return False

    # --- what the world says ----------------------------------------------------------------------

    def go_on_after(self, event: m.Event) -> list[m.Instruction]:
        """Hand devices on as an event allows, once the ledger has noted it; returns the tasks that
        go out.
        """
        if not isinstance(event, _SAID):
            return self._hand_on_all(())
        match event:
            case m.Woken():
                self._devices_of[event.worker].state = "held"
            case m.Slept():
                self._devices_of[event.worker].free()
            case m.WorkerLost():
                self._forget_worker(event.worker)
        return self._hand_on_all((event.worker,))

    def _hand_on_all(self, workers: Iterable[str]) -> list[m.Instruction]:
        """Hand on the devices of these Workers, and of those that have answered something: all that
        can have changed.
        """
        if not self._shared:
            return []
        moved: dict[int, _SharedDevices] = {}
        for worker in self._outstanding.drain_eased().union(workers):
            devices = self._devices_of.get(worker)
            if devices is not None:
                moved[devices.place] = devices
        out: list[m.Instruction] = []
        # By place, as a set of Workers has no order: the same events give the same instructions.
        for place in sorted(moved):
            out += self._hand_on(moved[place])
        return out

    def _forget_worker(self, worker: str) -> None:
        """Drop the turns of a Worker that is gone: the core asks again for what it still wants."""
        devices = self._devices_of.get(worker)
        if devices is not None:
            devices.turns = deque(turn for turn in devices.turns if turn.worker != worker)
            if devices.holder == worker:
                devices.free()

    def _hand_on(self, devices: _SharedDevices) -> list[m.Instruction]:
        """Hand the devices on, as far as is possible without a further event."""
        out: list[m.Instruction] = []
        while devices.next_is_holder:
            for task in devices.turns.popleft().held:
                self._outstanding.note_sent(task.id, task.worker)
                out.append(task)
        if not devices.turns:
            return out
        if devices.state == "held" and not self._outstanding.busy(devices.holder):
            devices.state = "sleeping"
            out.append(m.Sleep(worker=devices.holder))
        elif devices.state == "free":
            devices.state, devices.holder = "waking", devices.turns[0].worker
            out.append(m.Wake(worker=devices.holder))
        return out

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = []
        for devices in self._shared:
            if devices.state in ("waking", "sleeping"):
                lines.append(f"worker {devices.holder}: is {devices.state}")
            waiting = dict.fromkeys(turn.worker for turn in devices.turns)
            lines += [
                f"worker {name}: waits for the devices that {devices.holder} has"
                for name in waiting
                if name != devices.holder
            ]
        return lines
