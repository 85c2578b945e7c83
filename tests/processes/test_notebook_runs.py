"""Runs in a thread, as notebooks start them, and what runs show there."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from dataflow.errors import KernelError, RunError
from engine.api import RunHandle, resume, run
from tests.kit import run_graphs as graphs
from tests.kit.pages import page_of, pictures_of
from tests.kit.runs import steps_stored
from tests.kit.tiny_runs import TinyRuns

LONG = 100.0
"""Seconds after which waiting for a run counts as a hang."""


class Gate:
    """An on_step that lets Steps pass one by one."""

    def __init__(self) -> None:
        self.seen = threading.Semaphore(0)
        self.open = threading.Semaphore(0)

    def __call__(self, metrics: Mapping[str, float]) -> None:
        self.seen.release()
        assert self.open.acquire(timeout=LONG)


def in_thread(tiny: TinyRuns, gate: Gate, steps: int, **options: object) -> RunHandle:
    """A run that waits after each Step."""
    graph = graphs.small(tiny.folder)
    return run(graph, tiny.options(steps, **options), on_step=[gate], wait=False)


def test_a_run_in_a_thread_shows_its_metrics_and_stops(tiny: TinyRuns) -> None:
    gate = Gate()
    handle = in_thread(tiny, gate, 50)
    assert gate.seen.acquire(timeout=LONG)
    assert handle.state == "running"
    assert handle.step == 1
    assert "reward/mean" in handle.metrics
    assert "running" in page_of(handle)
    with pytest.raises(TimeoutError, match=r"the run goes on, at step 1"):
        handle.result(timeout=0.01)
    handle.stop()
    gate.open.release(50)
    result = handle.result(LONG)
    assert handle.state == "ended"
    assert result.reason == "stopped by stop()"
    assert not result.interrupted
    assert result.step < 50
    assert steps_stored(result)[-1] == result.step
    assert resume(result.folder, steps=result.step + 1).step == result.step + 1


@pytest.mark.long
def test_a_checkpoint_is_written_when_it_is_asked_for(tiny: TinyRuns) -> None:
    gate = Gate()
    handle = in_thread(tiny, gate, 3, keep=5)
    assert gate.seen.acquire(timeout=LONG)
    handle.checkpoint()
    gate.open.release(3)
    result = handle.result(LONG)
    assert steps_stored(result) == [2, 3]


@pytest.mark.long
def test_a_second_run_in_the_process_is_refused(tiny: TinyRuns) -> None:
    gate = Gate()
    handle = in_thread(tiny, gate, 1, name="one")
    graph = graphs.small(tiny.folder)
    told = r"one: expected one run at a time.*Fix: handle.result\(\) waits for it"
    for wait in (True, False):
        with pytest.raises(RunError, match=told):
            run(graph, tiny.options(1, name="two"), wait=wait)
    gate.open.release()
    handle.result(LONG)
    assert not (tiny.runs / "two").exists()
    assert tiny.run(graph, 1, name="two").step == 1


@pytest.mark.long
def test_a_run_that_fails_in_its_thread_says_so(
    tiny: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = run(graphs.small(tiny.folder, graphs.raises), tiny.options(1), wait=False)
    with pytest.raises(KernelError):
        handle.result(LONG)
    assert handle.state == "failed"
    assert "the run failed: " in capsys.readouterr().err
    assert "failed" in page_of(handle)


def test_what_is_wrong_at_the_start_is_raised_at_once(tiny: TinyRuns) -> None:
    graph = graphs.small(tiny.folder)
    tiny.run(graph, 1, name="there")
    with pytest.raises(RunError, match="overwrite"):
        run(graph, tiny.options(1, name="there"), wait=False)


@pytest.mark.long
def test_a_result_shows_what_was_learned(tiny: TinyRuns) -> None:
    result = tiny.run(graphs.evaluated(tiny.folder, every=1), 3)
    assert "step 3" in repr(result)
    drawn = pictures_of(page_of(result))
    assert [words.split()[0] for words in drawn] == ["reward", "evaluation"]
    history = resume(result.folder, steps=4).history
    assert history.column("step").to_pylist() == [1, 2, 3, 4]
    assert history.column("reward/mean").null_count == 0
    assert "eval/reward" in history.column_names
