"""A process that has imported what commands and Workers need, and forks one for each request.

    waits for                              unblocked by
    a request at its socket                `ForkedPopen` (forked.py), in any process
    the end of a process that it forked    that process
    the end of a request's connection      whoever asked: it has seen the exit code, or is gone

Owns: imports, forks, telling each exit code, and making a fork look like an interpreter that was
just started. Does not own: which commands are forked, asking (forked.py).

Importing torch and transformers takes 6 CPU seconds, a fork 0.03. A forked process that may start
Workers has a fork server of its own, its child: the tree of processes is that of real interpreters
with a server at each branch, and a server dies with the process that it serves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.run.control import lifeline
from tests.kit import forked
from tests.kit.forked import IMPORTED, MOST_DESCRIPTORS, MOST_REQUEST, ForkRequest, listener

_FIRST_FREE = 600
"""Descriptors of a request lie from here on until each has its own number."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A server ignores them: they are meant for the process that it serves."""


@dataclass(slots=True, eq=False)
class _Fork:
    """A forked process. ended: its exit code was told. alone: nobody asks for it any more."""

    pid: int
    asker: socket.socket
    handle: int
    ended: bool = False
    alone: bool = False


class _ForkServer:
    """Serves until the process that it serves has ended."""

    def __init__(self, listening: socket.socket, served: int) -> None:
        self._listening = listening
        self._served = os.pidfd_open(served)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._served, selectors.EVENT_READ)

    def serve(self) -> Callable[[], None]:
        """Returns in forked processes alone: what such a process is to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._served:
                    os._exit(0)
                elif key.data is None:
                    command = self._fork()
                    if command is not None:
                        return command
                elif key.fd == key.data.handle:
                    self._tell_end(key.data)
                else:
                    self._forget_asker(key.data)

    def _fork(self) -> Callable[[], None] | None:
        asker, _ = self._listening.accept()
        payload, descriptors, _, _ = socket.recv_fds(asker, MOST_REQUEST, MOST_DESCRIPTORS)
        if not payload:  # whoever asked has been killed
            asker.close()
            return None
        request = ForkRequest(**json.loads(payload))
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            asker.send(json.dumps(-(error.errno or 1)).encode())
            asker.close()
        else:
            if not pid:
                # What Python would close as it forgets these has other uses there.
                _never_closed.extend((self, asker))
                return lambda: _become(request, descriptors, server)
            fork = _Fork(pid, asker, os.pidfd_open(pid))
            self._selector.register(fork.handle, selectors.EVENT_READ, fork)
            self._selector.register(asker, selectors.EVENT_READ, fork)
            with contextlib.suppress(BrokenPipeError):
                asker.send(json.dumps(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _tell_end(self, fork: _Fork) -> None:
        """The process stays a zombie, with its number, while whoever asked may signal it."""
        self._selector.unregister(fork.handle)
        os.close(fork.handle)
        fork.handle = -1
        fork.ended = True
        result = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if not fork.alone:
                fork.asker.send(json.dumps(code).encode())
        self._reap(fork)

    def _forget_asker(self, fork: _Fork) -> None:
        self._selector.unregister(fork.asker)
        fork.alone = True
        self._reap(fork)
        fork.asker.close()  # whoever asked waits for it

    def _reap(self, fork: _Fork) -> None:
        if fork.ended and fork.alone:
            os.waitpid(fork.pid, 0)


def _become(request: ForkRequest, descriptors: Sequence[int], server: int) -> NoReturn:
    """In a forked process: be the command, to its end."""
    code = 1
    try:
        if request.served:
            _serve(socket.socket(fileno=descriptors[0]), request.served, server)
        lifeline.die_with(server)
        _take_descriptors(descriptors, request.targets)
        if request.session:
            os.setsid()
        _take_environment(request.environment)
        os.chdir(request.folder)
        words = [str(server) if word == request.parent else word for word in request.words]
        if not request.alone:
            _serve_own_forks()  # before this process shows what is no server's
        _show(words, request.environment)
        _take_signals(request)
        code = _ended(lambda: _run(words))
    finally:
        os._exit(code)


def _take_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Give each its number and close all others, which are the server's."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for each in descriptors]
    _close_all_but(moved)
    for descriptor, target in zip(moved, targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


def _close_all_but(left: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in left:
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                os.close(int(name))


def _take_signals(request: ForkRequest) -> None:
    """As an interpreter has them that was just started."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    threads = int(environment.get("OMP_NUM_THREADS") or 1)
    if threads != 1:
        importlib.import_module("torch").set_num_threads(threads)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # a fork would draw what the others draw
        numpy_random.seed()


def _show(words: Sequence[str], environment: dict[str, str]) -> None:
    """Let /proc show words and environment of the command: tests look there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = (fields[45:47], fields[47:49])  # arg_start to env_end: proc_pid_stat(5)
    shown = ([sys.executable, *words], [f"{k}={v}" for k, v in environment.items()])
    for (begin, end), lines in zip(places, shown, strict=True):
        size = int(end) - int(begin)
        block = b"\0".join(os.fsencode(line) for line in lines) + b"\0"
        ctypes.memmove(int(begin), block[: size - 1].ljust(size, b"\0"), size)


def _serve_own_forks() -> None:
    """Fork a server for this process, now that it has one thread."""
    address = forked.new_address()
    listening = listener(address)
    served = os.getpid()
    if not os.fork():
        _serve(listening, served, served)
    listening.close()
    forked.serve_from(address)


def _serve(listening: socket.socket, served: int, parent: int) -> NoReturn:
    """In a forked process: be a server, with nothing open but its socket."""
    try:
        _close_all_but([listening.fileno()])
        for number in (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY):  # become 0, 1 and 2
            os.open(os.devnull, number)
        lifeline.die_with(parent)  # which may be gone by now: this is said to nobody
        _show(["-m", forked.MODULE, str(listening.fileno()), str(served)], {})
        _ForkServer(listening, served).serve()()
    finally:
        os._exit(1)


def _ended(command: Callable[[], Any]) -> int:
    """Run it as an interpreter does, to the exit code."""
    code = 0
    try:
        command()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # the interpreter's own rule: it prints whatever arrives
        _show_error(error)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _show_error(error: BaseException) -> None:
    """As the interpreter does: from the command's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _run(words: Sequence[str]) -> None:
    """What the interpreter does with these words: [-P] -c CODE, -m MODULE or FILE, then others."""
    safe = words[0] == "-P"
    kind, *rest = words[safe:]
    importlib.invalidate_caches()
    gc.enable()
    if kind == "-m":
        sys.argv[:] = rest
        _import_from([] if safe else [os.getcwd()])
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if kind == "-c":
        source, *rest = rest
        sys.argv[:] = ["-c", *rest]
        _import_from([] if safe else [""])
        exec(compile(source, "<string>", "exec"), main.__dict__)
        return
    sys.argv[:] = [kind, *rest]
    main.__dict__["__file__"] = os.path.abspath(kind)
    _import_from([] if safe else [os.path.dirname(os.path.abspath(kind))])
    exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _import_from(first: Sequence[str]) -> None:
    """Set the path as an interpreter does: these, then PYTHONPATH, then what is installed."""
    asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*first, *filter(None, asked), *(f for f in _installed if f not in asked)]


_installed: list[str] = []
"""Where an interpreter looks after PYTHONPATH."""
_never_closed: list[object] = []


def main(descriptor: int, served: int) -> None:
    """Import, then serve the process that has started this one."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    _installed[:] = sys.path[1:]  # `python -m` has put the folder of the repository first
    os.environ.update(json.loads(os.environ.get(forked.UNDER, "{}")))
    also = os.environ.get(forked.ALSO)
    for name in (*([also] if also else ()), *IMPORTED):
        importlib.import_module(name)
    assert "ray" not in sys.modules, "what Ray reads of the environment is not compared"
    forked.install()
    _end_quickly()
    gc.collect()
    gc.freeze()  # so that no collection writes to the pages that are shared
    listening = socket.socket(fileno=descriptor)
    listening.set_inheritable(False)
    try:
        server = _ForkServer(listening, served)
    except ProcessLookupError:  # it ended while this one imported
        return
    server.serve()()


def _end_quickly() -> None:
    """Leave out of each fork's end what torch does in its own: it takes 176 libraries apart, and
    counts what it has compiled.
    """
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        atexit.unregister(dynamo.dump_compile_times)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
