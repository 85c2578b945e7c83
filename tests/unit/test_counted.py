"""Memory that Workers count: of their GPU by node and in the end, and the peak of the process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataflow.processor_time import ProcessorTime
from engine.protocol.reports import Report
from engine.run.worker.counters import DeviceMemory, FlowCounts, PeakReports, memory_reports
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.timing import Timing


@dataclass
class _Cuda:
    """torch.cuda of a process with so many bytes allocated."""

    allocated: int = 0
    greatest: int = 0

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> Any:
        """A stream that has done all."""
        return SimpleNamespace(synchronize=lambda: None)

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.greatest = max(self.greatest, self.allocated)

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.greatest

    def reset_peak_memory_stats(self) -> None:
        self.greatest = self.allocated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    found = _Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=found))
    monkeypatch.setattr("engine.run.worker.timing.DEVICE_MEMORY", memory := DeviceMemory())
    monkeypatch.setattr("engine.run.worker.counters.DEVICE_MEMORY", memory)
    return found


def values(reports: Iterable[Report]) -> dict[str, float]:
    return {name: value for name, value, _ in reports}


def test_a_nodes_peak_is_its_own_and_the_process_has_the_greatest(cuda: _Cuda) -> None:
    timing, counts = Timing("w"), FlowCounts("w")
    timing.peak = counts.peak
    cuda.take(10)
    for node, nbytes in (("rollout", 500), ("train_policy", 80), ("rollout", 300)):
        with timing.during(node, node):
            cuda.take(nbytes)
            cuda.take(-nbytes)
    peaks = {"flow/node_peak/rollout@w": 510.0, "flow/node_peak/train_policy@w": 90.0}
    assert values(counts.reports()) == peaks
    whole = {"flow/device/w": 10.0, "flow/device_peak/w": 510.0}
    assert values(memory_reports("w")).items() >= whole.items()
    assert counts.reports() == []


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    timing, counts = Timing("w"), FlowCounts("w")
    timing.peak = counts.peak
    with timing.during("rollout", "rollout"):
        pass
    assert counts.reports() == []
    assert values(memory_reports("w")).keys() == {"flow/memory/w", "flow/peak/w", "flow/outbox/w"}


def test_what_the_process_had_before_its_kernels_is_told_once() -> None:
    counts = FlowCounts("w")
    counts.opening()
    ((name, nbytes, weight),) = counts.reports()
    assert (name, weight) == ("flow/before/w", 1.0)
    most = values(memory_reports("w"))["flow/peak/w"]
    assert 1 << 20 < nbytes <= most * 1.05, "the kernel counts both roughly"
    assert counts.reports() == []


def test_a_peak_that_has_grown_since_it_was_reported_is_worth_a_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = PeakReports("w")
    monkeypatch.setattr("engine.run.worker.counters._peak", lambda: 100 << 20)
    assert peaks.has_grown()
    assert values(peaks.reports(outbox=7)).items() >= {"flow/outbox/w": 7.0}.items()
    assert not peaks.has_grown()
    monkeypatch.setattr("engine.run.worker.counters._peak", lambda: (101 << 20) - 1)
    assert not peaks.has_grown(), "a few pages grow with nearly every instruction"
    monkeypatch.setattr("engine.run.worker.counters._peak", lambda: 101 << 20)
    assert peaks.has_grown()


def test_a_step_of_less_than_a_second_tells_the_peak_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = SimpleNamespace()
    worker = SimpleNamespace(name="w", timing=SimpleNamespace(), reports=list, runs=runs)
    monkeypatch.setattr("engine.run.worker.counters._peak", lambda: 100 << 20)
    workers = InprocWorkers(cast(Any, worker))
    assert values(workers.reports())["flow/peak/w"] == 100 << 20
    assert workers.reports() == []
    monkeypatch.setattr("engine.run.worker.counters._peak", lambda: 900 << 20)
    assert values(workers.reports())["flow/peak/w"] == 900 << 20


def test_a_kernel_of_a_model_counts_what_it_waited_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing, thread = Timing("w"), iter([ProcessorTime(1.0, 2.0), ProcessorTime(1.5, 2.25)])
    monkeypatch.setattr("dataflow.processor_time.of_thread", lambda: next(thread))
    with timing.during("rollout", "rollout", queues=True):
        pass
    counted = values(timing.reports())
    assert counted["queue/rollout"] == 0.25
    assert "cpu/rollout" not in counted, "its threads may be many"


def test_a_function_counts_what_it_and_its_processes_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing, thread = Timing("w"), iter([ProcessorTime(1.0, 2.0), ProcessorTime(1.5, 2.0)])
    monkeypatch.setattr("dataflow.processor_time.of_thread", lambda: next(thread))
    with timing.during("score", "score", elsewhere=lambda: ProcessorTime(0.25, 4.0)):
        pass
    counted = values(timing.reports())
    assert counted["cpu/score"] == 0.75
    assert counted["queue/score"] == 4.0
