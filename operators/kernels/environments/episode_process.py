"""The pool's end of a process in which episodes run.

    waits for                     unblocked by
    an answer, what it prints     the process; its end, of which its template tells

Owns: its socket and pipe, its orders to the template, how it ended. Does not own: the template
(template_process.py), calls and their time (pool.py), what is in an answer (answers.py).
"""

from __future__ import annotations

import selectors
import socket
from typing import Protocol

from operators.kernels.environments.child.frames import BadFrame
from operators.kernels.environments.connection import Connection
from operators.kernels.environments.deadlines import Deadlines
from operators.kernels.environments.printed_lines import PrintedLines
from operators.kernels.environments.replies import EnvironmentFault, FaultKind
from operators.kernels.scoring_output import PrintAllowance
from operators.kernels.scoring_parent import describe_end

_GOODBYE_SECONDS = 2.0
"""Time for a process that has hung up to end, and for its template to tell how."""


class ProcessOrders(Protocol):
    """What a process asks of its template."""

    def fork(self, process: EpisodeProcess) -> None:
        """Fork it as soon as possible."""
        ...

    def order(self, what: str, process: EpisodeProcess) -> None:
        """`stack` or `kill`."""
        ...


class ProcessListener(Protocol):
    """Who hears of a process."""

    def hear_fork(self, process: EpisodeProcess) -> None:
        """It runs now."""
        ...

    def hear_answer(self, process: EpisodeProcess, number: int, payload: bytes) -> None:
        """It has answered a call. Raises BadFrame if it was not asked that."""
        ...

    def hear_fault(self, process: EpisodeProcess) -> None:
        """It cannot answer any more: its `fault` says why."""
        ...


class EpisodeProcess:
    """One process. slot: its number. pid: 0 until it runs. fault: why it cannot be asked any more.
    printed: what it prints, once it is being forked. episodes: under way in it.
    """

    def __init__(
        self,
        slot: int,
        template: ProcessOrders,
        listener: ProcessListener,
        deadlines: Deadlines,
    ) -> None:
        self.slot = slot
        self.template = template
        self.pid = 0
        self.fault: EnvironmentFault | None = None
        self.printed: PrintedLines | None = None
        self.episodes: set[int] = set()
        self._listener = listener
        self._deadlines = deadlines
        self._connection: Connection | None = None
        self._queued: list[tuple[int, bytes]] = []
        """Calls from before it was forked."""
        self._is_left = False
        """Whether nobody listens to it any more; it may still be ending."""

    def open(
        self, name: str, allowance: PrintAllowance, selector: selectors.BaseSelector
    ) -> tuple[int, int]:
        """Open its socket and pipe; returns the other ends. Raises OSError if there is no room."""
        ours, theirs = socket.socketpair()
        try:
            self.printed = PrintedLines(name, allowance, selector)
        except OSError:
            ours.close()
            theirs.close()
            raise
        self._connection = Connection(ours, selector, self._hear)
        for number, payload in self._queued:
            self._connection.send(number, payload)
        self._queued.clear()
        return theirs.detach(), self.printed.printing

    def ask(self, number: int, payload: bytes) -> None:
        """Send a call."""
        if self.printed is not None:
            self.printed.begin_call()
        if self._connection is None:
            self._queued.append((number, payload))
        else:
            self._connection.send(number, payload)

    def hear_fork(self, pid: int) -> None:
        """The template has forked it."""
        self.pid = pid
        if not self._is_left:
            self._listener.hear_fork(self)
            self._take_answers()

    def hear_end(self, text: str, kind: FaultKind = "died", detail: str = "") -> None:
        """It has ended, or cannot begin. text ends a sentence about the environment."""
        self._deadlines.clear(self)
        if self._is_left:
            self._close()
            return
        if self._connection is not None:
            self._connection.read()  # it may have answered before its end
            self._take_answers()
        if not self._is_left:
            self._give_up(kind, text, detail)

    def hear_exit(self, code: int) -> None:
        """Its template has collected its exit code."""
        self.hear_end(f"lost its process, which {describe_end(code)}")

    def kill(self) -> None:
        """End it and what it started."""
        self._deadlines.clear(self)
        self.template.order("kill", self)
        self._leave()

    def retire(self, seconds: float, farewell: bytes = b"") -> None:
        """Hang up: behind the call that it may be in it closes its environment and ends, in so many
        seconds. farewell: a last request, to which no answer is taken.
        """
        if self._is_left:
            return
        if self._connection is None:
            self.kill()
            return
        self._is_left = True
        if farewell:
            self._connection.send(0, farewell)
        # What it still answers and prints is read until its end, so that it can.
        self._connection.end()
        self._deadlines.set(self, seconds, self.kill)

    def _leave(self) -> None:
        self._is_left = True
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self.printed is not None:
            self.printed.close()

    def _give_up(self, kind: FaultKind, text: str, detail: str = "") -> None:
        if self._is_left:
            return
        if not detail and self.printed is not None:
            detail = self.printed.last()
        self.fault = EnvironmentFault(kind=kind, text=text, detail=detail)
        self._listener.hear_fault(self)
        self._leave()

    def _hear(self) -> None:
        assert self._connection is not None
        is_connected = self._connection.read()
        if self._is_left:
            self._connection.frames.clear()
            if not is_connected:
                self._connection.close()
            return
        self._take_answers()
        if not is_connected and not self._is_left:
            # Its end comes by its template; an end that does not come is one, too.
            self._connection.close()
            self._deadlines.set(self, _GOODBYE_SECONDS, self._lose)

    def _lose(self) -> None:
        self.template.order("kill", self)
        self._give_up("died", "closed the connection to its process, or left it to another one")

    def _take_answers(self) -> None:
        if self._connection is None or not self.pid:
            return
        try:
            while not self._is_left and (frame := self._connection.frames.take()) is not None:
                sender, number, payload = frame
                if sender != self.pid:
                    raise BadFrame(
                        f"process {sender}, which it had forked, answered, too: a fork has to end"
                        " by os._exit"
                    )
                self._listener.hear_answer(self, number, payload)
        except BadFrame as error:
            self.template.order("kill", self)
            self._give_up("answer", f"broke the connection to its process: {error}")
