"""The other end of a template: it imports, then forks a Worker for each request.

    waits for                                  unblocked by
    a request (a Worker's name), the end       the Supervisor; EOF ends this process
    the end of a process that it has forked    that process

Owns: imports, forks, telling each exit code. Does not own: what a forked process does
(worker_process.py), who asks (engine/run/launch/template.py).

Stop signals stay blocked here and are not passed on: a forked process inherits no waiting signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine.run.control.control_socket import ControlSocket, Frame
from engine.run.control.lifeline import die_with
from engine.run.launch.process_handle import STATUS
from engine.run.launch.template import FORKED
from engine.run.worker_process import worker_process

_ALL_NEED = (
    "engine.run.worker_process.worker_channel",
    "engine.run.worker_process.worker_ranks",
    "engine.run.worker.newest_rows",
    "engine.run.worker.worker",
)


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Import these modules, then serve the Supervisor at the other end of this socket."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    for name in (*_ALL_NEED, *modules):
        with contextlib.suppress(ImportError):  # the Worker that needs it says what is missing
            importlib.import_module(name)
    gc.freeze()  # so that no collection writes to the pages that are shared
    _Template(ControlSocket(sock)).serve()


@dataclass(frozen=True, slots=True)
class _Forked:
    """A process. handle: its pidfd. status: where its exit code is wanted."""

    pid: int
    handle: int
    status: int


class _Template:
    def __init__(self, link: ControlSocket) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Until the Supervisor closes its end."""
        self._selector.register(self._link, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._tell_end(key.data)
                    continue
                frames = self._link.receive()
                if frames is None:
                    return
                for frame in frames:
                    self._fork(frame)

    def _fork(self, frame: Frame) -> None:
        control, log, status = frame.descriptors
        me = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(status)
            self._link.send(FORKED.pack(0, error.errno or 1))
        else:
            if not pid:
                os.close(status)
                self._become(frame.payload.decode(), me, control, log)
            handle = os.pidfd_open(pid)
            self._selector.register(handle, selectors.EVENT_READ, _Forked(pid, handle, status))
            self._link.send(FORKED.pack(pid, 0), [os.dup(handle)])
        os.close(control)
        os.close(log)

    def _tell_end(self, forked: _Forked) -> None:
        self._selector.unregister(forked.handle)
        os.close(forked.handle)
        _, status = os.waitpid(forked.pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(forked.status, STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(forked.status)

    def _become(self, name: str, template: int, control: int, log: int) -> NoReturn:
        """In the forked process: be a Worker that has of the template only what it imported."""
        try:
            # First: until then this process would outlive a template that dies now.
            die_with(template)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            self._let_go()
            sys.argv[1:] = [worker_process.__name__, sys.argv[2], str(control), str(template), name]
            _set_title(name)
            _seed_anew()
            worker_process.main(control)
        finally:
            traceback.print_exc()
            worker_process.end(1)

    def _let_go(self) -> None:
        """Close what is the template's."""
        others = [k.data for k in self._selector.get_map().values() if k.data is not None]
        self._selector.close()
        self._link.close()
        for forked in others:
            os.close(forked.handle)
            os.close(forked.status)


def _set_title(name: str) -> None:
    """Let lists of processes show what they show of a Worker that was started on its own: the
    module and its name, as the last words.
    """
    words = Path("/proc/self/cmdline").read_bytes()
    last = b"\0".join((b"", worker_process.__name__.encode(), name.encode(), b""))
    line = Path("/proc/self/stat").read_text()
    fields = line.rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: proc_pid_stat(5)
    if len(words) == end - begin > len(last):
        ctypes.memmove(begin, words[: -len(last)] + last, len(words))


def _seed_anew() -> None:
    """Python seeds its own generator after a fork; NumPy's would draw the same in all Workers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
