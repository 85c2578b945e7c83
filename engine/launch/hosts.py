"""The Workers of a run on several hosts: a Supervisor here, and a link to that of each other host.

    waits for                                       unblocked by
    an event, a reply, an end (`next`, `ask`, ...)  the Supervisor's thread, the links, a time limit

Owns: which host is sent what, spreading the addresses and public keys of channels. Does not own:
links (hostlink.py), the other end (host.py), processes (supervisor.py), a Worker's own keys.

Rows go from Worker to Worker, never through here. A host that is silent for the length of the lease
fails the run, which can be resumed from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import RunError
from dataflow.importing import import_path
from dataflow.shipping import shipped
from engine import options as run_options
from engine.coordinator.messages import Event, From, ToWorker
from engine.launch import control
from engine.launch import host_messages as hm
from engine.launch.hostlink import HostLink, look
from engine.launch.keyfile import read_keys
from engine.launch.supervisor import CONTROL_BYTES, HostShare, Supervisor
from engine.observe.reports import Doing, Report, SpanOf
from engine.observe.runfolder import RunFolder
from engine.options import RunOptions
from engine.plan.cluster import Cluster, Host
from engine.plan.plan import Plan
from engine.run.workers import Ask, WorkerGone

_GRACE = 10.0
"""Seconds for a host to say that its Workers have ended."""


def known(cluster: Cluster, names: frozenset[str]) -> Cluster:
    """The cluster; asks these hosts for resources that its file omits. Raises RunError."""
    unknown = [host for host in cluster.hosts if host.name in names and not host.known]
    if not unknown:
        return cluster
    keys = read_keys(cluster.keys)
    found: dict[str, Host] = {}
    for host in unknown:
        here = look(host, keys.run, keys.host(host.name).public, cluster.lease)
        cores, memory = host.cores or here.cores, host.memory or here.memory
        found[host.name] = replace(host, cores=cores, memory=memory, gpus=here.gpus)
    return replace(cluster, hosts=tuple(found.get(h.name, h) for h in cluster.hosts))


def of_this_clock(spans: Iterable[SpanOf], ahead: float) -> list[SpanOf]:
    """Spans by this host's clock. ahead: inf while unknown, and then they stay as they are."""
    shift = ahead if math.isfinite(ahead) else 0.0
    return [msgspec.structs.replace(s, start=s.start + shift, end=s.end + shift) for s in spans]


@dataclass(slots=True, kw_only=True)
class _Remote:
    """Another host as the loop sees it. sent: how many messages; update: the latest from it."""

    link: HostLink
    workers: tuple[str, ...]
    sent: int = 0
    update: hm.HostUpdate = field(default_factory=hm.HostUpdate)
    opened: bool = False
    replies: dict[int, hm.HostReply] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    def doing(self) -> list[Doing]:
        """What its Workers are doing. Those not heard from yet are starting."""
        start = Doing(worker="", node="its start", what="its host", since=self.since)
        known = {each.worker: each for each in self.link.doing}
        return [known.get(w, replace(start, worker=w)) for w in self.workers]

    def send(self, message: Any) -> None:
        self.sent += 1
        self.link.say(message)

    @property
    def busy(self) -> bool:
        """Whether it has messages to carry out or busy Workers."""
        return self.sent > self.update.carried or self.update.busy


class HostsWorkers:
    """See `engine.run.workers.Workers`."""

    def __init__(self, plan: Plan, folder: RunFolder, options: RunOptions) -> None:
        """plan: with hosts. Raises RunError for a key file that is missing or not safe."""
        assert plan.cluster is not None
        self._plan = plan
        self._folder = folder
        self._options = options
        self._cluster = plan.cluster
        self._keys = read_keys(plan.cluster.keys)
        self._networks = _networks(plan)
        self._changed = threading.Event()
        """Set whenever there may be something new."""
        self._events: deque[Event | From] = deque()
        self._reports: list[Report] = []
        self._spans: list[SpanOf] = []
        self._addresses: dict[str, control.PeerAddress] = {}
        self._requests = self._moved = 0
        self._closed = False
        self._remotes: dict[str, _Remote] = {}
        first = plan.cluster.hosts[0].name
        here = {w: n for w, n in self._networks.items() if plan.hosts[w] == first}
        share = HostShare(workers=here, cluster=plan.cluster.on(first), on_change=self._changed.set)
        self._local = Supervisor(plan, folder, options, share)
        self._host_of = {w: host for w, host in plan.hosts.items() if host != first}

    def open(self) -> Iterator[Event | From]:
        """All hosts at once. Raises as `Supervisor.open`, and RunError if a host is absent."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            plan = shipped(self._plan, "the plan of a run on several hosts")
            for name in dict.fromkeys(self._host_of.values()):
                self._begin(name, plan)
            self._local.begin()
            opened = self._all_opened()
            undo.pop_all()
        yield from opened

    def _all_opened(self) -> list[Event | From]:
        """Addresses are spread meanwhile: ranks on several hosts open together."""
        here: list[Event | From] | None = None

        def all_open() -> bool:
            nonlocal here
            here = self._local.opened() if here is None else here
            return here is not None and all(r.opened for r in self._remotes.values())

        self._until(all_open)
        self._spread_addresses()
        opened = [*(here or ()), *self._events]
        self._events.clear()
        return opened

    def _begin(self, name: str, plan: bytes) -> None:
        host = self._cluster.host(name)
        workers = tuple(w for w, at in self._host_of.items() if at == name)
        server, lease = self._keys.host(name).public, self._cluster.lease
        link = HostLink(host, self._keys.run, server, lease, self._changed.set)
        self._remotes[name] = remote = _Remote(link=link, workers=workers)
        begin = hm.Begin(
            host=name,
            plan=plan,
            folder=self._folder.path.absolute(),
            directory=Path.cwd(),
            planned=self._plan.to_json(),
            path=tuple(import_path()),
            networks=tuple(self._networks[w] for w in workers),
            lease=lease,
            options=run_options.to_json(self._options),
        )
        remote.send(begin)

    def respawn(self, workers: Sequence[str]) -> None:
        """Restart each on its host."""
        for remote in self._remotes.values():
            if there := tuple(w for w in workers if w in remote.workers):
                remote.send(hm.RespawnThere(workers=there))
        if here := [w for w in workers if w not in self._host_of]:
            self._local.respawn(here)

    def close(self) -> None:
        """End the Workers everywhere; a host that does not answer ends its own after the lease."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as after:
            for remote in self._remotes.values():
                after.callback(remote.link.close)
                remote.send(control.Quit())
            self._local.close()
            end = time.monotonic() + min(_GRACE, self._cluster.lease)
            for remote in self._remotes.values():
                self._wait_for_end(remote, end)

    def _wait_for_end(self, remote: _Remote, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
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
        """Send an instruction to its Worker, on any host."""
        if host := self._host_of.get(instruction.worker):
            self._remotes[host].send(hm.Relay(instruction=instruction))
        else:
            self._local.tell(instruction)

    def next(self, timeout: float | None = None) -> Event | From | None:
        """The next event of any host."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._changed.clear()
            found = self._take()
            left = None if end is None else end - time.monotonic()
            if found is not None or not self.busy or (left is not None and left <= 0):
                return found
            self._changed.wait(left)

    @property
    def busy(self) -> bool:
        """Whether something may come from any host."""
        return bool(self._events) or self._local.busy or any(r.busy for r in self._remotes.values())

    def ask(self, requests: Mapping[str, Ask]) -> dict[str, Any]:
        """All of them at once; wait for all replies."""
        self._requests += 1
        number = self._requests
        by_host: dict[str, dict[str, Ask]] = {}
        for worker, request in requests.items():
            by_host.setdefault(self._host_of.get(worker, ""), {})[worker] = request
        here = by_host.pop("", {})
        there = [self._remotes[host] for host in by_host]
        for remote, mine in zip(there, by_host.values(), strict=True):
            asked = tuple(mine.values())
            remote.send(hm.RelayRequest(number=number, workers=tuple(mine), requests=asked))
        numbers = self._local.request(here)
        self._until(
            lambda: self._local.replied(numbers) and all(number in r.replies for r in there)
        )
        found = self._local.replies(numbers)
        for remote in there:
            reply = remote.replies.pop(number)
            if reply.gone:
                raise WorkerGone(reply.gone, reply.problem)
            found |= dict(zip(reply.workers, reply.refs, strict=True))
        return found

    def forget(self) -> None:
        """Let all Workers forget."""
        self._local.forget()
        for remote in self._remotes.values():
            remote.send(control.Forget())

    def reports(self) -> list[Report]:
        """Metrics of all hosts since the last call, and the bytes sent and received here."""
        found = [*self._local.reports(), *self._reports]
        self._reports = []
        moved = sum(r.link.moved for r in self._remotes.values())
        found.append((CONTROL_BYTES, float(moved - self._moved), 1.0))
        self._moved = moved
        return found

    def spans(self) -> list[SpanOf]:
        """Spans since the last call, by this host's clock."""
        found = [*self._local.spans(), *self._spans]
        self._spans = []
        return found

    def doing(self) -> list[Doing]:
        """By each host's last heartbeat; from any thread."""
        return [*self._local.doing(), *(d for r in self._remotes.values() for d in r.doing())]

    def stacks(self) -> list[str]:
        """Those of the Workers on this host."""
        return self._local.stacks()

    def _until(self, holds: Callable[[], bool]) -> None:
        """Take in messages of the other hosts until this holds. Raises what went wrong there."""
        while True:
            self._changed.clear()
            self._hear()
            self._spread_addresses()
            if holds():
                return
            self._changed.wait()

    def _take(self) -> Event | From | None:
        """The next event, if any. A Worker's new address is spread before its event is returned."""
        self._hear()
        found = self._events.popleft() if self._events else self._local.next(0.0)
        self._spread_addresses()
        return found

    def _hear(self) -> None:
        for remote in self._remotes.values():
            for message in remote.link.hear():
                self._heard(remote, message)

    def _heard(self, remote: _Remote, message: Any) -> None:
        match message:
            case hm.HostUpdate():
                remote.opened = message.opened
                remote.update = message
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
        known = [entry for r in self._remotes.values() for entry in r.update.endpoints]
        known += self._local.endpoints()
        if new := tuple(each for each in known if self._addresses.get(each.worker) != each):
            self._addresses |= {entry.worker: entry for entry in new}
            self._local.meet(new)
            for remote in self._remotes.values():
                remote.send(control.PeerAddresses(entries=new))


def _networks(plan: Plan) -> dict[str, control.Network]:
    """Each Worker's part in the network."""
    assert plan.cluster is not None
    return {
        worker: control.Network(
            worker=worker,
            address=plan.cluster.host(plan.hosts[worker]).address,
            near=tuple(w for w in plan.workers if plan.hosts[w] == plan.hosts[worker]),
            private=plan.cluster.private,
            lease=plan.cluster.lease,
        )
        for worker in plan.workers
    }
