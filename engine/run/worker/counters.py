"""What only a Worker knows of what flows through it: bytes taken on each edge, memory, GPU memory.

Owns: these counts, as reports whose names begin with `flow/`. Does not own: what they are folded
into (engine/keep/flow), metrics (timing.py, the kernels' own).
"""

from __future__ import annotations

import resource
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from engine.protocol.reports import FLOW, Report

_STATUS = Path("/proc/self/statm")
_PAGE = resource.getpagesize()
_GROWTH = 1 << 20
"""Bytes of a peak that are worth a report: less grows with nearly every instruction."""


def cuda_in_use() -> Any:
    """torch.cuda where this process has begun to use it, else None; never imports torch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return cuda


def wait_for_device() -> None:
    """Wait until this process's GPU has done what this thread has launched; no wait without one.

    The current stream alone: what other threads send to peers from streams of their own is not the
    work of the node that computes here, and it must not wait for peers.
    """
    cuda = cuda_in_use()
    if cuda is not None:
        cuda.current_stream().synchronize()


class DeviceMemory:
    """The greatest memory of this process on its GPU: while a node computes, and of all time.

    torch keeps one greatest value, which begins anew with each node.
    """

    def __init__(self) -> None:
        self._most = 0

    def begin(self) -> None:
        """A node begins to compute."""
        cuda = cuda_in_use()
        if cuda is not None:
            self.most()
            cuda.reset_peak_memory_stats()

    def most(self) -> int:
        """Bytes, since the process began to use its GPU; 0 without one."""
        self._most = max(self._most, self.since())
        return self._most

    def since(self) -> int:
        """Bytes, since a node began to compute."""
        cuda = cuda_in_use()
        if cuda is None:
            return 0
        return cuda.max_memory_allocated() + _bytes_outside_torch()


DEVICE_MEMORY = DeviceMemory()
"""Of this process: torch's greatest value is one for all."""


class FlowCounts:
    """Of one Worker. Thread-safe."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._peaks: dict[str, int] = {}
        self._before = 0

    def opening(self) -> None:
        """Its kernels are opened now: what the process has before is not theirs."""
        with self._lock:
            self._before = _resident()

    def count_row_bytes(self, producer: str, consumer: str, nbytes: int) -> None:
        """Count the bytes that a node has taken of a producer's rows."""
        with self._lock:
            self._bytes[f"bytes/{producer}->{consumer}"] += nbytes

    def count_weight_bytes(self, model: str, reader: str, nbytes: int) -> None:
        """Count the bytes of a version that a reader has got from another Worker."""
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
            before, self._before = self._before, 0
        reports = [(FLOW + name, float(size), 1.0) for name, size in counts.items()]
        if before:
            reports.append((f"{FLOW}before/{self._worker}", float(before), 1.0))
        for node, peak in peaks.items():
            reports.append((f"{FLOW}node_peak/{node}@{self._worker}", float(peak), 1.0))
        return reports


class PeakReports:
    """Reports of the memory of one Worker's process, and whether its peak has grown since."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._reported = 0

    def reports(self, outbox: int = 0) -> list[Report]:
        """See `memory_reports`."""
        self._reported = _peak()
        return memory_reports(self._worker, outbox)

    def has_grown(self) -> bool:
        """Whether the peak is higher than what was reported, by more than a reader would miss. A
        run may end before the next heartbeat: the Step that needs most would not count.
        """
        return _peak() - self._reported >= _GROWTH


def peak_bytes() -> int:
    """The most bytes of this process: on its GPU, since a node began to compute, if it uses one;
    else resident ones of all time.
    """
    if cuda_in_use() is not None:
        return DEVICE_MEMORY.since()
    return _peak()


def memory_reports(worker: str, outbox: int = 0) -> list[Report]:
    """Bytes that this process has: now and at most, in its outbox, on its GPU if it uses one."""
    bytes_by_kind = {"memory": _resident(), "peak": _peak(), "outbox": outbox}
    cuda = cuda_in_use()
    if cuda is not None:
        bytes_by_kind |= {
            "device": cuda.memory_allocated() + _bytes_outside_torch(),
            "device_peak": DEVICE_MEMORY.most(),
        }
    return [(f"{FLOW}{kind}/{worker}", float(size), 1.0) for kind, size in bytes_by_kind.items()]


def _bytes_outside_torch() -> int:
    """Bytes on the GPU in memories that other processes map, where this one has made some."""
    cuda_memory = sys.modules.get("engine.channels.tensors.cuda_memory")
    if cuda_memory is None:
        return 0
    return cuda_memory.bytes_outside_torch()


def _resident() -> int:
    return int(_STATUS.read_text().split()[1]) * _PAGE


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
