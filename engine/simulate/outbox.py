"""Simulated outboxes: which rows lie where, without any bytes.

Owns: checking that the coordinator speaks only of blocks that are there, of rows with the
right keys, and lets each block go once. Does not own: when any of this happens (workers.py).
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
    """Rows that a worker keeps."""

    node: str
    keys: Keys
    version: np.ndarray


class SimulatedOutboxes:
    """The blocks of all workers, by (worker, number)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], SimulatedBlock] = {}
        self._lost: dict[tuple[str, int], SimulatedBlock] = {}
        """What died with its worker: whoever had fetched it still sees it."""
        self._made = 0

    def keep(self, worker: str, node: str, keys: Keys, version: np.ndarray) -> Ref:
        """Keep rows; version int32 [rows]."""
        self._made += 1
        self.blocks[worker, self._made] = SimulatedBlock(node, keys, version)
        lengths = 1 + (keys.position * 31 + keys.sample) % 17  # any, but those of the row
        digest = _digests(keys, version)
        return Ref(
            worker=worker,
            block=self._made,
            keys=keys,
            lengths=lengths,
            version=version,
            digest=digest,
        )

    def lose(self, worker: str) -> None:
        """A worker has died, with everything that it kept."""
        for at in [at for at in self.blocks if at[0] == worker]:
            self._lost[at] = self.blocks.pop(at)

    def absent(self, gathers: Iterable[Gather]) -> str:
        """The worker that died with a block of these; empty where all are there."""
        return next((ref[0] for gather in gathers for ref in gather.refs if ref in self._lost), "")

    def offer(self, worker: str, model: str, version: int) -> int:
        """Keep the weights of a version."""
        self._made += 1
        self.blocks[worker, self._made] = SimulatedBlock(
            model, Keys.of([]), np.array([version], dtype=np.int32)
        )
        return self._made

    def check_offer(self, worker: str, number: int, model: str, version: int) -> None:
        """Raises RunError where these weights are gone, or others."""
        found = self.blocks.get((worker, number)) or self._lost.get((worker, number))
        if found is None:
            raise RunError(
                f"{model} version {version} was to be loaded from block {number} of {worker}, which"
                " is gone"
            )
        if (found.node, found.version.tolist()) != (model, [version]):
            raise RunError(
                f"block {number} of {worker} has {found.node} {found.version}, not {model}"
                f" {version}"
            )

    def release(self, worker: str, numbers: Iterable[int]) -> None:
        """Let blocks go. Raises RunError for one that is not there: it was never made, or released
        before.
        """
        for number in numbers:
            if self.blocks.pop((worker, number), None) is None:
                raise RunError(
                    f"block {number} of {worker} was released a second time, or never made"
                )

    def check(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], planned: Iterable[PlannedInput]
    ) -> None:
        """Raises RunError where a gather of these rows names a block that is gone, or rows of other
        keys.
        """
        for i in planned:
            gathers = inputs[i.name]
            if len(gathers) != len(i.fetches):
                raise RunError(
                    f"input {i.name}: {len(i.fetches)} gathers were expected, {len(gathers)} found"
                )
            for fetch, gather in zip(i.fetches, gathers, strict=True):
                if (fetch.producer, fetch.columns) != (gather.producer, gather.columns):
                    raise RunError(
                        f"input {i.name}: a gather from {gather.producer}, planned was"
                        f" {fetch.producer}"
                    )
                if i.fan_in:
                    self._check_owners(keys, gather)
                self.check_rows(
                    keys if gather.keys is None else gather.keys, gather, fetch.ratio, i.fan_in
                )

    def _check_owners(self, keys: Keys, gather: Gather) -> None:
        """Raises RunError where rows that are reduced belong to none of these."""
        owners = gather.keys
        if owners is None or not set(owners.rows()) <= set(keys.rows()):
            raise RunError(
                f"a gather from {gather.producer} is to be reduced, and its rows belong to others"
            )

    def check_rows(self, keys: Keys, gather: Gather, ratio: int = 1, fan_in: int = 0) -> None:
        """The same for one gather. fan_in: the keys are those of the rows that so many of these are
        reduced to.
        """
        blocks = [self._block(worker, number, gather) for worker, number in gather.refs]
        for number in range(len(blocks)):
            mine = gather.block == number
            if not mine.any():
                raise RunError(
                    f"a gather from {gather.producer} names block {gather.refs[number]} without"
                    " need"
                )
            found, wanted = blocks[number].keys.take(gather.row[mine]), keys.take(mine)
            at = wanted.sample if fan_in else wanted.sample // ratio * ratio
            same = (
                np.array_equal(found.position, wanted.position)
                and np.array_equal(
                    found.sample * ratio // fan_in if fan_in else found.sample * ratio, at
                )
                and np.array_equal(found.attempt, wanted.attempt)
            )
            if not same:
                raise RunError(
                    f"a gather from {gather.producer}: wanted {wanted.rows()}, found {found.rows()}"
                )

    def versions(self, gather: Gather) -> np.ndarray:
        """int32: the version that each row of a gather is stamped with."""
        blocks = [self._block(worker, number, gather) for worker, number in gather.refs]
        rows = zip(gather.block.tolist(), gather.row.tolist(), strict=True)
        return np.array([blocks[b].version[r] for b, r in rows], dtype=np.int32)

    def _block(self, worker: str, number: int, gather: Gather) -> SimulatedBlock:
        found = self.blocks.get((worker, number)) or self._lost.get((worker, number))
        if found is None:
            raise RunError(
                f"a gather from {gather.producer} names block {number} of {worker}, which is gone"
            )
        if found.node != gather.producer:
            raise RunError(
                f"a gather from {gather.producer} names block {number} of {worker}, made by"
                f" {found.node}"
            )
        return found


def _digests(keys: Keys, version: np.ndarray) -> np.ndarray:
    """uint64 [rows]: what stands for a row's content: made again from the same draws and weights it
    is the same.
    """
    made = (keys.position * 1009 + keys.sample) * 1013 + keys.attempt
    return (made * 1019 + version).astype(np.uint64)
