"""Replicas of nodes without state, which join and leave while the run goes on.

    a replica is   waits for                                  left by
    absent         to be wanted                               Respawn -> joining
    joining        its process, its kernels                   WorkerOpened -> present
                                                              not wanted: Retire -> absent
    present        -                                          not wanted, or its machine is taken
                                                              away -> leaving
                                                              WorkerLost: Respawn -> joining
    leaving        its chunks to end, its blocks to be        then, or when its time is over:
                   needed no more                             Retire -> absent
                                                              wanted again -> present
                                                              WorkerLost -> absent
    given up       -                                          -

Owns: how many are wanted, and these states. Does not own: what a Worker that ends takes with it
(losses.py), weights of one that has opened (versions.py), the rule for more or fewer
(replica_scaling.py).

A replica that leaves gets no further chunk, and has `grace` seconds: what it still does or keeps
after them is made again, as after a death. Then its Worker may join again, with the next epoch.
Where nobody takes its machine away, it stays beyond them while a Step is trained on its rows: the
run would have to go back to a checkpoint. One that dies again and again is given up where the
others are as many as there have to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.coordinator.recovery import nobody_considers
from engine.coordinator.replica_scaling import BalanceRule
from engine.coordinator.run_settings import Settings
from engine.plan.plan import Plan, PlannedNode
from engine.plan.replica_ranges import elastic_nodes, least_replicas, movable_workers

METRIC = "replicas/"
"""The beginning of the metric of a node, after which its name comes."""

_State = Literal["absent", "joining", "present", "leaving", "given up"]
Moves = tuple[list[str], list[str]]
"""Workers that end, and that begin."""


@dataclass(slots=True, eq=False)
class _Replicas:
    """Those of the nodes that share these Workers. wanted: how many there are to be. movable: those
    that may leave. work: seconds that they ran chunks above the cut in this Step, added up.
    """

    nodes: list[PlannedNode]
    workers: tuple[str, ...]
    least: int
    movable: frozenset[str]
    wanted: int
    state: dict[str, _State]
    on_able: Callable[[str], None]
    """Called with one that gets chunks from now on."""
    ends: dict[str, float] = field(default_factory=dict)
    """When the time of one that leaves is over."""
    going: set[str] = field(default_factory=set)
    """Those whose machine is taken away: wanted or not, they leave."""
    rule: BalanceRule = field(default_factory=BalanceRule)
    work: float = 0.0
    working: int = 0
    """Those that run a chunk above the cut."""
    changed: bool = True
    """Whether one has come or gone in this Step, or it is the first: its times say little."""
    count: Counter[_State] = field(init=False)

    def __post_init__(self) -> None:
        self.count = Counter(self.state.values())

    def are(self, *states: _State) -> list[str]:
        if not any(self.count[state] for state in states):
            return []
        return [w for w in self.workers if self.state[w] in states]

    @property
    def coming(self) -> int:
        """How many are there, or are to join."""
        return self.count["joining"] + self.count["present"]

    @property
    def most(self) -> int:
        """How many there can be."""
        return len(self.workers) - self.count["given up"]

    @property
    def steady(self) -> bool:
        """Whether all that are wanted were there for the whole Step, and no others."""
        return not self.changed and self.count["present"] == self.wanted

    def scale(self, count: int) -> None:
        self.wanted = min(max(count, self.least), self.most)

    def leave(self, worker: str, end: float) -> None:
        self.moves(worker, "leaving")
        self.ends.setdefault(worker, end)

    def moves(self, worker: str, state: _State) -> None:
        self.count[self.state[worker]] -= 1
        self.count[state] += 1
        self.state[worker] = state
        self.changed = True
        if state == "present":
            self.on_able(worker)

    def end(self, worker: str) -> None:
        self.moves(worker, "absent")
        self.ends.pop(worker, None)
        self.going.discard(worker)


class Replicas:
    """Of a plan; without spare Workers nothing here ever changes."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self._settings = settings
        self.groups = _groups(plan, lambda worker: self.on_able(worker))
        self._of = {w: group for group in self.groups for w in group.workers}
        self._node = {n.name: group for group in self.groups for n in group.nodes}
        self._streams = {n.name for n in elastic_nodes(plan) if n.region == "stream"}
        self._chunks: Counter[str] = Counter()
        """Chunks above the cut that each replica runs."""
        self.training = False
        """Whether the Step itself is under way."""
        self.on_able: Callable[[str], None] = nobody_considers
        """Called with a replica that is to be given chunks from now on."""
        self._trained = 0.0
        """Seconds of this Step below the cut."""
        self._now: float | None = None
        if settings.scaling == "most":
            for group in self.groups:
                group.scale(len(group.workers))

    # --- what is wanted ---------------------------------------------------------------------------

    def scale(self, node: str, count: int) -> None:
        """So many replicas of a node, or as near to that as its least and most allow."""
        if node in self._node:
            self._node[node].scale(count)

    def leave(self, workers: Iterable[str], now: float) -> list[str]:
        """These have to end soon; others take their places. Returns those that cannot leave."""
        stay = []
        for worker in workers:
            group = self._of.get(worker)
            if group is None or worker not in group.movable:
                stay.append(worker)
            elif group.state[worker] != "absent":
                group.going.add(worker)
                group.leave(worker, now + self._settings.grace)
        return stay

    # --- who is there -----------------------------------------------------------------------------

    def takes(self, worker: str) -> bool:
        """Whether a Worker that is there is to be given chunks."""
        group = self._of.get(worker)
        return group is None or group.state[worker] == "present"

    def note_opened(self, worker: str) -> None:
        """It is there."""
        group = self._of.get(worker)
        if group is not None and group.state[worker] == "joining":
            group.moves(worker, "present")

    def note_lost(self, worker: str) -> bool:
        """It has died. Whether it was leaving, so that it is not to begin again."""
        group = self._of.get(worker)
        if group is None:
            return False
        if group.state[worker] == "leaving":
            group.end(worker)
            return True
        group.moves(worker, "joining")
        return False

    def give_up(self, worker: str) -> int | None:
        """A Worker that was lost is never begun again. Returns how many replicas there can be from
        now on; None where it is no replica, or one of those that there have to be.
        """
        group = self._of.get(worker)
        if group is None or worker not in group.movable or group.most <= group.least:
            return None
        group.moves(worker, "given up")
        group.scale(group.wanted)
        return group.most

    def moves(self, owes: Callable[[str], bool], keeps: Callable[[str], bool]) -> Moves:
        """Who ends now, and who begins then. owes: whether a Worker has something to answer; keeps:
        whether it has a block that is needed.
        """
        ended: list[str] = []
        begun: list[str] = []
        for group in self.groups:
            for worker in group.are("leaving"):
                if self._over(group, worker) or self._needless(group, worker, owes, keeps):
                    group.end(worker)
                    ended.append(worker)
            ended += self._too_many(group)
            begun += self._begin(group)
        return ended, begun

    def _over(self, group: _Replicas, worker: str) -> bool:
        late = (self._now or 0.0) >= group.ends[worker]
        return late and (worker in group.going or not self.training)

    def _needless(
        self,
        group: _Replicas,
        worker: str,
        owes: Callable[[str], bool],
        keeps: Callable[[str], bool],
    ) -> bool:
        """Whether nothing of it is needed but its place: all others leave, too, and somebody has to
        do what there is to do.
        """
        alone = not (group.count["absent"] or group.coming)
        return not owes(worker) and (alone or not keeps(worker))

    def _too_many(self, group: _Replicas) -> Iterator[str]:
        """Those that nobody wants and that are not there yet. Lets the others leave."""
        now = self._now or 0.0
        more = group.coming - group.wanted
        if more <= 0:
            return
        may_leave = [w for w in reversed(group.workers) if w in group.movable]
        joining = [w for w in may_leave if group.state[w] == "joining"]
        present = [w for w in may_leave if group.state[w] == "present"]
        for worker in (joining + present)[:more]:
            if worker in joining:
                group.end(worker)
                yield worker
            else:
                group.leave(worker, now + self._settings.grace)

    def _begin(self, group: _Replicas) -> Iterator[str]:
        """Those that begin; first of all those that were to leave stay."""
        short = group.wanted - group.coming
        if short <= 0:
            return
        may_stay = [w for w in group.are("leaving") if w not in group.going]
        for worker in may_stay[:short]:
            group.moves(worker, "present")
            del group.ends[worker]
            short -= 1
        for worker in group.are("absent")[:short]:
            group.moves(worker, "joining")
            yield worker

    @property
    def moving(self) -> bool:
        """Whether something is to be done here though nothing comes."""
        return any(group.count["leaving"] or group.coming != group.wanted for group in self.groups)

    # --- time -------------------------------------------------------------------------------------

    def passes(self, now: float) -> None:
        """Note the time, and what it was spent on."""
        seconds = 0.0 if self._now is None else now - self._now
        self._now = now
        for group in self.groups:
            group.work += seconds * group.working
        if self.training:
            self._trained += seconds

    def runs(self, node: str, worker: str, more: int) -> None:
        """A Worker has a chunk of this node more (1), or less (-1)."""
        if node not in self._streams:
            return
        self._chunks[worker] += more
        if self._chunks[worker] == max(more, 0):  # its first one, or its last
            self._of[worker].working += more

    def step_ended(self) -> Mapping[str, float]:
        """A Step is trained: decide whether there should be more or fewer. Returns its metrics."""
        for group in self.groups:
            if self._settings.scaling == "balance" and group.steady:
                count = group.wanted
                more = group.rule.after_step(count, group.work / count, self._trained)
                group.scale(count + more)
            group.work = 0.0
            group.changed = bool(group.count["joining"] or group.count["leaving"])
        self._trained = 0.0
        return {METRIC + node: float(group.count["present"]) for node, group in self._node.items()}

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = []
        for group in self.groups:
            if not (group.count["present"] or group.count["leaving"]):
                lines.append(f"{group.nodes[0].name}: no replica of it is there")
        for worker, group in self._of.items():
            if group.state[worker] == "joining":
                lines.append(f"worker {worker}: is to join, and has not opened yet")
            elif group.state[worker] == "leaving":
                lines.append(f"worker {worker}: leaves, and gets no further chunk")
        return lines


def _groups(plan: Plan, on_able: Callable[[str], None]) -> list[_Replicas]:
    """All nodes of the same Workers are scaled together."""
    by_workers: dict[tuple[str, ...], list[PlannedNode]] = {}
    for node in elastic_nodes(plan):
        by_workers.setdefault(node.workers, []).append(node)
    may_move = movable_workers(plan)
    groups = []
    for workers, nodes in by_workers.items():
        state: dict[str, _State] = dict.fromkeys(workers, "present")
        state |= dict.fromkeys(state.keys() & plan.spare, "absent")
        group = _Replicas(
            nodes=nodes,
            workers=workers,
            least=least_replicas(plan, nodes[0]),
            movable=may_move.intersection(workers),
            wanted=least_replicas(plan, nodes[0]),
            state=state,
            on_able=on_able,
        )
        groups.append(group)
    return groups
