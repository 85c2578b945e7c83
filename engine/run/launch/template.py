"""A template: a process that has imported what Workers need, and from which they are forked.

    thread   waits for                                       unblocked by
    loop     a fork, the first until all is imported (fork)  the template, its end

Owns: one template from start to end, and asking it for a fork. Does not own: its other end
(engine/run/worker_process/template_process.py), which Workers are forked (starter.py).

Importing torch and transformers takes 4.5 s of a core and 270 MiB; a fork takes 0.04 s and
7 MiB, since it shares what the template has. The template has one thread and uses no GPU: neither
other threads nor CUDA survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from dataflow.import_order import interpreter
from engine.run.control.control_socket import ControlSocket
from engine.run.launch.process_handle import ForkedProcess, FreshProcess

FORKED = struct.Struct("<ii")
"""The answer: process id and error number, one of which is 0."""
_MODULE = "engine.run.worker_process.template_process"
_BOOTSTRAP = (
    "import gc; gc.disable();"  # imports make no garbage; a Worker turns it on
    " from engine.run.control.lifeline import die_with; die_with(int(sys.argv[4]));"
    f" from {_MODULE} import main; main(int(sys.argv[3]), sys.argv[5].split())"
)
_IMPORTS = 120.0
"""Seconds for the first answer: it imports before, and many may at once."""
_ANSWER = 30.0
"""Seconds for each later one, which takes 0.04 s: one that does not come has been stopped."""
_LOOK = 200
"""Milliseconds between two looks at whether the run still wants what it waits for."""


class TemplateGone(Exception):
    """The template has ended, or does not answer."""


class Template:
    """One template. It is killed when the calling thread ends, and with it all that it forked."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], output: BinaryIO
    ) -> None:
        """Start it, without waiting. modules: what it imports. output: of what importing prints."""
        mine, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(mine.close)
            arguments = [str(theirs.fileno()), str(os.getpid()), " ".join(modules)]
            command = interpreter(_BOOTSTRAP, _MODULE, *arguments)
            self.process = FreshProcess(command, theirs.fileno(), output, environment)
            undo.pop_all()
        self._link = ControlSocket(mine)
        self._answered = False

    def fork(
        self, name: str, descriptor: int, output: BinaryIO, still: Callable[[], None]
    ) -> ForkedProcess:
        """A Worker of this name. still: called while this waits, to raise what ends the wait.
        Raises TemplateGone, also for a template that does not answer in time, and OSError if there
        is no room for a process.
        """
        status, theirs = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, status)
            descriptors = [os.dup(descriptor), os.dup(output.fileno()), theirs]
            pid, handle = self._answer(name, descriptors, still)
            undo.pop_all()
        return ForkedProcess(pid, handle, status)

    def _answer(
        self, name: str, descriptors: Sequence[int], still: Callable[[], None]
    ) -> tuple[int, int]:
        try:
            self._link.send(name.encode(), descriptors)
        except OSError as error:
            raise TemplateGone from error
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN)
        patience = _ANSWER if self._answered else _IMPORTS
        end = time.monotonic() + patience
        while not waiting.poll(_LOOK):
            still()
            if time.monotonic() > end:
                raise TemplateGone
        self._answered = True
        frames = self._link.receive()
        if not frames:
            raise TemplateGone
        pid, number = FORKED.unpack(frames[0].payload)
        if number:
            raise OSError(number, os.strerror(number))
        return pid, frames[0].descriptors[0]

    def close(self) -> None:
        """End it. What it forked must have ended before."""
        self._link.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
