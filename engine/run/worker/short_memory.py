"""Kernels whose memory runs out: the limits in force, and what is given back.

    with memory.computing(node): ...      RanShort leaves it where memory ran out
    memory.give_back(task, ...)           drops what the kernel holds; the Short that is told

Owns: these two moments in a Worker. Does not own: which limits are next
(engine/coordinator/memory_limits.py), what a kernel does with them (operators/kernels).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dataflow.errors import ShortOfMemory
from dataflow.kernel_abilities import Limited
from dataflow.memory_limits import MemoryLimits
from engine.protocol.memory_messages import Short
from engine.run.worker.counters import cuda_in_use, peak_bytes
from engine.run.worker.kernel_loader import OpenKernels

_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
"""As torch's allocators say it, of the host and of a GPU."""
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def read_asked_bytes(error: str) -> int:
    """The bytes that torch could not have, of the text of its error; 0 where it does not say."""
    asked = _ASKED.search(error)
    if asked is None:
        return 0
    return int(float(asked[1]) * _UNITS[asked[2].lower()])


class RanShort(Exception):
    """A kernel that can go on with less has run out of memory; its text is the error's."""


class ShortMemory:
    """Of the kernels of one Worker."""

    def __init__(self, worker: str, kernels: OpenKernels) -> None:
        self._worker, self._kernels = worker, kernels
        self._in_force: dict[str, MemoryLimits] = {}

    def limit(self, node: str, limits: MemoryLimits | None) -> None:
        """Have a kernel take no more at once than this; None: than the plan says."""
        wanted = limits or MemoryLimits.of(self._kernels.nodes[node].layout)
        kernel = self._kernels[node]
        if wanted != self._limits(node) and isinstance(kernel, Limited):
            kernel.limit(wanted)
            self._in_force[node] = wanted

    def _limits(self, node: str) -> MemoryLimits:
        return self._in_force.get(node) or MemoryLimits.of(self._kernels.nodes[node].layout)

    @contextmanager
    def computing(self, node: str) -> Iterator[None]:
        """A block in which a node's kernel computes. Raises RanShort, if it can be called again."""
        try:
            yield
        except ShortOfMemory as error:
            if not isinstance(self._kernels[node], Limited):
                raise
            text = str(error).partition("\n")[0]
        else:
            return
        # Not from within: the frames of that error hold what was computed.
        raise RanShort(text)

    def give_back(self, node: str, task: int, error: str) -> Short:
        """Drop what a kernel holds of what failed, and give memory back. error: its text."""
        kernel = self._kernels[node]
        assert isinstance(kernel, Limited)
        peak = peak_bytes() + read_asked_bytes(error)
        need = kernel.give_back()
        session = self._kernels.sessions[node]
        # Of what comes again; of what came, all was told.
        session.reports()
        session.tombstones()
        session.take_least_tokens()
        gc.collect()
        cuda = cuda_in_use()
        if cuda is not None:
            cuda.empty_cache()
        return Short(
            id=task,
            node=node,
            worker=self._worker,
            limits=self._limits(node),
            need=need,
            error=error,
            peak=peak,
            is_lost=not need.is_kept,
        )
