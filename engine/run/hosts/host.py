"""One run's part on one host.

    waits for                                        unblocked by
    a message of the run, a change of its Workers    the run, its Workers; the end of the lease

Owns: carrying out the run's messages with a Supervisor of this host, and reporting. Does not own:
the conversation (desk.py), its process (ray.py), the Workers' processes
(engine/run/launch/supervisor.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from dataflow.errors import DataflowError, RunError
from dataflow.import_order import import_from
from engine.keep.run_folder import RunFolder
from engine.keep.worker_logs import LogFile
from engine.plan import options as run_options
from engine.plan.cluster import detect
from engine.protocol.workers import WorkerGone
from engine.run.control import control
from engine.run.control import host_messages as hm
from engine.run.control.thread_errors import ErrorsTo
from engine.run.hosts.desk import CHANGED, Desk
from engine.run.launch.supervisor import CONTROL_BYTES, GRACE, HostShare, Supervisor

_log = logging.getLogger(__name__)
_SETTLE = 5.0
"""Seconds for the run to hear the last message."""


class HostedRun:
    """One run on this host. address: the IP address by which other hosts reach this one."""

    def __init__(self, desk: Desk, name: str, address: str) -> None:
        self._desk = desk
        self._name = name
        self._address = address
        self._carried = 1
        self._opened = False
        self._asked: dict[int, dict[str, int]] = {}
        """The run's requests that are not answered yet, and the Supervisor's numbers of each."""
        self._last: hm.HostUpdate | None = None
        self._endpoints: tuple[control.PeerAddress, ...] = ()
        self._supervisor: Supervisor | None = None

    def run(self) -> None:
        """Serve the run to its end. An error goes to the run, which then ends. A thread: the kernel
        kills the Workers as it ends. Ends the process if the run has given this host up.
        """
        begin = self._desk.take()
        if isinstance(begin, hm.Begin):
            self._serve(begin)
        self._desk.say(hm.HostEnded())
        self._desk.settle(_SETTLE)
        if self._desk.given_up:
            sys.stderr.flush()
            os._exit(1)  # nobody calls any more

    def _serve(self, begin: hm.Begin) -> None:
        with contextlib.ExitStack() as after:
            after.callback(self._close_supervisor)
            after.enter_context(ErrorsTo(self._tell_failure))
            supervisor = self._supervisor = self._make_supervisor(begin)
            self._desk.doing = supervisor.doing
            self._desk.on_end = lambda: supervisor.abandon(RunError("the run has ended"))
            supervisor.begin()
            while (item := self._desk.take()) is not None:
                self._carry_out(supervisor, item)
                self._answer(supervisor)
                self._report(supervisor)

    def _close_supervisor(self) -> None:
        if self._supervisor is not None:
            # A lease that has ended leaves no time: others may begin in their place.
            grace = 0.0 if self._desk.given_up else GRACE
            self._supervisor.close(grace)

    def _tell_failure(self, error: BaseException) -> None:
        """Let the run raise it, whatever it is: else that would wait for this host for ever."""
        if isinstance(error, WorkerGone):
            self._desk.say(hm.HostReply(number=0, gone=error.worker, problem=str(error)))
        elif isinstance(error, DataflowError):
            self._desk.say(control.Failed.of(error, f"host {self._name}"))
        else:
            _log.error("host %s: %s", self._name, error, exc_info=error)
            problem = "expected that it can carry out its part of the run, found"
            fix = "Fix: what the run imports is to be installed there; its log has the traceback"
            text = f"host {self._name}: {problem} {type(error).__name__}: {error}. {fix}."
            self._desk.say(control.Failed.of(RunError(text), self._name))
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        while self._desk.take() is not None:
            pass

    def _make_supervisor(self, begin: hm.Begin) -> Supervisor:
        folder = self._folder(begin)
        import_from(begin.path)
        plan = cloudpickle.loads(begin.plan)
        options, _ = run_options.decode_options(begin.options, {})
        networks = (replace(network, address=self._address) for network in begin.networks)
        share = HostShare(
            workers={network.worker: network for network in networks},
            absent=begin.absent,
            cluster=detect(),
            on_change=self._desk.note_change,
        )
        return Supervisor(plan, folder, options, share)

    def _folder(self, begin: hm.Begin) -> RunFolder:
        """The run folder as this host sees it; relative paths are those of the run's process."""
        path, directory = begin.folder, begin.directory
        plan = path / "plan.json"
        if not plan.is_file() or plan.read_text(encoding="utf-8") != begin.planned:
            expected = f"expected the run folder {path}, which all hosts have to share"
            other_folder = "another one" if plan.is_file() else "none"
            fix = "Fix: --runs in a file system that every host mounts at the same place."
            raise RunError(f"host {self._name}: {expected}, found {other_folder}. {fix}")
        if directory.is_dir():
            os.chdir(directory)
        else:
            _log.warning("no folder %s here: relative paths will not be found", directory)
        folder = RunFolder.open_remote(path)
        logging.getLogger().addHandler(LogFile(folder.log(f"host-{self._name}")))
        logging.getLogger("engine").setLevel(logging.INFO)
        return folder

    def _carry_out(self, supervisor: Supervisor, item: Any) -> None:
        self._carried += not (item is CHANGED or isinstance(item, hm.StacksWanted))
        match item:
            case hm.Relay(instruction=instruction):
                supervisor.tell(instruction)
            case hm.RelayRequest() as request:
                asked = dict(zip(request.workers, request.requests, strict=True))
                self._asked[request.number] = supervisor.request(asked)
            case hm.RespawnThere(workers=workers):
                supervisor.respawn(workers)
            case hm.RetireThere(workers=workers):
                supervisor.retire(workers)
            case hm.StacksWanted():
                self._desk.stacks = tuple(supervisor.stacks())
            case control.PeerAddresses(entries=entries):
                supervisor.meet(entries)
            case control.Forget():
                supervisor.forget()

    def _answer(self, supervisor: Supervisor) -> None:
        """Reply to requests whose Workers have replied. Nothing here waits for them: a rank may
        need to hear meanwhile that one on another host has ended.
        """
        for number, numbers in list(self._asked.items()):
            if supervisor.has_replied(numbers):
                del self._asked[number]
                self._desk.say(_reply(supervisor, number, numbers))

    def _news(self, supervisor: Supervisor) -> list[Any]:
        """Events since the last call; none before all Workers are open."""
        events: list[Any] = []
        if not self._opened:
            opened = supervisor.wait_until_open()
            if opened is None:
                return events
            self._opened = True
            events += opened
        while (event := supervisor.next(0.0)) is not None:
            events.append(event)
        return events

    def _report(self, supervisor: Supervisor) -> None:
        """Send what is new. `busy` is read first: if false, no event comes after these."""
        busy, events = supervisor.busy, self._news(supervisor)
        reports = tuple(report for report in supervisor.reports() if report[0] != CONTROL_BYTES)
        spans, endpoints = tuple(supervisor.spans()), supervisor.endpoints()
        changed_endpoints = endpoints
        if endpoints == self._endpoints:
            changed_endpoints = ()
        state = hm.HostUpdate(opened=self._opened, carried=self._carried, busy=busy)
        update = replace(
            state, events=tuple(events), reports=reports, spans=spans, endpoints=changed_endpoints
        )
        if update != self._last:
            self._desk.say(update)
        self._last, self._endpoints = state, endpoints


def _reply(supervisor: Supervisor, number: int, numbers: Mapping[str, int]) -> hm.HostReply:
    try:
        refs = supervisor.replies(numbers)
    except WorkerGone as gone:
        return hm.HostReply(number=number, gone=gone.worker, problem=str(gone))
    return hm.HostReply(number=number, workers=tuple(refs), refs=tuple(refs.values()))
