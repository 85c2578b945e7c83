"""A host that serves runs started elsewhere, one after another.

    waits for                                        unblocked by
    a run's first message                            a run; a signal that asks the server to stop
    a message of the run, a change of its Workers    the run, its Workers; the end of the lease

Owns: carrying out the run's messages with a Supervisor of this host, and reporting. Does not own:
the link (desk.py), the Workers' processes (supervisor.py).

A new process serves each run, so that no import of one run is there in the next.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import cloudpickle

from dataflow.errors import DataflowError, RunError
from dataflow.importing import import_from, interpreter
from dataflow.signals import held_back, left_to_the_run
from engine import options as run_options
from engine.coordinator.messages import StopRequested
from engine.launch import control
from engine.launch import host_messages as hm
from engine.launch.desk import CHANGED, Desk
from engine.launch.keyfile import read_keys
from engine.launch.supervisor import CONTROL_BYTES, HostShare, Supervisor
from engine.observe.logs import to_log
from engine.observe.runfolder import RunFolder
from engine.plan.cluster import Host, detect, read_cluster
from engine.run.signals import StopSignals, code
from engine.run.workers import WorkerGone

_log = logging.getLogger(__name__)
_SETTLE = 5.0
"""Seconds for the run to hear the last message."""


def serve(cluster: Path, name: str, keys: Path | None = None, grace: float = 60.0) -> int:
    """Serve runs until a signal; a run then has `grace` seconds to stop. Returns the exit code."""
    _own_host(cluster, name, keys)
    reads, writes = os.pipe()
    doing = f"host {name} is given back once its run has stopped"
    with (
        open(reads, "rb") as hears,
        open(writes, "wb") as asks,  # closing it asks the serving process to stop
        StopSignals(grace, lambda: "the run goes on by dataflow resume", asks.close, doing) as stop,
    ):
        while not stop.requested:
            failed = _serve_next(cluster, name, keys, hears)
            if failed > 0 and not stop.requested:
                return failed
        return code(stop.number)


def _serve_next(cluster: Path, name: str, keys: Path | None, hears: IO[bytes]) -> int:
    """Serve one run in a new process; returns its exit code. hears: EOF asks it to stop."""
    bootstrap = (
        "from engine.launch.lifeline import die_with; die_with(int(sys.argv[3]));"
        " from engine.launch.host import main; main(sys.argv[4:])"
    )
    given = [str(os.getpid()), str(cluster), name, *([str(keys)] if keys else [])]
    command = interpreter(bootstrap, "engine.launch.host", *given)
    with held_back():
        process = subprocess.Popen(command, stdin=hears)
    ended = process.wait()
    if ended < 0:
        text = f"host {name}: the process that served a run was ended by signal {-ended}"
        print(text, file=sys.stderr)
    return ended


def main(arguments: Sequence[str]) -> None:
    """The process that serves one run. arguments: cluster file, host, key file."""
    left_to_the_run()
    to_log("%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    cluster, name, *keys = arguments
    try:
        serve_one(Path(cluster), name, Path(keys[0]) if keys else None)
    except DataflowError as error:
        print(error, file=sys.stderr)
        sys.exit(3)


def serve_one(cluster: Path, name: str, keys: Path | None) -> None:
    """Serve the next run to its end. Raises RunError where this host cannot serve any."""
    host, file = _own_host(cluster, name, keys)
    pair = read_keys(file)
    with closing(Desk(host, pair.host(name), pair.run.public)) as desk:
        wanted_back = threading.Event()
        stop = (desk, wanted_back)
        threading.Thread(target=_ask_to_stop, args=stop, name="stop", daemon=True).start()
        print(f"host {name}: waiting for a run at {host.address}, port {host.port}", flush=True)
        if (begin := desk.take()) is not None:
            print(f"host {name}: serves {begin.folder}", flush=True)
            HostedRun(desk, name, begin, wanted_back).run()
            refused = f"connections refused: {desk.refused}"
            print(f"host {name}: {begin.folder} has ended; {refused}", flush=True)


def _ask_to_stop(desk: Desk, wanted_back: threading.Event) -> None:
    """Wait until the server wants this host back, then ask the run, if any, to stop."""
    while os.read(0, 1):
        pass
    wanted_back.set()
    desk.wake()


def _own_host(cluster: Path, name: str, keys: Path | None) -> tuple[Host, Path | None]:
    found = read_cluster(cluster)
    return found.host(name), keys or found.keys


class HostedRun:
    """One run on this host. wanted_back: set to ask the run to stop."""

    def __init__(
        self, desk: Desk, name: str, begin: hm.Begin, wanted_back: threading.Event
    ) -> None:
        self._desk = desk
        self._wanted_back = wanted_back
        self._stop_sent = False
        self._name = name
        self._begin = begin
        self._carried = 1
        self._opened = False
        self._asked: dict[int, dict[str, int]] = {}
        """The run's requests that are not answered yet, and the Supervisor's numbers of each."""
        self._last: hm.HostUpdate | None = None
        self._supervisor: Supervisor | None = None

    def run(self) -> None:
        """Serve the run to its end. An error goes to the run, which then ends."""
        try:
            supervisor = self._supervisor = self._make_supervisor()
            self._desk.doing = supervisor.doing
            self._desk.on_end = lambda: supervisor.abandon(RunError("the run has ended"))
            supervisor.begin()
            while (item := self._desk.take()) is not None:
                self._carry_out(supervisor, item)
                self._answer(supervisor)
                self._report(supervisor)
        except WorkerGone as gone:
            self._desk.say(hm.HostReply(number=0, gone=gone.worker, problem=str(gone)))
            self._wait_for_end()
        except DataflowError as error:
            self._desk.say(control.Failed.of(error, f"host {self._name}"))
            self._wait_for_end()
        finally:
            if self._supervisor is not None:
                self._supervisor.close()
        self._desk.say(hm.HostEnded())
        self._desk.settle(_SETTLE)

    def _wait_for_end(self) -> None:
        while self._desk.take() is not None:
            pass

    def _make_supervisor(self) -> Supervisor:
        begin = self._begin
        if begin.host != self._name:
            found = f"found one for {begin.host}. Fix: its address."
            raise RunError(f"expected a run's part for host {self._name}, {found}")
        folder = self._folder()
        import_from(begin.path)
        plan = cloudpickle.loads(begin.plan)
        options, _ = run_options.from_json(begin.options, {})
        workers = {network.worker: network for network in begin.networks}
        share = HostShare(workers=workers, cluster=detect(), on_change=self._desk.changed)
        return Supervisor(plan, folder, options, share)

    def _folder(self) -> RunFolder:
        """The run folder as this host sees it; relative paths are those of the run's process."""
        path, directory = self._begin.folder, self._begin.directory
        plan = path / "plan.json"
        if not plan.is_file() or plan.read_text(encoding="utf-8") != self._begin.planned:
            expected = f"expected the run folder {path}, which all hosts have to share"
            found = "another one" if plan.is_file() else "none"
            fix = "Fix: --runs in a file system that every host mounts at the same place."
            raise RunError(f"host {self._name}: {expected}, found {found}. {fix}")
        if directory.is_dir():
            os.chdir(directory)
        else:
            _log.warning("no folder %s here: relative paths will not be found", directory)
        return RunFolder.seen(path)

    def _carry_out(self, supervisor: Supervisor, item: Any) -> None:
        self._carried += item is not CHANGED
        match item:
            case hm.Relay(instruction=instruction):
                supervisor.tell(instruction)
            case hm.RelayRequest() as request:
                asked = dict(zip(request.workers, request.requests, strict=True))
                self._asked[request.number] = supervisor.request(asked)
            case hm.RespawnThere(workers=workers):
                supervisor.respawn(workers)
            case control.PeerAddresses(entries=entries):
                supervisor.meet(entries)
            case control.Forget():
                supervisor.forget()

    def _answer(self, supervisor: Supervisor) -> None:
        """Reply to requests whose Workers have replied. Nothing here waits for them: a rank may
        need to hear meanwhile that one on another host has ended.
        """
        for number, numbers in list(self._asked.items()):
            if supervisor.replied(numbers):
                del self._asked[number]
                self._desk.say(_reply(supervisor, number, numbers))

    def _news(self, supervisor: Supervisor) -> list[Any]:
        """Events since the last call; none before all Workers are open."""
        events: list[Any] = []
        if not self._opened:
            opened = supervisor.opened()
            if opened is None:
                return events
            self._opened = True
            events += opened
        while (event := supervisor.next(0.0)) is not None:
            events.append(event)
        return events

    def _report(self, supervisor: Supervisor) -> None:
        """Send what is new. `busy` is read first: if false, no event comes after these."""
        busy = supervisor.busy
        events = self._news(supervisor)
        if self._wanted_back.is_set() and not self._stop_sent:
            self._stop_sent = True
            reason = f"host {self._name} was asked to stop"
            events.append(StopRequested(reason=reason, signal=signal.SIGTERM))
        reports = tuple(report for report in supervisor.reports() if report[0] != CONTROL_BYTES)
        spans = tuple(supervisor.spans())
        state = hm.HostUpdate(
            endpoints=supervisor.endpoints(),
            opened=self._opened,
            carried=self._carried,
            busy=busy,
        )
        update = replace(state, events=tuple(events), reports=reports, spans=spans)
        if update != self._last:
            self._desk.say(update)
        self._last = state


def _reply(supervisor: Supervisor, number: int, numbers: Mapping[str, int]) -> hm.HostReply:
    try:
        found = supervisor.replies(numbers)
    except WorkerGone as gone:
        return hm.HostReply(number=number, gone=gone.worker, problem=str(gone))
    return hm.HostReply(number=number, workers=tuple(found), refs=tuple(found.values()))
