"""Compares what both ends of each weight edge computed for the probe's rows.

Owns: which numbers belong together. Does not own: the rows, the tolerances and the comparison
(engine/weights/probe.py), nor when a Worker reports its numbers
(engine/run/worker/weight_delivery.py).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from engine.protocol.events import EventHeard
from engine.protocol.messages import Probed
from engine.weights.probe import Ends, compare_probes, probe_rows, tolerance_of

KEPT = 64
"""Versions of a writer whose numbers are kept: a restarted reader may load an old one again."""


class Probes:
    """The numbers of one attempt at a run."""

    takes = (Probed,)

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._writers: deque[Probed] = deque(maxlen=KEPT)
        self._early: deque[Probed] = deque(maxlen=KEPT)
        """Numbers of readers that reported before their writer."""

    def take(self, event: EventHeard) -> None:
        """See `engine.protocol.events`."""
        assert isinstance(event.event, Probed)
        self.hear(event.event)

    def hear(self, probed: Probed) -> None:
        """Compare with the other end once both have reported. Raises RunError if they differ."""
        if probed.reads:
            writer = next((w for w in self._writers if _same(w, probed)), None)
            if writer is None:
                self._early.append(probed)
            else:
                self._compare(writer, probed)
            return
        self._writers.append(probed)
        for reader in [r for r in self._early if _same(probed, r)]:
            self._early.remove(reader)
            self._compare(probed, reader)

    def _compare(self, writer: Probed, reader: Probed) -> None:
        rows = probe_rows(self._seed, reader.vocabulary)
        model, version = writer.model, writer.version
        ends = Ends(model=model, writer=writer.node, reader=reader.node, version=version)
        compare_probes(_numbers(writer), _numbers(reader), rows, tolerance_of(writer.dtypes), ends)


def _same(one: Probed, other: Probed) -> bool:
    return (one.model, one.version) == (other.model, other.version)


def _numbers(probed: Probed) -> np.ndarray:
    return np.frombuffer(probed.numbers, dtype=np.float32)
