"""A node's time lasts until the device has done what the node launched."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dataflow.errors import KernelError, ShortOfMemory
from engine.protocol.reports import SpanOf
from engine.run.worker.counters import wait_for_device
from engine.run.worker.timing import Timing


class Launched:
    """Work that goes on when its launch has returned, as on a GPU, until it is let go."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended = 0.0

    def launch(self) -> None:
        """Begin, and return."""
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        self._done.wait()
        self.ended = time.monotonic()

    def wait(self) -> None:
        """Return when it is done; what waits for it is what lets it end."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()


def test_what_a_node_launched_is_in_its_time_and_not_in_the_next_ones() -> None:
    device = Launched()
    timing = Timing("main", wait=device.wait)
    spans: list[SpanOf] = []
    timing.span = spans.append
    with timing.during("train_policy", "train_policy"):
        device.launch()
        assert device.ended == 0.0
    with timing.during("score", "score"):
        pass
    first, second = spans
    assert first.end >= device.ended > 0.0
    assert second.start >= device.ended
    reports = {name: seconds for name, seconds, _ in timing.reports()}
    assert reports["time/train_policy"] == first.end - first.start


def test_an_error_that_the_device_has_late_is_the_nodes() -> None:
    def wait() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    timing = Timing("main", wait=wait)
    late = "train_policy: step 3: raised RuntimeError: an illegal memory access"
    with pytest.raises(KernelError, match=late), timing.during("train_policy", "x", "step 3"):
        pass
    # A kernel's own error is the cause; the device is not asked any more.
    cause = "raised ValueError: no such row"
    with pytest.raises(KernelError, match=cause), timing.during("train_policy", "x"):
        raise ValueError("no such row")


@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("open", "a smaller base, its weights on the host"),
        ("load version 3", "a smaller base, its weights on the host"),
        ("step 3", "see 'When memory runs out'"),
    ],
)
def test_memory_that_runs_out_is_an_error_of_the_node_with_bytes_and_a_fix(
    what: str, fix: str
) -> None:
    error = MemoryError("cannot allocate 3 GiB")
    bytes_text = r"of which its process had [\d.]+ [KMG]i?B"
    wanted = (
        rf"rollout: {what}: its memory ran out, {bytes_text}: MemoryError: .*3 GiB\. Fix: {fix}"
    )
    with (
        pytest.raises(ShortOfMemory, match=wanted),
        Timing("main").during("rollout", "x", what),
    ):
        raise error


def test_the_stream_of_this_thread_is_waited_for_where_cuda_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    in_use = [True]
    cuda = SimpleNamespace(is_initialized=lambda: in_use[0], current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    wait_for_device()
    assert waits == ["stream"]
    in_use[0] = False
    wait_for_device()
    monkeypatch.delitem(sys.modules, "torch")
    wait_for_device()
    assert waits == ["stream"]
    assert "torch" not in sys.modules


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_node_that_only_launches_a_long_kernel_gets_its_time() -> None:
    torch.cuda.synchronize()
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    timing = Timing("main")
    spans: list[SpanOf] = []
    timing.span = spans.append
    with timing.during("train_policy", "train_policy"):
        begun.record()
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second
        done.record()
    with timing.during("score", "score"):
        pass
    assert done.query(), "it was waited for"
    on_device = begun.elapsed_time(done) / 1e3
    first, second = (span.end - span.start for span in spans)
    assert first > 0.9 * on_device
    assert second < 0.1 * on_device
