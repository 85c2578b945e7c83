"""The Workers of a run on the hosts of a Ray cluster: a Supervisor on each, and a link to it.

    waits for                                       unblocked by
    an event, a reply, an end (`next`, `ask`, ...)  the links, a time limit

Owns: which host is told what, the Workers' epochs, spreading addresses and public keys of channels,
what a lost host means. Does not own: links (link.py), rooms in the cluster (host_bundles.py), the
other end (host.py).

Rows go from Worker to Worker, never through here. A lost host is the death of its Workers. Those
that are begun again begin on another node, or on the same one if only the host's process died.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import RunError
from dataflow.import_order import import_path
from dataflow.shipping import pickle_by_value
from engine.keep.run_folder import RunFolder
from engine.plan import options as run_options
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol.messages import (
    Event,
    From,
    LeaveRequested,
    ToWorker,
    WorkerLost,
)
from engine.protocol.reports import Doing, Report, SpanOf
from engine.protocol.workers import Ask, WorkerGone
from engine.run.control import control
from engine.run.control import host_messages as hm
from engine.run.hosts.host_bundles import HostPlace, HostReservations
from engine.run.hosts.link import HostLink, HostLost
from engine.run.hosts.ray import draining, join_cluster
from engine.run.launch.supervisor import CONTROL_BYTES

_GRACE = 10.0
"""Seconds for a host to say that its Workers have ended."""
_STACKS = 1.0
"""Seconds for stacks to come."""
_DRAIN = 5.0
"""Seconds between two looks at which nodes are about to be taken away."""


def of_this_clock(spans: Iterable[SpanOf], ahead: float) -> list[SpanOf]:
    """Spans by this host's clock. ahead: inf while unknown, and then they stay as they are."""
    shift = ahead if math.isfinite(ahead) else 0.0
    return [msgspec.structs.replace(s, start=s.start + shift, end=s.end + shift) for s in spans]


@dataclass(slots=True, kw_only=True)
class _Remote:
    """Another host as the loop sees it. sent: how many messages; update: the latest from it."""

    name: str
    place: HostPlace
    link: HostLink
    workers: tuple[str, ...]
    sent: int = 0
    update: hm.HostUpdate = field(default_factory=hm.HostUpdate)
    endpoints: tuple[control.PeerAddress, ...] = ()
    opened: bool = False
    replies: dict[int, hm.HostReply] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    def doing(self) -> list[Doing]:
        """What its Workers are doing. Those not heard from yet are starting."""
        start = Doing(
            worker="", node="its start", what="its host", since=self.since, computes=False
        )
        known = {each.worker: each for each in self.link.doing}
        return [known.get(w, msgspec.structs.replace(start, worker=w)) for w in self.workers]

    def send(self, message: Any) -> None:
        self.sent += 1
        self.link.say(message)

    @property
    def busy(self) -> bool:
        """Whether it has messages to carry out or busy Workers, or may be lost."""
        return self.sent > self.update.carried or self.update.busy or self.link.silent


class HostsWorkers:
    """See `engine.protocol.workers.Workers`."""

    def __init__(self, plan: Plan, folder: RunFolder, options: RunOptions) -> None:
        """plan: with hosts, all of a Ray cluster. Raises RunError where that is gone."""
        assert plan.cluster is not None
        self._plan = plan
        self._folder = folder
        self._options = options
        self._cluster = plan.cluster
        self._networks = _networks(plan)
        self._changed = threading.Event()
        """Set whenever there may be something new."""
        self._events: deque[Event | From] = deque()
        self._reports: list[Report] = []
        self._spans: list[SpanOf] = []
        self._addresses: dict[str, control.PeerAddress] = {}
        self._next = dict.fromkeys(plan.workers, 1) | dict.fromkeys(plan.spare, 0)
        """The epoch with which each Worker is begun the next time."""
        self._requests = self._moved = self._moved_before = 0
        self._closed = False
        self._remotes: dict[str, _Remote] = {}
        """By host; none for one that is lost, or that has no Worker at the moment."""
        self._leaving: list[_Remote] = []
        """Hosts of spare Workers that were retired, until they have ended."""
        self._rooms = HostReservations(plan, options.wait)
        self._pickled = b""
        self._taken_away = threading.Event()
        join_cluster(options.cluster or "")

    def open(self) -> Iterator[Event | From]:
        """All hosts at once. Raises as `Supervisor.open`, and RunError if there is no room."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._pickled = pickle_by_value(self._plan, "the plan of a run on several hosts")
            first = (w for w in self._plan.workers if w not in self._plan.spare)
            hosts = dict.fromkeys(self._plan.hosts[w] for w in first)
            for name, place in self._rooms.first(hosts).items():
                self._begin(name, place, self._plan.spare)
            self._until(self._all_opened)
            opened = [*self._events]
            self._events.clear()
            if (lost := next((e for e in opened if isinstance(e, WorkerLost)), None)) is not None:
                raise WorkerGone(lost.worker, lost.error)
            threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
            undo.pop_all()
        yield from opened

    def _all_opened(self) -> bool:
        return all(remote.opened for remote in self._remotes.values())

    def _begin(self, name: str, place: HostPlace, absent: Sequence[str]) -> None:
        """Start a host's process at this place. absent: Workers that are respawned later."""
        workers, lease = self._rooms.workers_on(name), self._cluster.lease
        link = HostLink(name, place.dial, lease, self._changed.set)
        self._remotes[name] = remote = _Remote(name=name, place=place, link=link, workers=workers)
        begin = hm.Begin(
            plan=self._pickled,
            folder=self._folder.path.absolute(),
            directory=Path.cwd(),
            planned=(self._folder.path / "plan.json").read_text(encoding="utf-8"),
            path=tuple(import_path()),
            networks=tuple(self._networks[w] for w in workers),
            absent={w: self._next[w] for w in absent if w in workers},
            lease=lease,
            options=run_options.encode_options(self._options),
        )
        remote.send(begin)

    def respawn(self, workers: Sequence[str]) -> None:
        """Restart each on its host; a host that was lost begins again, without waiting for it."""
        by_host: dict[str, list[str]] = {}
        for worker in workers:
            by_host.setdefault(self._plan.hosts[worker], []).append(worker)
        for name, here in by_host.items():
            if name not in self._remotes:
                self._begin(name, self._rooms.again(name), self._rooms.workers_on(name))
                known = tuple(self._addresses.values())
                self._remotes[name].send(control.PeerAddresses(entries=known))
            self._remotes[name].send(hm.RespawnThere(workers=tuple(here)))
            for worker in here:
                self._next[worker] += 1

    def retire(self, workers: Sequence[str]) -> None:
        """End each on its host; a host that was begun for a spare Worker ends with it."""
        for worker in workers:
            name = self._plan.hosts[worker]
            remote = self._remotes.get(name)
            if remote is not None and name in self._plan.spare:
                del self._remotes[name]
                self._leaving.append(remote)
                remote.send(control.Quit())
            elif remote is not None:
                remote.send(hm.RetireThere(workers=(worker,)))

    def _dismiss(self, remote: _Remote) -> None:
        """Give back the place of a host that has ended, or was never reached."""
        self._moved_before += remote.link.moved
        remote.link.close()
        self._rooms.give_back(remote.place)

    def _lose(self, remote: _Remote, lost: HostLost) -> None:
        """A host is lost, so its Workers are."""
        del self._remotes[remote.name]
        self._moved_before += remote.link.moved
        remote.link.close()
        self._rooms.note_lost_host(remote.place, ended=lost.ended)
        gone = {w: self._next[w] - 1 for w in remote.workers if self._next[w]}
        self._events += (WorkerLost(worker=w, epoch=n, error=str(lost)) for w, n in gone.items())
        self._tell([control.PeerAddress(worker=w, epoch=n, gone=True) for w, n in gone.items()])
        self._changed.set()

    def _watch_nodes(self) -> None:
        """Say so where a node is about to be taken away."""
        leaving_remotes: list[_Remote] = []
        while not self._taken_away.wait(_DRAIN):
            draining_nodes = draining()
            for name, remote in list(self._remotes.items()):  # which another thread changes
                if remote not in leaving_remotes and remote.place.node in draining_nodes:
                    leaving_remotes.append(remote)
                    reason = f"the node of host {name} is taken away"
                    self._events.append(LeaveRequested(workers=remote.workers, reason=reason))
                    self._changed.set()

    def close(self) -> None:
        """End the Workers everywhere; a host that cannot be reached ends its own with the lease,
        which this waits for.
        """
        if self._closed:
            return
        self._closed = True
        self._taken_away.set()
        with contextlib.ExitStack() as after:
            after.callback(self._rooms.close)
            for remote in self._remotes.values():
                remote.send(control.Quit())
            left = [*self._remotes.values(), *self._leaving]
            for remote in left:
                after.callback(remote.link.close)
            end = time.monotonic() + max(_GRACE, self._cluster.lease)
            for remote in left:
                self._wait_for_end(remote, end)

    def _wait_for_end(self, remote: _Remote, end: float) -> None:
        """Wait until its Workers have ended, unless it was never reached."""
        while remote.link.reached and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            try:
                heard = remote.link.hear()
            except RunError:  # it was given up, as the caller knows
                return
            if any(isinstance(message, hm.HostEnded) for message in heard):
                return
            if not heard:
                self._changed.wait(left)

    def tell(self, instruction: ToWorker) -> None:
        """Send an instruction, unless its host is lost, of which the coordinator will hear."""
        if remote := self._remotes.get(self._plan.hosts[instruction.worker]):
            remote.send(hm.Relay(instruction=instruction))

    def next(self, timeout: float | None = None) -> Event | From | None:
        """The next event of any host."""
        return self._take_event(timeout, lambda: not self.busy)

    def next_while_idle(self, timeout: float) -> Event | From | None:
        """See Workers."""
        return self._take_event(timeout, lambda: False)

    def _take_event(
        self, timeout: float | None, is_in_vain: Callable[[], bool]
    ) -> Event | From | None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._changed.clear()
            event = self._take()
            seconds_left = None if end is None else end - time.monotonic()
            if (
                event is not None
                or is_in_vain()
                or (seconds_left is not None and seconds_left <= 0)
            ):
                return event
            self._changed.wait(seconds_left)

    @property
    def busy(self) -> bool:
        """Whether something may come from any host."""
        return bool(self._events) or any(r.busy for r in self._remotes.values())

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """All of them at once; wait for all replies."""
        self._requests += 1
        number = self._requests
        by_host: dict[str, dict[str, Ask]] = {}
        for worker, request in requests.items():
            by_host.setdefault(self._plan.hosts[worker], {})[worker] = request
        for host, by_worker in by_host.items():
            workers, asks = tuple(by_worker), tuple(by_worker.values())
            remote = self._require_remote(host, workers[0])
            remote.send(hm.RelayRequest(number=number, workers=workers, requests=asks))
        # All hosts are asked before the first reply is waited for.
        replies: dict[str, Any] = {}
        for host, by_worker in by_host.items():
            replies |= self._reply(host, next(iter(by_worker)), number)
        return replies

    def _require_remote(self, host: str, worker: str) -> _Remote:
        """A host that something is asked of. Raises WorkerGone if it is lost."""
        remote = self._remotes.get(host)
        if remote is None:
            raise _lost_meanwhile(worker, host)
        return remote

    def _reply(self, host: str, worker: str, number: int) -> dict[str, Any]:
        remote = self._require_remote(host, worker)
        # A host that was lost meanwhile is gone from the remotes, or begun again as another.
        self._until(lambda: number in remote.replies or self._remotes.get(host) is not remote)
        if number not in remote.replies:
            raise _lost_meanwhile(worker, host)
        reply = remote.replies.pop(number)
        if reply.gone:
            raise WorkerGone(reply.gone, reply.problem)
        return dict(zip(reply.workers, reply.refs, strict=True))

    def forget(self) -> None:
        """Let all Workers forget."""
        for remote in self._remotes.values():
            remote.send(control.Forget())

    def reports(self) -> list[Report]:
        """Metrics of all hosts since the last call, and the bytes sent and received here."""
        reports = [*self._reports]
        self._reports = []
        moved = self._moved_before + sum(r.link.moved for r in self._remotes.values())
        reports.append((CONTROL_BYTES, float(moved - self._moved), 1.0))
        self._moved = moved
        return reports

    def spans(self) -> list[SpanOf]:
        """Spans since the last call, by this host's clock."""
        spans = [*self._spans]
        self._spans = []
        return spans

    def doing(self) -> list[Doing]:
        """By each host's last heartbeat; from any thread."""
        remotes = list(self._remotes.values())  # which the loop's thread changes meanwhile
        return list(chain.from_iterable(remote.doing() for remote in remotes))

    def live_reports(self) -> list[Report]:
        """None: Workers' processes report while their kernels run."""
        return []

    def stacks(self) -> list[str]:
        """Those of the busy Workers of every host that says them within a second."""
        asked = list(self._remotes.values())
        for remote in asked:
            remote.link.stacks = ()
            remote.link.say(hm.StacksWanted())
        end = time.monotonic() + _STACKS
        while time.monotonic() < end and not all(r.link.stacks for r in asked):
            self._taken_away.wait(0.05)
        return list(chain.from_iterable(remote.link.stacks for remote in asked))

    def _until(self, holds: Callable[[], bool]) -> None:
        """Take in messages of the other hosts until this holds. Raises what went wrong there."""
        while True:
            self._changed.clear()
            self._hear()
            self._spread_addresses()  # ranks on several hosts open together
            if holds():
                return
            self._changed.wait()

    def _take(self) -> Event | From | None:
        """The next event, if any. A Worker's new address is spread before its event is returned."""
        self._hear()
        self._spread_addresses()
        return self._events.popleft() if self._events else None

    def _hear(self) -> None:
        for remote in list(self._remotes.values()):
            try:
                heard = remote.link.hear()
            except HostLost as lost:
                self._lose(remote, lost)
                continue
            for message in heard:
                self._take_message(remote, message)
        for remote in [r for r in self._leaving if self._has_left(r)]:
            self._leaving.remove(remote)
            self._dismiss(remote)

    def _has_left(self, remote: _Remote) -> bool:
        try:
            heard = remote.link.hear()
        except HostLost:
            return True
        return not remote.link.reached or any(isinstance(m, hm.HostEnded) for m in heard)

    def _take_message(self, remote: _Remote, message: Any) -> None:
        match message:
            case hm.HostUpdate():
                remote.opened = message.opened
                remote.update = message
                if message.endpoints:
                    remote.endpoints = message.endpoints
                self._events.extend(message.events)
                self._reports.extend(message.reports)
                self._spans.extend(of_this_clock(message.spans, remote.link.ahead))
            case hm.HostReply(number=0):
                raise WorkerGone(message.gone, message.problem)
            case hm.HostReply():
                remote.replies[message.number] = message
            case control.Failed():
                raise message.error()

    def _spread_addresses(self) -> None:
        """Tell all hosts where each Worker's channel answers now."""
        known = chain.from_iterable(remote.endpoints for remote in self._remotes.values())
        self._tell([each for each in known if self._addresses.get(each.worker) != each])

    def _tell(self, new: Sequence[control.PeerAddress]) -> None:
        if new:
            self._addresses |= {entry.worker: entry for entry in new}
            for remote in self._remotes.values():
                remote.send(control.PeerAddresses(entries=tuple(new)))


def _lost_meanwhile(worker: str, host: str) -> WorkerGone:
    return WorkerGone(worker, f"its host {host} was lost while something was asked of it")


def _networks(plan: Plan) -> dict[str, control.Network]:
    """Each Worker's part in the network, but for its host's address."""
    assert plan.cluster is not None
    by_host: dict[str, tuple[str, ...]] = {}
    for worker in plan.workers:
        host = plan.hosts[worker]
        by_host[host] = (*by_host.get(host, ()), worker)
    networks: dict[str, control.Network] = {}
    for worker in plan.workers:
        networks[worker] = control.Network(
            worker=worker,
            address="",
            near=by_host[plan.hosts[worker]],
            private=plan.cluster.private,
            lease=plan.cluster.lease,
        )
    return networks
