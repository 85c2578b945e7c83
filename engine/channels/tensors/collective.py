"""The scheduled channel: tensors between the ranks of one world, by gloo or NCCL.

Owns: the agreement of both ends before each transfer, time limits, the end of a world that lost a
rank. Does not own: which tensors go where (pairs.py, row_broadcast.py), how ranks meet (world.py).

    state       waits for              left by
    open        -                      send, receive, broadcast; close
    agreeing    the peer's header      equal headers -> moving; others -> fenced, RunError on both
    moving      the payload            arrived -> open; peer gone or late -> fenced, PeerLost
    fenced      -                      nothing: every further call raises what fenced it

Headers go by gloo, payloads by gloo or, between devices, by NCCL. A fenced channel drops its
connections at once, so ranks that wait for this one fail too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.channels.tensors.world import TIMEOUT, wait_for_all

Role = Literal["send", "receive", "broadcast"]
_ROLES: tuple[Role, ...] = ("send", "receive", "broadcast")
_MAGIC = 0x64665F72
_HEADER, _PAYLOAD = 0, 1
"""Tags."""
_GRACE = 5.0
"""Seconds beyond its own time limit in which a backend may answer."""


class CollectiveChannel:
    """One rank's end, callable from any thread; its own thread makes one transfer at a time. names:
    of the ranks, for errors. timeout: seconds for one transfer, and for all ranks to come. device:
    where payloads lie, `cpu` or a CUDA device. Raises RunError if a rank does not come.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        *,
        name: str,
        names: Sequence[str] = (),
        device: str = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._names = tuple(names) or tuple(f"rank {r}" for r in range(world))
        self._next: dict[tuple[str, int], int] = {}
        self._fenced: RunError | None = None
        self._lock = threading.Lock()
        mine = PrefixStore(f"collective/{name}", store)
        wait_for_all(mine, rank, world, timeout)
        self._headers: Any = _gloo(PrefixStore("headers", mine), rank, world, timeout)
        self._payload: Any = self._headers
        self._stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._payload = _nccl(PrefixStore("payload", mine), rank, world, timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"collective-{name}")

    def send(self, peer: int, sequence: int, tensors: Sequence[Tensor]) -> None:
        """See engine/channels/contract.py, Scheduled."""
        self._do("send", peer, sequence, tensors)

    def receive(self, peer: int, sequence: int, tensors: Sequence[Tensor]) -> None:
        """See Scheduled; tensors have to be contiguous."""
        self._do("receive", peer, sequence, tensors)

    def broadcast(self, source: int, sequence: int, tensors: Sequence[Tensor]) -> None:
        """See Scheduled."""
        self._do("broadcast", source, sequence, tensors)

    def close(self) -> None:
        """Leave the world; ranks that wait for this one fail."""
        self._fence(RunError(f"{self._names[self.rank]}: this channel was closed"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, role: Role, peer: int, sequence: int, tensors: Sequence[Tensor]) -> None:
        """Agree, then move, on the channel's thread; a failure ends the world for this rank."""
        self._require_open()
        self._require_peer(role, peer)
        flat = [_bytes(tensor, role) for tensor in tensors]
        header = self._header(role, peer, sequence, tensors)
        stream = self._stream_after_now()

        def transfer() -> RunError | None:
            # A backend's error holds frames, and these hold its connections, which have to close:
            # only its text is kept.
            try:
                self._require_open()
                self._agree(role, peer, header)
                with stream:
                    self._move(role, peer, [part for part in flat if part.numel()])
            except RuntimeError as error:
                return self._make_failure(role, peer, sequence, error)
            return None

        try:
            # The backends apply the time limit twice: to the header and to the payload.
            failed = self._thread.submit(transfer).result(2 * self.timeout + _GRACE)
        except Late as late:
            failed = self._make_failure(role, peer, sequence, late)
        if failed is not None:
            raise self._fence(failed)
        self._next[_counter(role, peer)] = sequence + 1

    def _stream_after_now(self) -> AbstractContextManager[Any]:
        """Between devices, the channel's own stream, behind the caller's work so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _header(self, role: Role, peer: int, sequence: int, tensors: Sequence[Tensor]) -> Tensor:
        """int64 [5]: magic, role, sequence, number of tensors, hash of their dtypes and shapes."""
        if sequence != self._next.get(_counter(role, peer), 0):
            # The other end gets a header that it refuses, so both ends fail and neither hangs.
            sequence = ~sequence
        signature = "|".join(f"{t.dtype}{tuple(t.shape)}" for t in tensors)
        unsigned = xxhash.xxh3_64_intdigest(signature.encode())
        digest = np.uint64(unsigned).astype(np.int64)
        return torch.tensor([_MAGIC, _ROLES.index(role), sequence, len(tensors), int(digest)])

    def _agree(self, role: Role, peer: int, mine: Tensor) -> None:
        """Exchange headers. Raises _Disagreed unless both ends mean the same transfer."""
        if role == "broadcast":
            theirs = [torch.empty_like(mine) for _ in range(self.world)]
            self._headers.allgather([theirs], [mine]).wait()
        else:
            theirs = [torch.empty_like(mine)]
            sent = self._headers.send([mine], peer, _HEADER)
            self._headers.recv(theirs, peer, _HEADER).wait()
            sent.wait()
        for other, header in enumerate(theirs):
            rank = other if role == "broadcast" else peer
            _require_same(self._names[self.rank], mine.tolist(), self._names[rank], header.tolist())

    def _move(self, role: Role, peer: int, flat: list[Tensor]) -> None:
        if role == "broadcast":
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = peer, 0
            under_way = [self._payload.broadcast([part], options) for part in flat]
        else:
            call = self._payload.send if role == "send" else self._payload.recv
            under_way = [call([part], peer, _PAYLOAD) for part in flat]
        for work in under_way:
            work.wait()
        if flat and flat[0].is_cuda:
            # NCCL's `wait` only orders streams, and the tensors may be changed after this call.
            torch.cuda.current_stream(flat[0].device).synchronize()

    def _require_open(self) -> None:
        if self._fenced is not None:
            raise self._fenced

    def _require_peer(self, role: Role, peer: int) -> None:
        if not 0 <= peer < self.world or (role != "broadcast" and peer == self.rank):
            problem = f"expected another of the {self.world} ranks, found {peer}"
            me = self._names[self.rank]
            raise RunError(f"{me}: {role}: {problem}. Fix: a plan for this world.")

    def _make_failure(self, role: Role, peer: int, sequence: int, error: BaseException) -> RunError:
        if isinstance(error, (_Disagreed, RunError)):
            return self._fenced or RunError(str(error))
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = first.split(". This is typically")[0]  # without gloo's own advice
        problem = f"{role} {sequence} with {self._names[self.rank]} did not end: {why}"
        fix = "see what that Worker says; the world has to be formed again"
        return PeerLost(self._names[peer], f"{problem}. Fix: {fix}")

    def _fence(self, cause: RunError) -> RunError:
        """Drop every connection, so that no peer waits for this rank; keeps the first cause."""
        with self._lock:
            if self._fenced is None:
                self._fenced = cause
                if self._payload is not self._headers:
                    self._payload.abort()
                # gloo's abort and shutdown leave its connections open (torch 2.13); deletion closes
                # them.
                self._payload = self._headers = None
            return self._fenced


def _counter(role: Role, peer: int) -> tuple[str, int]:
    """What counts transfers: each direction of a pair, and all broadcasts together."""
    if role == "broadcast":
        return role, -1
    return role, peer


class _Disagreed(RuntimeError):
    """The two ends mean different transfers."""


def _require_same(me: str, mine: list[int], other: str, theirs: list[int]) -> None:
    """Raise _Disagreed unless two headers belong together."""
    wanted = {"send": "receive", "receive": "send", "broadcast": "broadcast"}[_ROLES[mine[1]]]
    if theirs != [_MAGIC, _ROLES.index(wanted), *mine[2:]] or mine[2] < 0:
        both = f"{me}: {_describe_header(mine)}, and {other}: {_describe_header(theirs)}"
        fix = "both ends have to be told the same transfers in the same order"
        raise _Disagreed(f"expected one transfer on both ends, found {both}. Fix: {fix}")


def _describe_header(header: list[int]) -> str:
    magic, role, number, count, layout = header
    if magic != _MAGIC or not 0 <= role < len(_ROLES):
        return "no header of this protocol"
    which = f"{number}" if number >= 0 else f"{~number} (not the next one)"
    return f"{_ROLES[role]} {which} of {count} tensors (layout {layout & 0xFFFFFFFF:08x})"


def _bytes(tensor: Tensor, role: Role) -> Tensor:
    """A tensor's bytes, so that dtypes travel that a backend lacks, such as bfloat16."""
    if role != "send" and not tensor.is_contiguous():
        strides = f"strides {tensor.stride()}"
        raise RunError(f"{role}: expected contiguous tensors to receive into, found {strides}.")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _gloo(store: Store, rank: int, world: int, timeout: float) -> Any:
    """A gloo backend outside torch's registries, listening on the loopback."""
    gloo: Any = ProcessGroupGloo  # its stub lacks these attributes
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout)
    try:
        return gloo(store, rank, world, options)
    except RuntimeError as error:
        problem = f"the ranks could not connect to each other: {error}"
        raise RunError(f"rank {rank} of {world}: {problem}") from error


def _nccl(store: Store, rank: int, world: int, timeout: float) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupNCCL(store, rank, world, options)
