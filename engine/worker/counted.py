"""What only a Worker knows of what flows through it: bytes taken on each edge, memory, GPU memory.

Owns: these counts, as reports whose names begin with `flow/`. Does not own: what they are folded
into (engine/observe/flow), metrics (timing.py, the kernels' own).
"""

from __future__ import annotations

import resource
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from engine.observe.reports import FLOW, Report

_STATUS = Path("/proc/self/statm")
_PAGE = resource.getpagesize()


class FlowCounts:
    """Of one Worker. Thread-safe."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._peaks: dict[str, int] = {}

    def taken(self, producer: str, consumer: str, nbytes: int) -> None:
        """A node has taken bytes of a producer's rows."""
        with self._lock:
            self._bytes[f"bytes/{producer}->{consumer}"] += nbytes

    def brought(self, model: str, reader: str, nbytes: int) -> None:
        """A reader has got a version's bytes from another Worker."""
        with self._lock:
            self._bytes[f"weights/{model}->{reader}@{self._worker}"] += nbytes

    def peak(self, node: str, nbytes: int) -> None:
        """So many bytes were allocated on the GPU while a node computed."""
        with self._lock:
            self._peaks[node] = max(self._peaks.get(node, 0), nbytes)

    def reports(self) -> list[Report]:
        """The counts since the last call."""
        with self._lock:
            counts, self._bytes = self._bytes, Counter()
            peaks, self._peaks = self._peaks, {}
        found = [(FLOW + name, float(size), 1.0) for name, size in counts.items()]
        worker = self._worker
        return found + [(f"{FLOW}node_peak/{n}@{worker}", float(b), 1.0) for n, b in peaks.items()]


def memory_reports(worker: str, outbox: int = 0) -> list[Report]:
    """Bytes that this process has: now and at most, in its outbox, on its GPU if it uses one."""
    found = {"memory": _resident(), "peak": _peak(), "outbox": outbox}
    cuda = cuda_in_use()
    if cuda is not None:
        found |= {
            "device": cuda.memory_allocated(),
            "device_peak": cuda.max_memory_allocated(),
        }
    return [(f"{FLOW}{kind}/{worker}", float(size), 1.0) for kind, size in found.items()]


def cuda_in_use() -> Any:
    """torch.cuda where this process has begun to use it, else None; never imports torch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _resident() -> int:
    return int(_STATUS.read_text().split()[1]) * _PAGE


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
