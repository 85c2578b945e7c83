"""Weights between the kernels of one Worker and those elsewhere.

    executes   waits for                              unblocked by
    Offer      nothing (ranks: each other)            -
    Load       a block that a Worker keeps, unless    that Worker's channel; by collectives its
               it was fetched beside                  thread for this reader; on one GPU nothing

Owns: offering a version as a block, loading one into a module once for all of its nodes, probing
at both ends, new weights for a running chunk. Does not own: when a version is published
(coordinator), the block's format (engine/weights), fetching and verifying its pieces
(version_pieces.py), on a thread beside the kernels (fetched_versions.py), comparing probes
(engine/run/loop/probes.py), what a version takes until it is loaded (weight_times.py in
engine/keep/metrics).

A Load whose pieces are in another Worker is fetched beside whatever the Worker does. Only then does
it interrupt a kernel that takes new weights, or is carried out before the next chunk; so all that a
kernel waits for is a copy within its process.

Nobody waits for a probe: a writer is probed once its block is offered, a reader after its next
chunk or before anything else is done with its weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from dataflow.errors import RunError
from dataflow.kernel import Piece
from dataflow.kernel_abilities import Interruptible, Probeable
from engine.channels.contract import Channel, PeerLost
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.shared_memories import SharedMemories
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.protocol.reports import Report
from engine.run.worker.counters import FlowCounts
from engine.run.worker.device_seconds import DeviceSeconds
from engine.run.worker.fetched_versions import FetchedVersions, PassOn
from engine.run.worker.timing import Timing
from engine.run.worker.version_pieces import FetchedPieces, VersionPieces
from engine.weights.flat_copy import copy_flat
from engine.weights.hashed_pieces import dtypes_of, to_batch
from engine.weights.probe import probe_rows
from engine.weights.snapshot import copy_pieces


class Delivery:
    """The weights that a Worker's kernels load and offer."""

    def __init__(
        self,
        plan: Plan,
        kernels: Mapping[str, Any],
        channel: Channel,
        timing: Timing,
        pairs: TensorPairs | None = None,
        memories: SharedMemories | None = None,
        counts: FlowCounts | None = None,
    ) -> None:
        self._plan = plan
        self._counts = counts or FlowCounts(timing.worker)
        self._kernels = kernels
        self._channel = channel
        self._timing = timing
        self._pairs = pairs
        self._memories = memories
        self._routes = {model.name: model.route for model in plan.models}
        self._parts = {model.name: model.part for model in plan.models if model.part}
        self._pieces = VersionPieces(timing.worker, channel, self._counts, pairs, memories)
        self._fetches = FetchedVersions(self._fetch_beside, partial(module_of, plan))
        self._on_fetched: Callable[[m.Event], None] = _nobody_hears
        self._sizes: dict[str, int] = {}
        """Bytes that the last version of a Model took of a shared memory."""
        self._reports: list[Report] = []
        self._given: dict[str, int] = {}
        """The version that each module has."""
        self._unprobed: deque[m.Load] = deque()
        """Loaded from other Workers and not probed yet."""
        self._lock = threading.Lock()
        self._open_to = ""
        """The running node, if it takes new weights meanwhile."""
        self._meanwhile: deque[m.Load] = deque()

    def version_of(self, node: PlannedNode) -> int | None:
        """The version of the trained weights that a node computes with; None without any."""
        versions = (self._given.get(use.module) for use in node.states if use.trained)
        return next((version for version in versions if version is not None), None)

    def reports(self) -> list[Report]:
        """Times of versions that were offered or came from elsewhere, since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def offer(self, message: m.Offer, *, first: bool) -> Iterator[m.Event]:
        """Keep the writer's weights as a block; the first rank does, and those that are told to;
        the others take part.
        """
        block, digest, dtypes = -1, "", ()
        model, version, worker = message.model, message.version, self._timing.worker
        name, what = f"offer {model}", f"offer version {version}"
        with self._timing.during(message.writer, name, what, task=message.id, counted=first):
            pieces = self._kernels[message.writer].pieces()
            if first or message.keeps:
                with DeviceSeconds() as copying:
                    block, digest, dtypes = self._keep(model, pieces)
                self._reports.append((f"weights/{model}/copy", copying.seconds, 1.0))
            else:  # its shards go to the first rank as the pieces are gone through
                deque(pieces, maxlen=0)
        yield m.Offered(id=message.id, worker=worker, block=block, digest=digest)
        probed = self._probe(message, dtypes, counted=first)
        if first and probed is not None:
            yield probed

    def _keep(self, model: str, pieces: Iterable[Piece]) -> tuple[int, str, tuple[str, ...]]:
        """Block, digest and dtypes of a version, whose data is in the block, in tensors that are
        kept beside it, or in a memory that readers map.
        """
        route = self._routes.get(model, "pull")
        if route == "ipc" and self._memories is not None:
            copied = copy_flat(pieces, self._memories, self._sizes.get(model, 0))
            self._sizes[model] = copied.size
            batch, digest = copied.batch, copied.digest
            block = self._channel.keep(batch)
            self._memories.keep(block, copied.token)
        elif route == "collective" and self._pairs is not None:
            batch, digest, tensors = copy_pieces(pieces)
            block = self._channel.keep(batch)
            self._pairs.keep(block, tensors)
        else:
            batch, digest = to_batch(pieces, self._channel.allocate)
            block = self._channel.keep(batch)
        return block, digest, tuple(dtypes_of(batch.records))

    def release(self, blocks: Iterable[int]) -> None:
        """Forget the tensors of blocks, and let their memories be filled anew; from any thread."""
        for block in blocks:
            if self._pairs is not None:
                self._pairs.release(block)
            if self._memories is not None:
                self._memories.release(block)

    def fetch_beside(
        self, load: m.Load, pass_on: PassOn, on_fetched: Callable[[m.Event], None]
    ) -> bool:
        """From any thread: fetch a version beside what the Worker does. pass_on: called with the
        Load once it has come, or cannot. on_fetched: called with what the coordinator is to hear
        meanwhile. Returns False where nothing is to be fetched.
        """
        is_elsewhere = load.source not in ("", self._timing.worker) and not load.alias
        if not is_elsewhere or self._routes.get(load.leader or load.model) == "ipc":
            return False
        self._on_fetched = on_fetched
        self._fetches.add(load, pass_on)
        return True

    def forget(self) -> int:
        """Drop the versions that were not passed on; returns how many."""
        return self._fetches.forget()

    def _fetch_beside(self, load: m.Load) -> FetchedPieces:
        """On the thread of the fetches."""
        fetched = self._pieces.fetch_beside(load)
        name, what = f"fetch {load.model}", f"fetch version {load.version}"
        start, end = fetched.start, fetched.end
        self._timing.tell_fetch_beside("fetches weights", name, start, end, what, load.id)
        if fetched.block >= 0:
            self._on_fetched(self._tell_fetched(load, fetched))
        return fetched

    def _tell_fetched(self, load: m.Load, fetched: FetchedPieces) -> m.Fetched:
        return m.Fetched(id=load.id, worker=self._timing.worker, block=fetched.block)

    def bring(self, message: m.Load) -> Iterator[m.Event]:
        """Load a version into a reader, or move a follower; FetchFailed if its Worker is gone. One
        that was superseded while it waited is not loaded.
        """
        yield from self.settle()
        version, worker = message.version, self._timing.worker
        if self._fetches.take_superseded(message):
            yield m.Loaded(id=message.id, worker=worker)
            return
        module = module_of(self._plan, message)
        fetched_beside = self._fetches.take(message)
        try:
            verb = "follow" if message.leader else "load"
            name, what = f"{verb} {message.model}", f"{verb} version {version}"
            with self._timing.during(message.reader, name, what, task=message.id):
                fetched = self._load(message, module, fetched_beside)
        except PeerLost as lost:
            yield m.FetchFailed(id=message.id, worker=worker, peer=lost.peer)
            return
        self._given[module] = version
        if fetched is not None and fetched.block >= 0 and fetched_beside is None:
            yield self._tell_fetched(message, fetched)
        yield m.Loaded(id=message.id, worker=worker)
        if fetched is not None and not message.leader:
            self._unprobed.append(message)

    def drop(self, message: m.Load) -> m.Loaded:
        """Answer a version that is not loaded, as a newer one will be."""
        self._fetches.take(message)
        return m.Loaded(id=message.id, worker=self._timing.worker)

    def settle(self) -> Iterator[m.Event]:
        """Probe the readers whose weights came from other Workers; nobody waits for this."""
        while self._unprobed:
            probed = self._probe(self._unprobed.popleft())
            if probed is not None:
                yield probed

    def _probe(
        self, message: m.Offer | m.Load, dtypes: tuple[str, ...] = (), *, counted: bool = True
    ) -> m.Probed | None:
        """A kernel's numbers on the probe's rows; None if it has no probe. dtypes: a writer's."""
        reads = isinstance(message, m.Load)
        node = message.reader if reads else message.writer
        kernel = self._kernels[node]
        if not isinstance(kernel, Probeable):
            return None
        if reads and self._plan.node(node).ranks > 1:
            # Each rank loads when it can, and a probe of parts is a collective (decision 0048).
            return None
        name, what = f"probe {message.model}", f"probe version {message.version}"
        with self._timing.during(node, name, what, counted=counted):
            rows = probe_rows(self._plan.seed, kernel.vocabulary)
            numbers = np.asarray(kernel.probe(rows), dtype=np.float32)
        return m.Probed(
            node=node,
            model=message.model,
            version=message.version,
            reads=reads,
            numbers=numbers.tobytes(),
            vocabulary=kernel.vocabulary,
            dtypes=dtypes,
        )

    def _load(
        self, message: m.Load, module: str, fetched_beside: Future[FetchedPieces] | None
    ) -> FetchedPieces | None:
        """From the writer's kernel here, or from a Worker's block: then what was fetched of it."""
        reader = self._kernels[message.reader]
        if not brings(message, self._given.get(module)):
            # The module is the writer's own, or has this version: the reader only notes it.
            reader.load((), message.version, rate=message.rate)
            return None
        if not message.source:
            pieces = self._require_part(message, self._kernels[message.writer].pieces())
            reader.load(pieces, message.version, rate=message.rate)
            return None
        if fetched_beside is None:
            fetched = self._pieces.fetch(message)
        else:
            fetched = fetched_beside.result()
        pieces = self._require_part(message, fetched.pieces)
        with DeviceSeconds() as loading:
            reader.load(pieces, message.version, rate=message.rate)
            if self._memories is not None:
                # Once this is told as loaded, the writer may fill its memory anew.
                self._memories.wait_for_device()
        self._reports.append((f"weights/{message.model}/fetch", fetched.seconds, 1.0))
        self._reports.append((f"weights/{message.model}/load", loading.seconds, 1.0))
        return fetched

    def _require_part(self, load: m.Load, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces. Raises RunError if a Model with an adapter, or a subset, comes without any:
        its reader would go on as its base, and the rows would be said to be of this version.
        """
        is_empty = True
        for piece in pieces:
            is_empty = False
            yield piece
        if is_empty and load.model in self._parts:
            part = f"the {self._parts[load.model]} of {load.model!r}"
            problem = f"expected {part} in version {load.version}, found no weight"
            fix = "a train kernel whose `pieces` returns what it trains"
            raise RunError(f"{load.reader}: {problem}. Fix: {fix}.")

    def begins(self, node: PlannedNode) -> None:
        """A chunk of this node begins. It takes weights until `ends`, if kernel and lag allow."""
        kernel = self._kernels[node.name]
        # Several ranks agree on what they take, and when (rank_agreement.py).
        is_alone = node.ranks == 1
        takes = node.lag >= 1 and is_alone and isinstance(kernel, Interruptible)
        takes = takes and kernel.interruptible
        with self._lock:
            self._open_to = node.name if takes else ""

    def takes_weights(self, node: str) -> bool:
        """Whether the running chunk is one of this node, and takes new weights."""
        with self._lock:
            return bool(node) and node == self._open_to

    def interrupt_with(self, message: m.Load) -> bool:
        """From any thread: let the running chunk load this version and go on; False if none can."""
        with self._lock:
            if not self._open_to or message.reader != self._open_to:
                return False
            self._meanwhile.append(message)
            self._kernels[message.reader].interrupt()
            return True

    def meanwhile(self) -> Iterator[m.Event]:
        """Load weights that have come since the chunk's last rows."""
        while self._meanwhile:
            yield from self.bring(self._meanwhile.popleft())

    def ends(self) -> Iterator[m.Event]:
        """The chunk has ended: load weights that have come since its last rows; take no more."""
        with self._lock:
            self._open_to = ""
        return self.meanwhile()


def module_of(plan: Plan, load: m.Load) -> str:
    """The module that a reader loads into."""
    uses = plan.node(load.reader).states
    return next(u.module for u in uses if u.model == load.model and u.param != "tokenizer")


def brings(load: m.Load, known_version: int | None) -> bool:
    """Whether the writer's pieces are read for it. given: the version that the module has."""
    return not load.alias and known_version != load.version


def _nobody_hears(event: m.Event) -> None:
    del event
