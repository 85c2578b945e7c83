"""Weights between the kernels of one Worker and those elsewhere.

    executes   waits for                              unblocked by
    Offer      nothing (ranks: each other)            -
    Load       the block of the writer's Worker       that Worker's channel; by collectives its
                                                      thread for this reader

Owns: offering a version as a block, bringing one into a reader's module (once, however many of its
nodes read that), saying the probe's numbers at both ends, and new weights for a chunk that is
running. Does not own: when a version is published (coordinator), the block's form (engine/weights),
its transport (engine/channels), nor the comparison of what is said (probes.py).

Nobody waits for a probe: the writer says its numbers once its block is offered, a reader after its
next chunk, or before anything else is done with its weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dataflow.kernel import Interruptible, Piece, Probeable
from engine.channels.contract import BlockRequest, Channel, PeerLost
from engine.channels.tensors.pairs import TensorPairs
from engine.coordinator.messages import Event, FetchFailed, Load, Loaded, Offer, Offered, Probed
from engine.plan.plan import ModelUse, Plan, PlannedNode
from engine.weights.pieces import dtypes_of, from_records, to_batch
from engine.weights.probe import probe_rows
from engine.weights.snapshot import room, snapshot, verified
from engine.worker.timing import Timing


class Delivery:
    """The weights that the kernels of a Worker have, and those that they give."""

    def __init__(
        self,
        plan: Plan,
        kernels: Mapping[str, Any],
        channel: Channel,
        timing: Timing,
        pairs: TensorPairs | None = None,
    ) -> None:
        self._plan = plan
        self._kernels = kernels
        self._channel = channel
        self._timing = timing
        self._pairs = pairs
        self._routes = {m.name: m.route for m in plan.models}
        self._nodes = {n.name: n for n in plan.nodes}
        self._given: dict[str, int] = {}
        """The version that each module was given last."""
        self._unprobed: deque[Load] = deque()
        """What was brought from elsewhere and not probed yet."""
        self._lock = threading.Lock()
        self._open_to: str = ""
        """The node that is running and takes new weights meanwhile."""
        self._meanwhile: deque[Load] = deque()

    # --- one version ------------------------------------------------------------------------------

    def offer(self, message: Offer, *, first: bool) -> Iterator[Event]:
        """Keep the writer's weights as a block; of several ranks the first does, the others only
        take part.
        """
        block, digest, dtypes = -1, "", ()
        with self._timing.during(message.writer, f"offer version {message.version}", counted=first):
            pieces = self._kernels[message.writer].pieces()
            if not first:
                deque(pieces, maxlen=0)
            else:
                block, digest, dtypes = self._kept(message.model, pieces)
        worker = self._timing.worker
        yield Offered(
            id=message.id,
            model=message.model,
            version=message.version,
            worker=worker,
            block=block,
            digest=digest,
        )
        said = self._probed(message.writer, message.model, message.version, dtypes, counted=first)
        if first and said is not None:
            yield said

    def _kept(self, model: str, pieces: Iterable[Piece]) -> tuple[int, str, tuple[str, ...]]:
        """Block, digest and dtypes of a version: with its data, or where it is sent with tensors
        beside it.
        """
        if self._pairs is None or self._routes[model] == "pull":
            batch, digest = to_batch(pieces, self._channel.allocate)
            return self._channel.keep(batch), digest, tuple(dtypes_of(batch.records))
        batch, digest, tensors = snapshot(pieces)
        block = self._channel.keep(batch)
        self._pairs.keep(block, tensors)
        return block, digest, tuple(dtypes_of(batch.records))

    def release(self, block: int) -> None:
        """Forget the tensors of a block; from any thread."""
        if self._pairs is not None:
            self._pairs.release(block)

    def bring(self, message: Load) -> Iterator[Event]:
        """Load a version into a reader, or move a follower; Unfetched where the Worker that offered
        it is gone.

        What came from elsewhere is to be probed: see `settle`.
        """
        yield from self.settle()
        worker = self._timing.worker
        what = f"{'follow' if message.leader else 'load'} version {message.version}"
        module = self._use(message).module
        try:
            with self._timing.during(message.reader, what):
                fetched = self._load(message, module)
        except PeerLost as lost:
            yield FetchFailed(id=message.id, worker=worker, peer=lost.peer)
            return
        self._given[module] = message.version
        yield Loaded(
            id=message.id,
            node=message.reader,
            model=message.model,
            version=message.version,
            worker=worker,
        )
        if fetched and not message.leader:
            self._unprobed.append(message)

    def settle(self) -> Iterator[Event]:
        """Say what the readers whose weights came from elsewhere say of the probe's rows, once for
        each version.
        """
        while self._unprobed:
            message = self._unprobed.popleft()
            said = self._probed(message.reader, message.model, message.version)
            if said is not None:
                yield said

    def _probed(
        self,
        node: str,
        model: str,
        version: int,
        dtypes: tuple[str, ...] | None = None,
        *,
        counted: bool = True,
    ) -> Probed | None:
        """What a node's kernel says with its weights; None where it cannot be probed. dtypes: of a
        writer's weights.
        """
        kernel = self._kernels[node]
        if not isinstance(kernel, Probeable):
            return None
        with self._timing.during(node, f"probe version {version}", counted=counted):
            numbers = np.asarray(
                kernel.probe(probe_rows(self._plan.seed, kernel.vocabulary)), dtype=np.float32
            )
        return Probed(
            node=node,
            model=model,
            version=version,
            reads=dtypes is None,
            numbers=numbers.tobytes(),
            vocabulary=kernel.vocabulary,
            dtypes=dtypes or (),
        )

    def _use(self, message: Load) -> ModelUse:
        uses = self._nodes[message.reader].models
        return next(u for u in uses if u.model == message.model and u.param != "tokenizer")

    def _has(self, message: Load, module: str) -> bool:
        """Whether the reader's module has the version already: the writer's own, or another node's
        that was first.
        """
        return message.alias or self._given.get(module) == message.version

    def _load(self, message: Load, module: str) -> bool:
        """From the writer's kernel here, or from the block that its Worker keeps, each piece
        verified: then True.
        """
        kernel = self._kernels[message.reader]
        if self._has(message, module):
            kernel.load((), message.version, rate=message.rate)
        elif not message.source:
            kernel.load(self._kernels[message.writer].pieces(), message.version, rate=message.rate)
        else:
            kernel.load(self._fetched(message), message.version, rate=message.rate)
            return True
        return False

    def _fetched(self, message: Load) -> Iterable[Piece]:
        """The pieces of a block, all of them verified. Raises PeerLost."""
        block = BlockRequest(worker=message.source, block=message.block)
        records = self._channel.fetch([block])[0]
        if "data" in records.schema.names:
            return from_records(records, message.digest)
        assert self._pairs is not None
        if message.source == self._timing.worker:
            return verified(records, self._pairs.kept(message.block), message.digest)
        arrived = self._pairs.receive(message.source, [block], lambda device: room(records, device))
        return verified(records, arrived, message.digest)

    # --- while a chunk runs -----------------------------------------------------------------------

    def takes(self, node: PlannedNode) -> bool:
        """Whether a running chunk of this node goes on under new weights: its kernel lets it, and a
        row may be made by several versions.
        """
        kernel = self._kernels[node.name]
        return node.lag >= 1 and isinstance(kernel, Interruptible) and kernel.interruptible

    def begins(self, node: PlannedNode) -> None:
        """A chunk of this node begins; until `ends` it takes new weights, where it can."""
        with self._lock:
            self._open_to = node.name if self.takes(node) else ""

    def interrupt_with(self, message: Load) -> bool:
        """From any thread: let the running chunk go on under this version; `meanwhile` or `ends`
        gives it back.

        False where no chunk runs that takes it: it has to be executed after the one that does run,
        before any other.
        """
        with self._lock:
            if not self._open_to or message.reader != self._open_to:
                return False
            self._meanwhile.append(message)
            self._kernels[message.reader].interrupt()
            return True

    def meanwhile(self) -> Iterator[Event]:
        """Bring what has come since the chunk's last rows."""
        while self._meanwhile:
            yield from self.bring(self._meanwhile.popleft())

    def ends(self) -> Iterator[Event]:
        """The chunk has ended: bring what has come since its last rows, and take no more."""
        with self._lock:
            self._open_to = ""
        return self.meanwhile()
