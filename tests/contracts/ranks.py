"""Processes as ranks: each calls functions by name, and answers.

Owns: starting, asking all at once with a time limit, killing. Does not own: any check.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from engine.channels.tensors.keyed_store import KeyedStore
from engine.channels.tensors.world import meeting_place
from engine.channels.zmq.curve_keys import Address, CurveKeyPair
from engine.channels.zmq.rendezvous import MeetingServer
from engine.channels.zmq.rendezvous_client import MeetingClient
from tests.kit.forked import forking


class ListeningPlace:
    """Where the ends of a pair meet: each process takes a descriptor of its own."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = meeting_place() if descriptor is None else descriptor

    def end(self) -> int:
        """A descriptor for one end, which closes it."""
        return os.dup(self._file)

    def close(self) -> None:
        """The ends keep theirs."""
        os.close(self._file)

    def __reduce__(self) -> Any:
        return _place, (DupFd(self._file),)


def _place(descriptor: Any) -> ListeningPlace:
    return ListeningPlace(descriptor.detach())


LIMIT = 60.0
"""Seconds for any one thing that the ranks are asked to do."""

Task = Callable[..., Any]


class Door:
    """A keyed meeting in this process, at which ranks of any process may ask."""

    def __init__(self) -> None:
        server, self.keys = CurveKeyPair.make(), CurveKeyPair.make()
        allowed = {self.keys.public: "rank"}
        bind = "tcp://127.0.0.1:*"
        self._server = MeetingServer("rank 0", ["rank"], bind=bind, keys=server, allowed=allowed)
        self.address = Address(endpoint=self._server.endpoint, key=server.public)

    @property
    def refused(self) -> int:
        return self._server.refused.total()

    def close(self) -> None:
        self._server.close()


Keyed = tuple[Address, CurveKeyPair]
_keyed: Keyed | None = None
"""Where this process's `client` asks, if not at a port."""


class RankPool:
    """`count` processes. A task is a function f(rank, port, *arguments); an error is an answer.
    keyed: `client` gives them a KeyedStore.
    """

    def __init__(self, count: int, *, keyed: bool = False) -> None:
        context = forking()
        # Rank 0 would keep the store; here the test does, so that any rank may be killed.
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._door = Door() if keyed else None
        where = (self._door.address, self._door.keys) if self._door else None
        self.store: Store = store if where is None else keyed_client(where)
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, store.port, theirs, where), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def tell(self, rank: int, task: Task, *arguments: Any) -> None:
        """Let one begin."""
        self._pipes[rank].send((task, arguments))

    def answers(self, ranks: Sequence[int]) -> list[Any]:
        """What these answer; EOFError for one that is gone. Raises TimeoutError for silence."""
        return [self._answer(rank) for rank in ranks]

    def do(self, ranks: int, task: Task, *arguments: Any) -> list[Any]:
        """Let the first `ranks` do a task together, and wait for all."""
        for rank in range(ranks):
            self.tell(rank, task, *arguments)
        return self.answers(range(ranks))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Kill it, stop it."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        """End all, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(LIMIT)
        if self._door is not None and isinstance(self.store, KeyedStore):
            self.store.close()
            self._door.close()

    def _answer(self, rank: int) -> Any:
        if not wait([self._pipes[rank]], LIMIT):
            raise TimeoutError(f"rank {rank} did not answer")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as gone:
            return EOFError(str(gone))


def _serve(rank: int, port: int, pipe: Connection, keyed: Keyed | None) -> None:
    global _keyed
    _keyed = keyed
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(task(rank, port, *arguments))
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            pipe.send(error)


def client(port: int) -> Store:
    """The ranks' store."""
    if _keyed is not None:
        return keyed_client(_keyed)
    return TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)


def keyed_client(where: Keyed, pause: Callable[[float], None] = time.sleep) -> KeyedStore:
    """A store at a keyed meeting."""
    address, keys = where
    return KeyedStore(MeetingClient("rank 0", lambda: address, pause, keys), timeout=20.0)
