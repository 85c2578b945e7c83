"""Rows on data edges, and versions on weight edges, as the coordinator sees them.

Owns: for each edge the rows taken and the rows that wait, how long the oldest has; for each reader
the version that it has, how long loads took; the lags of trained rows. Does not own: bytes, which
Workers count (engine/run/worker/counters.py); what becomes of the figures (fold.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dataflow.loss_terms import ROWS
from engine.plan.plan import Plan
from engine.plan.planned_input import PlannedInput
from engine.protocol import messages as m
from engine.protocol.grouping import values_at
from engine.protocol.refs import Gather, Ref
from engine.protocol.staleness import NO_VERSION

Block = tuple[str, int]
"""(Worker, number)."""


@dataclass(slots=True)
class _KeptBlock:
    """A block that is not released. left: for each consumer, how many of its rows it has not
    taken; an edge that has taken all is not there.
    """

    ref: Ref
    node: str
    since: float
    left: dict[str, int]


@dataclass(slots=True)
class EdgeRows:
    """The rows of one edge. rows: taken in this stretch; the others are of this moment."""

    rows: int = 0
    waiting: int = 0


class EdgeQueues:
    """The data edges of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._readers: dict[str, list[str]] = defaultdict(list)
        self._ratio: dict[tuple[str, str], int] = {}
        self._own: dict[str, set[str]] = {}
        """By train node, the inputs of its own rows, without those of further row sets."""
        self._blocks: dict[Block, _KeptBlock] = {}
        self.edges: dict[str, EdgeRows] = {}
        for node in plan.nodes:
            self._own[node.name] = {port.name for port in node.inputs if port.row_set == ROWS}
            for port in node.inputs:
                self._add_edges(node.name, port)
        for producer, readers in self._readers.items():
            for reader in readers:
                self.edges[f"{producer}->{reader}"] = EdgeRows()

    def _add_edges(self, node: str, port: PlannedInput) -> None:
        """Note who produces what an input of a node takes."""
        for fetch in port.fetches:
            if node not in self._readers[fetch.producer]:
                self._readers[fetch.producer].append(node)
            self._ratio[fetch.producer, node] = max(1, fetch.ratio)

    def add_rows(self, node: str, ref: Ref, now: float) -> None:
        """Add rows that wait for all readers of their node."""
        rows = len(ref.keys)
        left = dict.fromkeys(self._readers.get(node, ()), rows)
        self._blocks[ref.worker, ref.block] = _KeptBlock(ref=ref, node=node, since=now, left=left)
        for reader in left:
            self.edges[f"{node}->{reader}"].waiting += rows

    def take_rows(self, node: str, inputs: Mapping[str, tuple[Gather, ...]]) -> None:
        """Count the rows that a node takes: they wait no more."""
        for gather in chain.from_iterable(inputs.values()):
            edge = self.edges.get(f"{gather.producer}->{node}")
            if edge is None:
                continue
            ratio = self._ratio.get((gather.producer, node), 1)
            edge.rows += len(gather.row)
            counts = np.bincount(gather.block, minlength=len(gather.refs))
            for block, count in zip(gather.refs, counts.tolist(), strict=True):
                self._take(edge, block, node, -(-count // ratio))

    def _take(self, edge: EdgeRows, block: Block, node: str, count: int) -> None:
        kept_block = self._blocks.get(block)
        if kept_block is None or node not in kept_block.left:
            return
        taken = min(count, kept_block.left[node])
        edge.waiting -= taken
        kept_block.left[node] -= taken
        if not kept_block.left[node]:
            del kept_block.left[node]

    def release_blocks(self, blocks: list[Block]) -> None:
        """Forget blocks of which nobody wants what is left."""
        for block in blocks:
            kept_block = self._blocks.pop(block, None)
            if kept_block is not None:
                for reader, rows_left in kept_block.left.items():
                    self.edges[f"{kept_block.node}->{reader}"].waiting -= rows_left

    def forget_worker(self, worker: str) -> None:
        """Forget the blocks of a Worker that is gone."""
        self.release_blocks([block for block in self._blocks if block[0] == worker])

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the oldest waiting row of each edge was made; 0 where none waits."""
        ages = dict.fromkeys(self.edges, 0.0)
        edges_without_age = {name for name, edge in self.edges.items() if edge.waiting}
        for kept_block in self._blocks.values():  # the oldest first
            for reader in kept_block.left if edges_without_age else ():
                name = f"{kept_block.node}->{reader}"
                if name in edges_without_age:
                    ages[name] = now - kept_block.since
                    edges_without_age.discard(name)
        return ages

    def close(self) -> dict[str, EdgeRows]:
        """The figures; begins to count anew."""
        figures = {name: EdgeRows(edge.rows, edge.waiting) for name, edge in self.edges.items()}
        for edge in self.edges.values():
            edge.rows = 0
        return figures

    def measure_training(self, message: m.TrainStep | m.TrainPart) -> tuple[np.ndarray, int]:
        """int64 [rows]: the lag of each row that a train node was given, without those that no
        trained Model has made; and the rows' tokens.
        """
        own_inputs = self._own.get(message.node, set())
        gathers: list[Gather] = []
        for name, of_input in message.inputs.items():
            if name in own_inputs:
                gathers += of_input
        ages, tokens = [], 0
        for gather in gathers:
            versions_and_lengths = self._versions_and_lengths(gather)
            if versions_and_lengths is not None:
                ages.append(versions_and_lengths[0])
                tokens = max(tokens, int(versions_and_lengths[1].sum()))
        same = [each for each in ages if len(each) == len(ages[0])]
        if not same:
            return np.zeros(0, dtype=np.int64), tokens
        oldest = np.min(np.where(np.stack(same) == NO_VERSION, _NEVER, np.stack(same)), axis=0)
        return np.maximum(message.step - 1 - oldest[oldest != _NEVER], 0), tokens

    def _versions_and_lengths(self, gather: Gather) -> tuple[np.ndarray, np.ndarray] | None:
        """int64 [rows] each: the gathered rows' versions and lengths; None for a block unknown."""
        refs = [self._blocks[ref].ref for ref in gather.refs if ref in self._blocks]
        if len(refs) < len(gather.refs):
            return None
        version = values_at([ref.version for ref in refs], gather.block, gather.row)
        return version, values_at([ref.lengths for ref in refs], gather.block, gather.row)


_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class ReaderWeights:
    """A reader in one Worker."""

    loaded: int = 0
    loads: int = 0
    seconds: float = 0.0


class WeightQueues:
    """The weight edges: who has which version."""

    def __init__(self) -> None:
        self.readers: dict[str, ReaderWeights] = {}
        self.offered: dict[str, int] = {}
        """By Model, the newest version that a reader was told of."""
        self._under_way: dict[tuple[int, str], tuple[str, m.Load, float]] = {}

    def begin_load(self, load: m.Load, now: float) -> None:
        """Note that a reader is to load."""
        name = f"{load.model}->{load.reader}@{load.worker}"
        self.offered[load.model] = max(self.offered.get(load.model, 0), load.version)
        self.readers.setdefault(name, ReaderWeights())
        self._under_way[load.id, load.worker] = name, load, now

    def end_load(self, event: m.Loaded, now: float) -> m.Load | None:
        """Note that it has loaded; returns what it was told."""
        name, load, since = self._under_way.pop((event.id, event.worker), ("", None, 0.0))
        if load is None:
            return None
        reader = self.readers[name]
        reader.loaded = load.version
        reader.loads += 1
        reader.seconds += now - since
        return load

    def forget_worker(self, worker: str) -> None:
        """Forget what a Worker that is gone was told."""
        for key in [key for key in self._under_way if key[1] == worker]:
            del self._under_way[key]

    def close(self) -> dict[str, ReaderWeights]:
        """The figures; begins to count anew."""
        figures = dict(self.readers)
        self.readers = {name: ReaderWeights(each.loaded) for name, each in figures.items()}
        return figures
