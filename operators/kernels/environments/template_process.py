"""The pool's end of a template: its keeper, its orders, the processes that it forks.

    waits for                                unblocked by
    what it says, what it prints, its end    the template's process; its keeper

Owns: starting one (again), loading, which processes are its. Does not own: the template's inside
(child/template.py), how everything below the keeper ends (scoring_keeper.py), episodes (pool.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dataflow.import_order import interpreter
from dataflow.signals import hold_back_signals
from operators.kernels.environments.answers import read_fault
from operators.kernels.environments.child.frames import BadFrame
from operators.kernels.environments.connection import Connection
from operators.kernels.environments.deadlines import Deadlines
from operators.kernels.environments.episode_process import EpisodeProcess
from operators.kernels.environments.printed_lines import PrintedLines
from operators.kernels.environments.replies import EnvironmentFault
from operators.kernels.environments.targets import TemplateSetting
from operators.kernels.scoring_keeper import sweep
from operators.kernels.scoring_output import PrintAllowance
from operators.kernels.scoring_parent import describe_end

_FORKING = 16
"""Most processes that are being forked: a full socket would hold up more."""
_KEEPER_SECONDS = 8.0
"""Within this time a keeper has ended everything, and itself."""
_LOAD_SECONDS = 120.0
_MARK = "DATAFLOW_ENVIRONMENT"
_KEEPER = (
    "from operators.kernels.scoring_keeper import main; "
    "main(*map(int, sys.argv[3:6]), *sys.argv[6:])"
)


class TemplateProcess:
    """One template. pid: 0 until it is known. columns: what `reset` takes, once it has loaded.
    fault: why it could not load, or is lost. keeper: the process above it.
    """

    def __init__(
        self,
        name: str,
        setting: TemplateSetting,
        selector: selectors.BaseSelector,
        deadlines: Deadlines,
    ) -> None:
        self._name = name
        self._setting = setting
        self._selector = selector
        self._deadlines = deadlines
        self.allowance = PrintAllowance()
        self.keeper: subprocess.Popen[bytes] | None = None
        self.running = False
        self.pid = 0
        self.columns: tuple[str, ...] = ()
        self.fault: EnvironmentFault | None = None
        self._is_loaded = False
        self._processes: dict[int, EpisodeProcess] = {}
        """Those that were ordered and have not ended, by slot."""
        self._waiting: deque[EpisodeProcess] = deque()
        self._forking = 0

    def start(self) -> None:
        """Start a keeper and its template, which loads the environment. Raises OSError."""
        self.pid = 0
        self.fault = None
        self._is_loaded = False
        self._forking = 0
        self._keeper_line = b""
        with contextlib.ExitStack() as undo:
            control, theirs = socket.socketpair()
            undo.callback(control.close)
            self._life, their_life = socket.socketpair()
            undo.callback(self._life.close)
            with theirs, their_life:
                self._printed = PrintedLines(self._name, self.allowance, self._selector)
                undo.callback(self._printed.close)
                with os.fdopen(self._printed.printing, "wb") as output:
                    descriptors = (theirs.fileno(), their_life.fileno())
                    self.keeper = self._start_keeper(descriptors, output.fileno())
            undo.pop_all()
        self.running = True
        self._life.setblocking(False)
        self._selector.register(self._life, selectors.EVENT_READ, self._hear_keeper)
        self._control = Connection(control, self._selector, self._hear)
        self._deadlines.set(self, _LOAD_SECONDS, self._load_too_long)
        self._printed.begin_call()
        for payload in self._setting.frames:
            self._control.send(0, payload)

    def _start_keeper(self, descriptors: Sequence[int], output: int) -> subprocess.Popen[bytes]:
        self._mark = f"{_MARK}={secrets.token_hex(16)}"
        arguments = [*map(str, descriptors), str(os.getpid()), *self._setting.command(descriptors)]
        with hold_back_signals():
            return subprocess.Popen(
                interpreter(_KEEPER, "operators.kernels.scoring_keeper", *arguments),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._setting.environment() | dict([self._mark.split("=")]),
                start_new_session=True,
            )

    @property
    def is_settled(self) -> bool:
        """Whether it has loaded, or cannot."""
        return self._is_loaded or self.fault is not None

    def fork(self, process: EpisodeProcess) -> None:
        """See ProcessOrders. A template that was lost is started again."""
        if not self.running:
            try:
                self.start()
            except OSError as error:
                process.hear_end(_not_forked(str(error)))
                return
        self._waiting.append(process)
        self._fork_waiting()

    def order(self, what: str, process: EpisodeProcess) -> None:
        """See ProcessOrders."""
        if process in self._waiting:
            self._waiting.remove(process)
        elif process.slot in self._processes and self._setting.is_shared:
            self.lose("lost its process, which did not answer any more")
        elif process.slot in self._processes:
            order = {"order": what, "slot": process.slot}
            self._control.send(0, json.dumps(order).encode())

    @property
    def process_count(self) -> int:
        """Processes that were ordered and have not ended, or are to be."""
        return len(self._processes) + len(self._waiting)

    def pids(self) -> list[int]:
        """The keeper, the template, and what was forked from it, as far as they run."""
        if not self.running or self.keeper is None:
            return []
        forked = [process.pid for process in self._processes.values()]
        pids = dict.fromkeys([self.keeper.pid, self.pid, *forked])
        return [pid for pid in pids if pid]

    def hang_up(self) -> None:
        """Let the keeper begin to end everything."""
        if self.running:
            with contextlib.suppress(OSError):
                self._life.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the template and everything below it; returns once they have ended."""
        if not self.running or self.keeper is None:
            return
        self.running = False
        self._await_keeper()
        if self.keeper.returncode != 0:  # the keeper ended before it could end the others
            sweep(self._mark)
        self._deadlines.clear(self)
        self._control.close()
        self._selector.unregister(self._life)
        self._life.close()
        self._printed.close()

    def _await_keeper(self) -> None:
        assert self.keeper is not None
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_RDWR)
        self.keeper.send_signal(signal.SIGCONT)
        try:
            self.keeper.wait(_KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()

    def lose(self, text: str, *, detail: str = "") -> None:
        """It is of no use any more: it ends, and what it forked. text ends a sentence about the
        environment.
        """
        if self.fault is None:
            last_lines = detail or self._printed.last()
            self.fault = EnvironmentFault(kind="died", text=text, detail=last_lines)
        self._end()

    def _end(self) -> None:
        assert self.fault is not None
        fault = self.fault
        self.kill()
        processes = [*self._processes.values(), *self._waiting]
        self._processes.clear()
        self._waiting.clear()
        for process in processes:
            # A shared one has printed to a pipe of its own.
            detail = "" if self._setting.is_shared else fault.detail
            process.hear_end(fault.text, fault.kind, detail)

    def _load_too_long(self) -> None:
        self.lose(f"was not loaded within {_LOAD_SECONDS:g} s")

    def _fork_waiting(self) -> None:
        while self._is_loaded and self._waiting and self._forking < _FORKING:
            process = self._waiting.popleft()
            try:
                ends = process.open(self._name, self.allowance, self._selector)
            except OSError as error:
                process.hear_end(_not_forked(str(error)))
                continue
            self._forking += 1
            self._processes[process.slot] = process
            order = {"order": "fork", "slot": process.slot}
            self._control.send(0, json.dumps(order).encode(), ends)

    def _hear(self) -> None:
        is_connected = self._control.read()
        self._take_words()
        if self.running and not is_connected:
            # Its keeper tells how it ended; it has closed the socket itself if that does not come.
            self._control.close()
            self._deadlines.set(self, 2.0, self._close_too_early)

    def _close_too_early(self) -> None:
        self.lose("closed the connection to the process that it is forked from")

    def _take_words(self) -> None:
        if not self.pid:
            return
        try:
            while self.running and (frame := self._control.frames.take()) is not None:
                sender, _, payload = frame
                if sender != self.pid:
                    raise BadFrame(f"process {sender} spoke for it")
                self._hear_words(msgspec.json.decode(payload, type=dict[str, Any]))
        except (BadFrame, msgspec.DecodeError, KeyError, TypeError) as error:
            self.lose(f"broke the connection to the process that it is forked from: {error}")

    def _hear_words(self, words: dict[str, Any]) -> None:
        if "loaded" in words:
            self._is_loaded = True
            self._deadlines.clear(self)
            self.columns = tuple(words["columns"])
            self._printed.end_call()
            self._fork_waiting()
        elif "fault" in words:
            self.fault = read_fault(words["fault"])
            self._end()
        elif "forked" in words:
            self._settle_fork(words["forked"], lambda process: process.hear_fork(words["pid"]))
        elif "unforked" in words:
            process = self._processes.pop(words["unforked"])
            self._forking -= 1
            process.hear_end(_not_forked(words["why"]))
        else:
            process = self._processes.pop(words["ended"])
            process.hear_exit(words["code"])

    def _settle_fork(self, slot: int, tell: Callable[[EpisodeProcess], None]) -> None:
        self._forking -= 1
        tell(self._processes[slot])
        self._fork_waiting()

    def _hear_keeper(self, events: int) -> None:
        received = b""
        try:
            received = self._life.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            pass
        *lines, self._keeper_line = (self._keeper_line + received).split(b"\n")
        for line in lines:
            what, _, number = line.partition(b" ")
            if what == b"pid":
                self.pid = int(number)
                self._take_words()
            elif what == b"failed":
                self.lose(_not_forked(os.strerror(int(number))))
            else:
                self._hear_template_end(int(number))
        if not received and self.running:
            self.lose("lost its process, as the one that watches over it was killed")

    def _hear_template_end(self, code: int) -> None:
        if not self.running:
            return
        self._control.read()
        self._take_words()
        if self.running:
            what = "the process that it is forked from"
            if self._setting.is_shared:
                what = "its process"
            self.lose(f"lost {what}, which {describe_end(code)}")


def _not_forked(why: str) -> str:
    return (
        f"could not start a process ({why}). Fix: allow more processes and open files (ulimit -u,"
        " ulimit -n), or fewer episodes at once"
    )
