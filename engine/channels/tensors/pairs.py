"""Tensors straight from one Worker to another of its host: a world of two ranks for each pair.

    thread                  waits for                                unblocked by
    the reader's main, or   the writer's end, then the payload       the thread below; a time limit
    that of its weights
    one for each reader     a request; then the reader's end         the reader; a time limit

Owns: the weights that can be sent, this Worker's worlds, the device of payloads. Does not own: a
transfer (collective.py), the tensors' meaning (engine/weights), device columns (columns.py), which
pairs there are (the Supervisor).

The reader asks for tensors when it is ready (`ask`, over the pair's data socket); the writer's
Worker sends at once from a thread, whatever its kernels do. Rank 0 is the writer. A world is formed
at its first transfer, for two incarnations: after a restart the pair meets again. Both ends give up
a world that is late or has lost an end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from itertools import chain
from typing import TYPE_CHECKING

from dataflow.errors import RunError
from engine.channels.contract import BlockRequest, MovedBytes, PeerLost, Requests
from engine.channels.tensors.column_hashes import of_tensors
from engine.channels.tensors.columns import ColumnStore
from engine.channels.tensors.world import TIMEOUT, agreed_device, rendezvous, wait_for_all

if TYPE_CHECKING:
    from torch import Tensor

    from engine.channels.tensors.collective import CollectiveChannel

_WRITER, _READER = 0, 1
_GRACE = 5.0
"""Seconds beyond a time limit in which whoever applies it may report it."""
_LOOK = 0.5
"""Seconds between checks of the other end while a world is being formed."""
_log = logging.getLogger(__name__)

Ask = Callable[[str, int, Requests], None]
"""(peer, sequence, requests): have that Worker send these next. Raises PeerLost."""


class TensorPairs:
    """The worlds of one Worker. ask: how to ask a writer. timeout: seconds for the other end to
    come, and for each transfer. content: device columns come with hashes; the same at both ends.
    alive: raises PeerLost if a writer is known to be gone.
    """

    def __init__(
        self,
        name: str,
        ask: Ask,
        *,
        timeout: float = TIMEOUT,
        content: bool = False,
        alive: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self._content = content
        self._ask = ask
        self._alive = alive or (lambda peer: None)
        self._timeout = timeout
        self.columns = ColumnStore()
        self._kept: dict[int, Sequence[Tensor]] = {}
        self._worlds: dict[tuple[str, int], PairWorld] = {}
        """By peer and own rank."""
        self._lock = threading.Lock()
        self._moved = MovedBytes()

    def meet(self, peer: str, meeting: int, *, writes: bool) -> None:
        """Replace this pair's world, which then owns the descriptor `meeting`; from any thread."""
        rank = _WRITER if writes else _READER
        world = PairWorld(self.name, peer, rank, meeting, self._timeout)
        with self._lock:
            earlier = self._worlds.get((peer, rank))
            self._worlds[peer, rank] = world
        if earlier is not None:
            earlier.close()

    def close(self) -> None:
        """Leave every world."""
        for world in list(self._worlds.values()):
            self._give_up(world)
        self._kept.clear()
        self.columns.clear()

    def keep(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Keep a block's tensors, which must not change any more."""
        self._kept[block] = tensors

    def block_tensors(self, block: int) -> Sequence[Tensor]:
        """A block's tensors. Raises KeyError."""
        return self._kept[block]

    def release(self, block: int) -> None:
        """Forget a block's tensors, if there are any; a running transfer goes on."""
        self._kept.pop(block, None)

    def begin_send(self, peer: str, sequence: int, requests: Requests) -> None:
        """Have these tensors sent to a peer; called by the server's thread, so it never waits."""
        world = self._worlds.get((peer, _WRITER))
        if world is None:
            _log.warning("%s asks for %s and has no world here", peer, _describe_requests(requests))
        elif not world.begin(lambda: self._send(world, sequence, requests)):
            _log.warning(
                "%s asks for %s in a world that has ended", peer, _describe_requests(requests)
            )

    def _send(self, world: PairWorld, sequence: int, requests: Requests) -> None:
        """On the world's thread. A failure ends only the world, which the reader notices."""
        try:
            channel = world.ensure_channel()
            wanted = chain.from_iterable(map(self._find_tensors, requests))
            tensors = [tensor.to(world.device) for tensor in wanted]
            hashes = self._room_for_hashes(requests, len(tensors), world.device)
            for room in hashes:
                room.copy_(room.new_tensor(of_tensors(tensors)))
            channel.send(_READER, sequence, [*tensors, *hashes])
        except BaseException as error:
            _log.warning(
                "%s was not sent to %s: %r", _describe_requests(requests), world.peer, error
            )
            self._give_up(world)
            if not isinstance(error, KeyError | RuntimeError):
                raise

    def _find_tensors(self, request: BlockRequest) -> Sequence[Tensor]:
        """Values of device columns if columns are named, else weights."""
        if not request.columns:
            return self._kept[request.block]
        return self.columns.pick_rows(request.block, request.columns, request.rows)

    def receive(
        self, peer: str, requests: Requests, room: Callable[[str], list[Tensor]]
    ) -> list[Tensor]:
        """A peer's tensors: each block's weights, or the device columns and rows that a request
        names. room: device -> tensors to receive into. Raises PeerLost, RunError.
        """
        world = self._worlds.get((peer, _READER))
        if world is None:
            problem = "expected its process, found none that runs."
            raise PeerLost(peer, f"{problem} Fix: see its log for why it ended.")
        with world.receiving:
            tensors = self._receive(world, requests, room)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._moved.add("collective", size)
        return tensors

    def _receive(
        self, world: PairWorld, requests: Requests, room: Callable[[str], list[Tensor]]
    ) -> list[Tensor]:
        """One transfer of this world."""
        peer = world.peer
        try:
            # The reader asks once it is ready to receive, so that no writer waits in a collective
            # for a reader that is busy (0013).
            self._ask(peer, world.sequence, requests)
            channel = world.ensure_channel_in_time(lambda: self._alive(peer))
            tensors = room(world.device)
            hashes = self._room_for_hashes(requests, len(tensors), world.device)
            channel.receive(_WRITER, world.sequence, [*tensors, *hashes])
            if any(sent.tolist() != of_tensors(tensors) for sent in hashes):
                problem = f"{_describe_requests(requests)}: their values were changed on their way"
                raise RunError(f"{peer}: refused: {problem}")
        except RunError:
            self._give_up(world)
            raise
        world.sequence += 1
        return tensors

    def _room_for_hashes(self, requests: Requests, count: int, device: str) -> list[Tensor]:
        """The tensor for the hashes of so many tensors; none for weights."""
        import torch

        # Weights need none: their block has a hash of each piece (engine/weights).
        hashed = self._content and all(request.columns for request in requests)
        if not hashed:
            return []
        return [torch.empty(count, dtype=torch.int64, device=device)]

    def take_moved_bytes(self) -> int:
        """Return the payload bytes received since the last call."""
        return sum(self._moved.take_counts().values())

    def _give_up(self, world: PairWorld) -> None:
        with self._lock:
            if self._worlds.get((world.peer, world.rank)) is world:
                del self._worlds[world.peer, world.rank]
        world.close()


class PairWorld:
    """This Worker's end of one world. sequence: of the reader's next transfer."""

    def __init__(self, name: str, peer: str, rank: int, meeting: int, timeout: float) -> None:
        self.peer = peer
        self.rank = rank
        self.sequence = 0
        self.receiving = threading.Lock()
        """Held by the reader's thread during a transfer: weights and columns come on two."""
        self.device = "cpu"
        """Of payloads, once the world is formed."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tensors {rank} {peer}")
        self._names = (name, peer) if rank == _WRITER else (peer, name)
        self._meeting: int | None = meeting
        self._timeout = timeout
        self._channel: CollectiveChannel | None = None
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, what: Callable[[], None]) -> bool:
        """Call `what` on this end's thread; False if it is closed."""
        with self._lock:
            if not self._closed:
                self._thread.submit(what)
            return not self._closed

    def ensure_channel(self) -> CollectiveChannel:
        """Form the world, once, and return its channel. Raises PeerLost."""
        if self._channel is None:
            try:
                channel = self._form()
            except RuntimeError as error:
                problem = f"no world was formed with it for tensors: {error}"
                raise PeerLost(self.peer, problem) from error
            with self._lock:
                self._channel = channel
                closed = self._closed
            if closed:
                channel.close()
        return self._channel

    def ensure_channel_in_time(self, alive: Callable[[], None]) -> CollectiveChannel:
        """Form it on its own thread and in time. alive: raises PeerLost if the peer is gone."""
        with self._lock:
            if self._closed:
                raise PeerLost(self.peer, "its world for tensors was replaced")
            forming = self._thread.submit(self.ensure_channel)
        end = time.monotonic() + self._timeout + _GRACE
        while True:
            seconds_left = max(0.0, end - time.monotonic())
            try:
                return forming.result(min(_LOOK, seconds_left))
            except (Late, CancelledError) as late:
                if time.monotonic() >= end or forming.cancelled():
                    problem = f"no world was formed with it for tensors in {self._timeout:g} s"
                    raise PeerLost(self.peer, problem) from late
            alive()

    def close(self) -> None:
        """Leave; the other end, if it waits, fails."""
        with self._lock:
            self._closed = True
            channel, meeting, self._meeting = self._channel, self._meeting, None
            self._thread.shutdown(wait=False, cancel_futures=True)
        if channel is not None:
            channel.close()
        if meeting is not None:  # no store owns it
            os.close(meeting)

    def _form(self) -> CollectiveChannel:
        from torch._C._distributed_c10d import PrefixStore

        from engine.channels.tensors.collective import CollectiveChannel

        with self._lock:
            if self._closed:
                raise RunError("it was replaced or given up")
            meeting, self._meeting = self._meeting, None
        if meeting is None:
            raise RunError("it was given up before both ends had come")
        rank, names, timeout = self.rank, self._names, self._timeout
        store = rendezvous(meeting, timeout=timeout)
        wait_for_all(store, rank, 2, timeout)
        self.device = device = agreed_device(store, rank, 2)
        channel = CollectiveChannel(
            rank, 2, store, name="tensors", names=names, device=device, timeout=timeout
        )
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            # An end that finishes at once would be gone while the other connects.
            wait_for_all(PrefixStore("formed", store), rank, 2, timeout)
            undo.pop_all()
        return channel


def _describe_requests(requests: Requests) -> str:
    """`block 7, columns hidden of 3 rows`, or the number of blocks."""
    if len(requests) != 1:
        return f"tensors of {len(requests)} blocks"
    request = requests[0]
    shown = f"block {request.block}"
    if request.columns:
        shown = f"{shown}, columns {', '.join(request.columns)}"
        if request.rows is not None:
            shown = f"{shown} of {len(request.rows)} rows"
    return shown
