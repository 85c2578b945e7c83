"""The seconds that a device takes for what a Worker queues on it.

Owns: the measurement, by CUDA's events where the process uses a GPU, else by the clock. Does not
own: the spans and times of nodes (timing.py), what is measured.
"""

from __future__ import annotations

import time
from typing import Any

from engine.run.worker.counters import cuda_in_use


class DeviceSeconds:
    """A context, left once the device is done with what was queued in it on the current stream;
    then `seconds`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._begin: Any = None

    def __enter__(self) -> DeviceSeconds:
        cuda = cuda_in_use()
        if cuda is not None:
            self._begin = cuda.Event(enable_timing=True)
            self._begin.record()
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._begin is None or kind is not None:
            self.seconds = time.monotonic() - self._began
            return
        cuda = cuda_in_use()
        end = cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        self.seconds = self._begin.elapsed_time(end) / 1e3
