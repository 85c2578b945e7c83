"""What a simulated Worker's train nodes have summed of a Step that is trained in parts.

Owns: the order of a node's parts, and the rows of all of them, for who checks. Does not own: how
long a part takes (kernel_times.py), when it begins (simulated_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.protocol import messages as m


@dataclass(slots=True)
class _Sums:
    """Of one train node. lost: the Worker without whose rows the next part cannot be fetched."""

    step: int = 0
    count: int = 0
    lost: str = ""


class SummedParts:
    """Of one Worker."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def place(self, message: m.TrainPart) -> int:
        """Where a part stands: 0 if it is the next one, negative if it is summed, else positive."""
        sums = self._sums.setdefault(message.node, _Sums())
        if sums.step != message.step:
            self._sums[message.node] = sums = _Sums(step=message.step)
        return message.part - sums.count

    def add(self, message: m.TrainPart) -> None:
        """A part is summed. Raises RunError for one whose turn it is not."""
        if self.place(message):
            raise RunError(f"{message.node}: part {message.part} is summed out of its turn")
        sums = self._sums[message.node]
        sums.count += 1
        sums.lost = ""

    def note_lost(self, message: m.TrainPart, peer: str) -> None:
        """A part could not be fetched."""
        self._sums.setdefault(message.node, _Sums()).lost = peer

    def lost_peer(self, node: str) -> str:
        """The Worker that the next part waits for. Raises RunError where none is lost."""
        peer = self._sums[node].lost
        if not peer:
            raise RunError(f"{node}: was told of a part before its turn")
        return peer

    def finish(self, message: m.FinishStep) -> None:
        """The Step's update is made. Raises RunError unless all of its parts are summed."""
        sums = self._sums.pop(message.node, _Sums(step=message.step))
        if (sums.step, sums.count) != (message.step, message.parts):
            problem = f"{sums.count} of {message.parts} parts of step {message.step}"
            raise RunError(f"{message.node}: was told to finish with {problem}")


@dataclass(slots=True, eq=False)
class TrainedParts:
    """Of all Workers: what the parts of a Step that are trained by all ranks had."""

    _of: dict[tuple[str, int], list[tuple[m.TrainPart, dict[str, np.ndarray]]]] = field(
        default_factory=dict
    )

    def add(self, message: m.TrainPart, versions: dict[str, np.ndarray]) -> None:
        """All ranks have the gradients of a part; its rows are those of all."""
        parts = self._of.setdefault((message.node, message.step), [])
        if message.part != len(parts):
            raise RunError(f"{message.node}: part {message.part} came after {len(parts)} others")
        parts.append((message, versions))

    def take(self, message: m.FinishStep) -> tuple[m.TrainStep, dict[str, np.ndarray]]:
        """The Step's rows, as if it had been trained at once."""
        parts = self._of.pop((message.node, message.step), [])
        keys = Keys.concat([part.keys for part, _ in parts])
        by_producer: dict[str, list[np.ndarray]] = {}
        for _, of_part in parts:
            for producer, its_versions in of_part.items():
                by_producer.setdefault(producer, []).append(its_versions)
        versions = {name: np.concatenate(arrays) for name, arrays in by_producer.items()}
        whole = m.TrainStep(
            id=message.id,
            node=message.node,
            worker=message.worker,
            step=message.step,
            keys=keys.take(keys.order()),
            inputs={},
        )
        return whole, versions
