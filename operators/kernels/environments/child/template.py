"""The template: loads an environment once, then forks a process for each episode under way.

    waits for                      unblocked by
    requests, the pool's end       the pool's process
    the end of a forked process    the operating system (SIGCHLD)

Owns: loading, forking, ending what it forked. Does not own: episodes (episode.py, shared.py), what
ends this process and everything below it (the keeper above it).

    from the pool   what to load, and a pickled target behind it; then orders: `fork` with two
                    descriptors (the episode's socket, where it prints), `stack`, `kill`
    to the pool     `loaded` or `fault`; then `forked`, `unforked`, `ended`, each with its slot

Starts no thread, so that a fork is safe; what the environment imports should start none either.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from .calls import encode_answer
from .episode import serve_episodes
from .faults import describe_error
from .frames import FrameStream, ParentSocket, pack_frame
from .limits import ProcessLimits
from .shared import serve_shared
from .stop_signals import STOPS, leave_signals_to_the_run
from .target import load_target

_READ = 1 << 16
_DESCRIPTORS = 8
"""Most descriptors of a message: an order to fork has two."""
_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None, use_errno=True)


def main(descriptor: int) -> None:
    """The template, set up by its keeper: load, say so, and follow orders until the pool ends."""
    leave_signals_to_the_run()
    _reopen_streams()
    faulthandler.enable()
    pool = _PoolSocket(descriptor)
    setting = pool.receive_json()
    described = setting["target"]
    pickled = pool.receive() if described["kind"] == "pickle" else b""
    try:
        target = load_target(described, pickled)
        adapter = importlib.import_module(f".adapters.{setting['adapter']}", __package__)
        factory = adapter.load(target, setting["arguments"])
        loaded = encode_answer({"loaded": True, "columns": list(factory.columns)})
    except BaseException as error:  # the user's code may raise anything, exits too
        loaded = json.dumps({"fault": describe_error(error)}).encode()
        factory = None
    pool.send(loaded)
    if factory is not None:
        ForkingTemplate(pool, factory, setting).serve()


def _reopen_streams() -> None:
    """Print line by line, and read nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


class _PoolSocket:
    """The socket to the pool, over which descriptors come, too."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self.socket = socket.socket(fileno=descriptor)
        self.descriptors: list[int] = []
        self._frames = FrameStream()

    def hear(self) -> None:
        """Take what has come; ends this process if the pool is gone."""
        received = b""
        with contextlib.suppress(OSError):
            received, descriptors, _, _ = socket.recv_fds(self.socket, _READ, _DESCRIPTORS)
            self.descriptors += descriptors
        if not received:
            os._exit(0)
        self._frames.add(received)

    def take(self) -> bytes | None:
        """The next frame that has come whole."""
        frame = self._frames.take()
        return None if frame is None else frame[2]

    def receive(self) -> bytes:
        """Wait for the next frame."""
        while True:
            payload = self.take()
            if payload is not None:
                return payload
            self.hear()

    def receive_json(self) -> dict[str, Any]:
        """Wait for the next frame, as JSON."""
        return json.loads(self.receive())

    def send(self, payload: bytes) -> None:
        """Say something; ends this process if the pool is gone."""
        try:
            self.socket.sendall(pack_frame(0, payload))
        except OSError:
            os._exit(0)


class ForkingTemplate:
    """Follows the pool's orders. Slots are the pool's numbers of processes."""

    def __init__(self, pool: _PoolSocket, factory: Any, setting: dict[str, Any]) -> None:
        self._pool = pool
        self._factory = factory
        self._is_shared = setting["isolation"] == "shared"
        self._limits = ProcessLimits(setting["limits"])
        self._stack_signal: int = setting["stack_signal"]
        self._pids: dict[int, int] = {}
        """Of the forked processes, by slot."""

    def serve(self) -> None:
        """Follow orders; returns never."""
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy all pages
        woken = self._hear_ends()
        poll = select.poll()
        poll.register(self._pool.socket, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            self._follow_orders()
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, _READ)
                    self._reap()
                else:
                    self._pool.hear()

    def _hear_ends(self) -> int:
        """A descriptor that can be read when a forked process has ended."""
        woken, wake = os.pipe()
        for descriptor in (woken, wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, _do_nothing)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        return woken

    def _follow_orders(self) -> None:
        while True:
            payload = self._pool.take()
            if payload is None:
                return
            order = json.loads(payload)
            what, slot = order["order"], order["slot"]
            if what == "fork":
                self._fork(slot, self._pool.descriptors.pop(0), self._pool.descriptors.pop(0))
            elif slot in self._pids:
                if what == "stack":
                    os.kill(self._pids[slot], self._stack_signal)
                else:
                    self._kill(slot)

    def _fork(self, slot: int, answers: int, printing: int) -> None:
        """Fork a process with these descriptors; for shared episodes, become it."""
        if self._is_shared:
            self._say(forked=slot, pid=os.getpid())
            _share_process(answers, printing, self._factory, self._limits)
        template = os.getpid()
        # A stop signal must not reach the process before it can do nothing about it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._say(unforked=slot, why=os.strerror(error.errno or 0))
        if pid == 0:
            self._become_episode(answers, printing, template)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        os.close(answers)
        os.close(printing)
        if pid > 0:
            self._pids[slot] = pid
            self._say(forked=slot, pid=pid)

    def _become_episode(self, answers: int, printing: int, template: int) -> None:
        """In the forked process: run episodes, and end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _end_with(template)
            self._pool.socket.close()
            _print_to(printing, self._stack_signal)
            leave_signals_to_the_run()
            self._limits.set_once()
            os.set_inheritable(answers, False)
            serve_episodes(ParentSocket(answers), self._factory, self._limits)
            code = 0
        # Whatever ends a fork, it must not go on in the template's code: it says why, and exits.
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    def _kill(self, slot: int) -> None:
        """End a process and what it started, also in sessions of their own."""
        pid = self._pids[slot]
        os.kill(pid, signal.SIGSTOP)  # it starts nothing more while its descendants are listed
        for descendant in _list_descendants(pid):
            with contextlib.suppress(OSError):
                os.kill(descendant, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect processes that have ended, and end what is left of their groups."""
        for slot, pid in list(self._pids.items()):
            # It stays a zombie until its group is gone: nobody else can get its number.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._pids[slot]
            self._say(ended=slot, code=_exit_code(status))

    def _say(self, **words: Any) -> None:
        self._pool.send(json.dumps(words).encode())


def _share_process(answers: int, printing: int, factory: Any, limits: ProcessLimits) -> None:
    """Run all episodes in this process, to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _print_to(printing, None)
    limits.set_once()
    os.set_inheritable(answers, False)
    serve_shared(answers, factory)


def _print_to(printing: int, stack_signal: int | None) -> None:
    """Print there from now on; with a signal, the main thread's stack, too, when that comes."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.dup2(printing, 1)
    os.dup2(printing, 2)
    os.close(printing)
    complaints = os.dup(2)  # the environment may do anything to stderr itself
    faulthandler.enable(complaints, all_threads=False)
    if stack_signal is not None and hasattr(faulthandler, "register"):
        faulthandler.register(stack_signal, complaints, all_threads=False)


def _list_descendants(ancestor: int) -> list[int]:
    """The processes below this one; none where the system does not list children."""
    descendants: list[int] = []
    todo = [ancestor]
    while todo:
        pid = todo.pop()
        children = _list_children(pid)
        descendants += children
        todo += children
    return descendants


def _list_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as listed:
                children += [int(child) for child in listed.read().split()]
    return children


def _end_with(parent: int) -> None:
    """On Linux: SIGKILL for this process when the template ends, even in an endless call."""
    if sys.platform == "linux":
        _libc.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _exit_code(status: int) -> int:
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: the signal is read from the wake-up descriptor."""
