"""Simulated outboxes: which rows are where, without any bytes.

Owns: checking that the coordinator names only blocks that are there and rows with the right keys,
and releases each block once. Does not own: when any of this happens (workers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.refs import Gather, Ref
from engine.plan.plan import PlannedInput


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedBlock:
    """Rows that a Worker keeps."""

    node: str
    keys: Keys
    version: np.ndarray


class SimulatedOutboxes:
    """The blocks of all workers, by (worker, number)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], SimulatedBlock] = {}
        self._lost: dict[tuple[str, int], SimulatedBlock] = {}
        """Blocks of dead Workers: a reader that had fetched one still sees it."""
        self._made = 0

    def keep(self, worker: str, node: str, keys: Keys, version: np.ndarray) -> Ref:
        """Keep rows; version int32 [rows]."""
        self._made += 1
        self.blocks[worker, self._made] = SimulatedBlock(node, keys, version)
        lengths = 1 + (keys.position * 31 + keys.sample) % 17  # any, but those of the row
        return Ref(
            worker=worker,
            block=self._made,
            keys=keys,
            lengths=lengths,
            version=version,
            digest=_digests(keys, version),
        )

    def lose(self, worker: str) -> None:
        """A worker has died, with everything that it kept."""
        for at in [at for at in self.blocks if at[0] == worker]:
            self._lost[at] = self.blocks.pop(at)

    def absent(self, gathers: Iterable[Gather]) -> str:
        """The dead Worker that had a block of these; empty where all are there."""
        return next((ref[0] for gather in gathers for ref in gather.refs if ref in self._lost), "")

    def offer(self, worker: str, model: str, version: int) -> int:
        """Keep the weights of a version."""
        self._made += 1
        versions = np.array([version], dtype=np.int32)
        self.blocks[worker, self._made] = SimulatedBlock(model, Keys.of([]), versions)
        return self._made

    def check_offer(self, worker: str, number: int, model: str, version: int) -> None:
        """Raises RunError where these weights are gone, or are of another version."""
        found = self.blocks.get((worker, number)) or self._lost.get((worker, number))
        if found is None:
            block = f"block {number} of {worker}"
            raise RunError(
                f"{model} version {version} was to be loaded from {block}, which is gone"
            )
        if (found.node, found.version.tolist()) != (model, [version]):
            raise RunError(
                f"block {number} of {worker} has {found.node} {found.version}, not {model}"
                f" {version}"
            )

    def release(self, worker: str, numbers: Iterable[int]) -> None:
        """Let blocks go. Raises RunError for one that was never made or is released already."""
        for number in numbers:
            if self.blocks.pop((worker, number), None) is None:
                raise RunError(
                    f"block {number} of {worker} was released a second time, or never made"
                )

    def check(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], planned: Iterable[PlannedInput]
    ) -> None:
        """Raises RunError where a gather of these rows names other rows or a released block."""
        for i in planned:
            gathers = inputs[i.name]
            if len(gathers) != len(i.fetches):
                wanted = len(i.fetches)
                raise RunError(f"input {i.name}: expected {wanted} gathers, found {len(gathers)}")
            for fetch, gather in zip(i.fetches, gathers, strict=True):
                if (fetch.producer, fetch.columns) != (gather.producer, gather.columns):
                    wanted, found = fetch.producer, gather.producer
                    raise RunError(
                        f"input {i.name}: expected a gather from {wanted}, found {found}"
                    )
                if i.fan_in:
                    self._check_owners(keys, gather)
                own = keys if gather.keys is None else gather.keys
                self.check_rows(own, gather, fetch.ratio, i.fan_in)

    def _check_owners(self, keys: Keys, gather: Gather) -> None:
        """Raises RunError where rows to be reduced belong to none of these."""
        owners = gather.keys
        if owners is None or not set(owners.rows()) <= set(keys.rows()):
            problem = "is to be reduced, and its rows belong to others"
            raise RunError(f"a gather from {gather.producer} {problem}")

    def check_rows(self, keys: Keys, gather: Gather, ratio: int = 1, fan_in: int = 0) -> None:
        """`check` for one gather. fan_in: so many of its rows are reduced to one of these keys."""
        blocks = [self._block(worker, number, gather) for worker, number in gather.refs]
        for number in range(len(blocks)):
            mine = gather.block == number
            if not mine.any():
                unneeded = gather.refs[number]
                raise RunError(f"a gather from {gather.producer} names block {unneeded} needlessly")
            found, wanted = blocks[number].keys.take(gather.row[mine]), keys.take(mine)
            at = wanted.sample if fan_in else wanted.sample // ratio * ratio
            come_from = found.sample * ratio // (fan_in or 1)
            same = (
                np.array_equal(found.position, wanted.position)
                and np.array_equal(come_from, at)
                and np.array_equal(found.attempt, wanted.attempt)
            )
            if not same:
                raise RunError(
                    f"a gather from {gather.producer}: wanted {wanted.rows()}, found {found.rows()}"
                )

    def versions(self, gather: Gather) -> np.ndarray:
        """int32: the version of each row of a gather."""
        blocks = [self._block(worker, number, gather) for worker, number in gather.refs]
        rows = zip(gather.block.tolist(), gather.row.tolist(), strict=True)
        return np.array([blocks[b].version[r] for b, r in rows], dtype=np.int32)

    def _block(self, worker: str, number: int, gather: Gather) -> SimulatedBlock:
        found = self.blocks.get((worker, number)) or self._lost.get((worker, number))
        named = f"a gather from {gather.producer} names block {number} of {worker}"
        if found is None:
            raise RunError(f"{named}, which is gone")
        if found.node != gather.producer:
            raise RunError(f"{named}, made by {found.node}")
        return found


def _digests(keys: Keys, version: np.ndarray) -> np.ndarray:
    """uint64 [rows]: stands for a row's content, the same for the same draws and weights."""
    made = (keys.position * 1009 + keys.sample) * 1013 + keys.attempt
    return (made * 1019 + version).astype(np.uint64)
