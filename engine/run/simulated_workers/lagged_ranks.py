"""Ranks that decode with a lag: when simulated ones take up weights, and begin a run.

Owns: the versions that ranks have and do not use yet, which runs are open, and what waits for
ranks to have one version. Does not own: ranks that wait for each other with a chunk (groups.py),
when a version has come (simulated_worker.py).

As in a Worker (engine/run/worker/rank_agreement.py): within a run a version is taken up once all
ranks have it; a rank with an older one drops it where each has one. Between two runs each takes up
what comes, and the next run begins once all have one version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.plan.plan import Plan

Act = Callable[[], None]
Share = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that a rank has. use: takes it up. drop: answers without."""

    version: int
    use: Act
    drop: Act


@dataclass(slots=True)
class _Replica:
    """One replica's. followers: what the other ranks do at the end of its run, and of a chunk.
    beginning: who waits to begin, and with which version.
    """

    is_open: bool = False
    held: dict[str, HeldVersion] = field(default_factory=dict)
    beginning: dict[str, tuple[Callable[[], int], Act]] = field(default_factory=dict)
    at_end: list[Act] = field(default_factory=list)
    at_end_of: dict[int, list[Act]] = field(default_factory=dict)


class LaggedRanks:
    """Of all replicas of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._shares: dict[str, dict[str, Share]] = {}
        self._replicas: dict[tuple[str, Share], _Replica] = {}
        for node in plan.nodes:
            if node.work == "train" or node.ranks == 1 or not node.lag:
                continue
            self._shares[node.name] = {w: node.share_of(w) for w in node.workers}

    def governs(self, node: str) -> bool:
        """Whether ranks of this node agree on what they take up."""
        return node in self._shares

    def _find(self, node: str, worker: str) -> tuple[Share, _Replica]:
        share = self._shares[node][worker]
        return share, self._replicas.setdefault((node, share), _Replica())

    def hold(self, node: str, worker: str, held: HeldVersion) -> None:
        """A version has come to a reader: it is taken up now, or once all ranks have it."""
        if not self.governs(node):
            held.use()
            return
        share, replica = self._find(node, worker)
        if not replica.is_open:
            held.use()
            self._begin_if_equal(share, replica)
            return
        older = replica.held.pop(worker, None)
        if older is not None:
            older.drop()
        replica.held[worker] = held
        if len(replica.held) == len(share):
            self._settle(replica)

    def _settle(self, replica: _Replica) -> None:
        """Each rank has a version: take up the same one, or drop the older ones."""
        newest = max(each.version for each in replica.held.values())
        older = {w: each for w, each in replica.held.items() if each.version < newest}
        if older:
            for worker, each in older.items():
                del replica.held[worker]
                each.drop()
            return
        held, replica.held = replica.held, {}
        for each in held.values():
            each.use()

    def begin(self, node: str, worker: str, version: Callable[[], int], then: Act) -> None:
        """A rank begins a chunk with the others, once all have one version."""
        share, replica = self._find(node, worker)
        replica.beginning[worker] = version, then
        self._begin_if_equal(share, replica)

    def _begin_if_equal(self, share: Share, replica: _Replica) -> None:
        beginning = replica.beginning
        if len(beginning) < len(share):
            return
        if len({version() for version, _ in beginning.values()}) > 1:
            return
        replica.beginning, replica.is_open = {}, True
        for worker in share:  # the lead first
            beginning[worker][1]()

    def follow(self, node: str, worker: str, chunk: int, at_end_of: Act, at_end: Act) -> None:
        """What a rank that is no lead does at the end of a chunk, and of the run."""
        _, replica = self._find(node, worker)
        replica.at_end_of.setdefault(chunk, []).append(at_end_of)
        replica.at_end.append(at_end)

    def end_chunk(self, node: str, lead: str, chunk: int) -> None:
        """The lead has all rows of a chunk."""
        for act in self._find(node, lead)[1].at_end_of.pop(chunk, []):
            act()

    def end_run(self, node: str, lead: str) -> None:
        """No row of a run is left."""
        if not self.governs(node):
            return
        _, replica = self._find(node, lead)
        replica.is_open = False
        held, replica.held = replica.held, {}
        at_end, replica.at_end = replica.at_end, []
        for each in held.values():
            each.use()
        for act in at_end:
            act()

    def forget(self, worker: str) -> None:
        """A Worker is gone, and with it all ranks of its replicas."""
        self._replicas = {
            (node, share): replica
            for (node, share), replica in self._replicas.items()
            if worker not in share
        }
