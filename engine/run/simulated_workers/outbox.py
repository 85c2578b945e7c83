"""Simulated outboxes: which rows are where, without any bytes.

Owns: the checks that the coordinator names only blocks that are there and rows with the right keys,
and releases each block once. Does not own: when any of this happens (workers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.concat_rows import shift_samples
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.plan.row_lengths import RowLengths
from engine.protocol.refs import Gather, Ref


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedBlock:
    """Rows that a Worker keeps."""

    node: str
    keys: Keys
    version: np.ndarray
    lengths: RowLengths | None = None
    """Tokens of each row; None where nobody needs them."""


class SimulatedOutboxes:
    """The blocks of all workers, by (worker, number). growth: as in Outcomes."""

    def __init__(self, growth: int = 0) -> None:
        self._growth = growth
        self.blocks: dict[tuple[str, int], SimulatedBlock] = {}
        self._lost: dict[tuple[str, int], SimulatedBlock] = {}
        """Blocks of dead Workers: a reader that had fetched one still sees it."""
        self._made = 0

    def keep(
        self,
        worker: str,
        node: PlannedNode,
        keys: Keys,
        version: np.ndarray,
        sizes: RowLengths | None = None,
    ) -> Ref:
        """Keep rows; version int32 [rows]."""
        self._made += 1
        self.blocks[worker, self._made] = SimulatedBlock(node.name, keys, version, sizes)
        lengths = count_tokens(node, keys, sizes, self._growth)
        draw = (keys.position * 1009 + keys.sample) * 1013 + keys.attempt
        # It stands for a row's content: the same for the same draws and weights.
        block, digest = self._made, (draw * 1019 + version).astype(np.uint64)
        weight = np.zeros(0, dtype=np.float32)
        if node.weight:
            # Any, but the same for a row of a prompt; some are equal.
            weight = ((keys.position * 13 + keys.sample * 7) % 23 - 3).astype(np.float32)
        return Ref(
            worker=worker,
            block=block,
            keys=keys,
            lengths=lengths,
            version=version,
            digest=digest,
            weight=weight,
        )

    def lose(self, worker: str) -> None:
        """A worker has died, with everything that it kept."""
        for at in [at for at in self.blocks if at[0] == worker]:
            self._lost[at] = self.blocks.pop(at)

    def absent(self, gathers: Iterable[Gather]) -> str:
        """The dead Worker that had a block of these; empty if all are there."""
        for gather in gathers:
            for worker, block in gather.refs:
                if (worker, block) in self._lost:
                    return worker
        return ""

    def is_lost(self, worker: str, number: int) -> bool:
        """Whether a block's Worker has died with it."""
        return (worker, number) in self._lost

    def offer(self, worker: str, model: str, version: int) -> int:
        """Keep the weights of a version."""
        self._made += 1
        versions = np.array([version], dtype=np.int32)
        self.blocks[worker, self._made] = SimulatedBlock(model, Keys.of([]), versions)
        return self._made

    def check_offer(self, worker: str, number: int, model: str, version: int) -> None:
        """Raises RunError if these weights are gone, or are of another version."""
        block = self._find(worker, number, f"the load of {model} version {version}")
        if (block.node, block.version.tolist()) != (model, [version]):
            problem = f"has {block.node} {block.version}, not {model} {version}"
            raise RunError(f"block {number} of {worker} {problem}")

    def release(self, worker: str, numbers: Iterable[int]) -> None:
        """Let blocks go. Raises RunError for one that was never made or is released already."""
        for number in numbers:
            if self.blocks.pop((worker, number), None) is None:
                raise RunError(f"block {number} of {worker} was released twice, or never made")

    def check(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], planned: Iterable[PlannedInput]
    ) -> None:
        """Raises RunError if a gather of these rows names other rows or a released block."""
        for i in planned:
            gathers = inputs[i.name]
            wanted = [(fetch.producer, fetch.columns) for fetch in i.fetches]
            named = [(gather.producer, gather.columns) for gather in gathers]
            if wanted != named:
                raise RunError(f"input {i.name}: expected gathers of {wanted}, found {named}")
            for fetch, gather in zip(i.fetches, gathers, strict=True):
                own_keys = keys if gather.keys is None else gather.keys
                if i.fan_in and (
                    gather.keys is None or not set(own_keys.rows()) <= set(keys.rows())
                ):
                    problem = "is to be reduced, and its rows belong to others"
                    raise RunError(f"a gather from {gather.producer} {problem}")
                self._check_part(i, keys, own_keys, gather)
                at = shift_samples(own_keys, -i.offset)
                self.check_rows(at, gather, fetch.ratio, i.fan_in)

    @staticmethod
    def _check_part(i: PlannedInput, keys: Keys, own_keys: Keys, gather: Gather) -> None:
        """The rows of a concat's input are all those of the chunk that are its."""
        if i.width and own_keys.rows() != keys.take(i.within(keys.sample)).rows():
            raise RunError(f"a gather from {gather.producer} has other rows than its part")

    def check_rows(self, keys: Keys, gather: Gather, ratio: int = 1, fan_in: int = 0) -> None:
        """`check` for one gather. fan_in: so many of its rows are reduced to one of these keys."""
        what = f"a gather from {gather.producer}"
        for number, block in enumerate(self._blocks(gather)):
            mine = gather.block == number
            if not mine.any():
                raise RunError(f"{what} names block {gather.refs[number]} needlessly")
            kept_keys, wanted = block.keys.take(gather.row[mine]), keys.take(mine)
            at = wanted.sample if fan_in else wanted.sample // ratio * ratio
            kept_at = (
                kept_keys.position,
                kept_keys.sample * ratio // (fan_in or 1),
                kept_keys.attempt,
            )
            if not np.array_equal(kept_at, (wanted.position, at, wanted.attempt)):
                raise RunError(f"{what}: wanted {wanted.rows()}, found {kept_keys.rows()}")

    def versions(self, gather: Gather) -> np.ndarray:
        """int32: the version of each row of a gather."""
        blocks = self._blocks(gather)
        rows = zip(gather.block.tolist(), gather.row.tolist(), strict=True)
        return np.array([blocks[b].version[r] for b, r in rows], dtype=np.int32)

    def of(self, gather: Gather) -> list[SimulatedBlock]:
        """The blocks that a gather names, in its order. Raises RunError for one that is gone."""
        return self._blocks(gather)

    def _blocks(self, gather: Gather) -> list[SimulatedBlock]:
        what = f"a gather from {gather.producer}"
        blocks = [self._find(worker, number, what) for worker, number in gather.refs]
        for block, named in zip(blocks, gather.refs, strict=True):
            if block.node != gather.producer:
                raise RunError(f"{what} names block {named}, made by {block.node}")
        return blocks

    def _find(self, worker: str, number: int, what: str) -> SimulatedBlock:
        block = self.blocks.get((worker, number)) or self._lost.get((worker, number))
        if block is None:
            raise RunError(f"{what} names block {number} of {worker}, which is gone")
        return block


def count_tokens(
    node: PlannedNode, keys: Keys, sizes: RowLengths | None, growth: int = 0
) -> np.ndarray:
    """int64 [rows]: tokens of each row, of a generation those of its answer; where nobody says,
    any, but the same for a row.
    """
    if sizes is not None and node.traits.generates:
        return sizes.answers
    if sizes is not None:
        return sizes.prompts + sizes.answers
    return 1 + (keys.position * 31 + keys.sample) % 17 + growth * keys.position
