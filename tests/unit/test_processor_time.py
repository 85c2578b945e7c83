"""What threads and processes computed, and what they waited for a core."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dataflow import processor_time
from dataflow.processor_time import ProcessorTime


def test_what_came_after_is_never_below_nothing() -> None:
    before, after = ProcessorTime(2.0, 1.0), ProcessorTime(3.0, 0.5)
    assert after.since(before) == ProcessorTime(1.0, 0.0), "a thread that had waited has ended"
    assert before + after == ProcessorTime(5.0, 1.5)


def test_a_thread_and_its_process_count_what_they_compute() -> None:
    thread, process = processor_time.of_thread(), processor_time.of_process()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert processor_time.of_thread().since(thread).computed >= 0.05
    assert processor_time.of_process().since(process).computed >= 0.04, "a clock of its own"


def test_the_time_without_a_core_is_the_second_number_of_schedstat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, queued in (("1", 250_000_000), ("2", 500_000_000)):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(f"9999 {queued} 7\n")
    monkeypatch.setattr(processor_time, "_TASKS", tmp_path)
    monkeypatch.setattr(processor_time, "_THREAD", tmp_path / "1" / "schedstat")
    monkeypatch.setattr(processor_time, "_thread_file", processor_time._ThreadFile())
    assert processor_time.of_process().queued == 0.75
    assert processor_time.of_thread().queued == 0.25
    monkeypatch.setattr(processor_time, "_THREAD", tmp_path / "none")
    monkeypatch.setattr(processor_time, "_thread_file", processor_time._ThreadFile())
    assert processor_time.of_thread().queued == 0.0, "a system that does not say"


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="no schedstat here")
def test_a_forked_process_reads_its_own_file() -> None:
    processor_time.of_thread()
    child = os.fork()
    if not child:
        before = processor_time._thread_file.file.number
        processor_time.of_thread()
        os.fstat(before)  # closed, it may be the number of a file that was opened meanwhile
        file = os.readlink(f"/proc/self/fd/{processor_time._thread_file.file.number}")
        os._exit(0 if file.startswith(f"/proc/{os.getpid()}/") else 1)
    assert os.waitpid(child, 0)[1] == 0
