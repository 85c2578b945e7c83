"""A Step's row: sums, means, times, how busy each Worker was, evaluations outside of Steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.keep.metrics.metric_lines import recorded_rows
from engine.keep.metrics.sinks import JsonLines
from engine.keep.metrics.step_accounts import RunMetrics, StepAccounts
from engine.keep.run_folder import RunFolder
from engine.protocol.events import EventStream, InstructionTold, WorkersMeasured
from engine.protocol.messages import Finish, StepClosed
from engine.protocol.reports import Doing, SpanOf
from tests.kit.turns import example_count

TIMES = ("time/step", "time/outside", "time/engine")
IDLE = [Doing(worker="gen"), Doing(worker="train")]


def span(track: str, start: float, end: float) -> SpanOf:
    return SpanOf(track=track, name="work", start=start, end=end)


def accounts(*workers: str) -> StepAccounts:
    """Begun at second 10, after what does not count."""
    steps = StepAccounts(workers or ("main",))
    before = [("time/rollout", 9.0, 1.0), ("reward/mean", 9.0, 1.0)]
    steps.add(before, [span("main/rollout", 0.0, 9.0)])
    steps.begin(10.0)
    return steps


def close(
    steps: StepAccounts,
    step: int,
    now: float,
    doing: Sequence[Doing] = IDLE,
    *,
    again: bool = False,
    metrics: Mapping[str, float] | None = None,
) -> dict[str, float]:
    return steps.close(StepClosed(step=step, metrics=metrics or {}), now, doing, again=again)


def test_sums_means_and_rates() -> None:
    steps = accounts()
    steps.add([("time/rollout", 1.0, 1.0), ("reward/mean", 1.0, 3.0), ("data/rows", 4.0, 1.0)], [])
    steps.add([("time/rollout", 0.5, 1.0), ("reward/mean", 2.0, 1.0)], [])
    steps.add([("completion/tokens", 8.0, 1.0)], [])
    assert close(steps, 1, 12.0, metrics={"policy/lag/max": 1.0}) == {
        "time/rollout": 1.5,
        "time/step": 2.0,
        "time/outside": 2.0,
        "time/engine": 0.5,
        "reward/mean": 1.25,
        "data/rows": 4.0,
        "completion/tokens": 8.0,
        "policy/lag/max": 1.0,
        "throughput/samples_per_second": 2.0,
        "throughput/tokens_per_second": 4.0,
    }
    assert close(steps, 2, 13.0) == dict.fromkeys(TIMES, 1.0)


def test_what_is_measured_before_step_1_is_in_its_row() -> None:
    steps = accounts()
    steps.add([("eval/reward", 3.0, 1.0), ("time/held_out", 1.0, 1.0)], [])
    assert close(steps, 0, 11.0) == {}
    times = dict.fromkeys(TIMES, 1.0)
    assert close(steps, 1, 12.0) == times | {"eval/initial/reward": 3.0}
    assert close(steps, 2, 13.0) == times


@pytest.mark.parametrize("evaluates", [True, False])
def test_only_a_run_of_no_steps_has_a_row_of_step_0(tmp_path: Path, evaluates: bool) -> None:
    """One that is stopped before Step 1 begins again, and its metrics have whole Steps alone."""
    with RunFolder.create("run", tmp_path) as run:
        lines = JsonLines()
        lines.open(run, {})
        metrics = RunMetrics(["main"], lines, EventStream(), evaluates=evaluates)
        reports = [("eval/reward", 3.0, 1.0)]
        metrics.take(WorkersMeasured(at=0.0, reports=reports, spans=[], doing=[]))
        for told in (StepClosed(step=0, metrics={}), Finish(reason="stopped")):
            metrics.take(InstructionTold(at=1.0, instruction=told))
        lines.close()
        row = {"step": 0, "eval/reward": 3.0}
        assert list(recorded_rows(run.metrics)) == ([row] if evaluates else [])


def test_a_step_that_is_closed_again_has_its_evaluations_alone() -> None:
    steps = accounts()
    close(steps, 1, 11.0)
    steps.add([("eval/reward", 3.0, 1.0), ("generate/tokens", 5.0, 1.0)], [])
    assert close(steps, 1, 12.0, again=True) == {"eval/reward": 3.0}


def test_time_of_files_has_no_kernel_in_it_where_there_is_one_worker() -> None:
    steps = accounts()
    steps.begin_writing(10.0)
    steps.add([("time/rollout", 1.0, 1.0)], [])
    steps.end_writing(13.0)
    row = close(steps, 1, 14.0)
    assert (row["time/checkpoint"], row["time/rollout"], row["time/engine"]) == (2.0, 1.0, 1.0)


def test_several_workers_say_how_busy_they_were() -> None:
    steps = accounts("gen", "train")
    steps.add([], [span("gen/rollout", 9.0, 11.0), span("train/record", 11.0, 11.5)])
    steps.add([], [span("train/train_policy", 12.0, 13.5)])
    steps.add([], [span("checkpoint", 10.0, 14.0)])
    doing = [Doing(worker="gen", node="rollout", what="chunk 2", since=13.0), Doing(worker="train")]
    row = close(steps, 1, 14.0, doing)
    assert row.pop("cpu/engine") > 0.0
    assert row == {
        "time/step": 4.0,
        "time/outside": 0.5,
        "worker/gen/busy": 0.5,
        "worker/train/busy": 0.5,
    }
    steps.add([], [span("gen/rollout", 13.0, 16.0)])
    assert close(steps, 2, 16.0)["worker/gen/busy"] == pytest.approx(1.0), "counted once a Step"


@settings(max_examples=example_count(50))
@given(
    spans=st.lists(
        st.tuples(st.sampled_from(["gen", "train"]), st.integers(0, 30), st.integers(0, 12)),
        max_size=12,
    ),
    first=st.integers(1, 15),
    second=st.integers(1, 15),
)
def test_what_is_outside_kernels_is_the_rest_of_each_step(
    spans: list[tuple[str, int, int]], first: int, second: int
) -> None:
    """Counted second by second: in how many of them no Worker was in a kernel."""
    steps = StepAccounts(("gen", "train"))
    steps.begin(0.0)
    for step, (before, end) in enumerate([(0, first), (first, first + second)], start=1):
        known = [(worker, a, a + length) for worker, a, length in spans if a + length <= end]
        under_way = [(worker, a) for worker, a, length in spans if a < end < a + length]
        steps.add([], [span(f"{worker}/x", a, b) for worker, a, b in known])
        files = SpanOf(track="gen/x", name="save", start=0.0, end=float(end), computes=False)
        steps.add([], [files, span("checkpoint", 0, end)])
        doing = [Doing(worker=worker, node="x", since=a) for worker, a in under_way]
        kernels = [(a, b) for _, a, b in known] + [(a, end) for _, a in under_way]
        outside = [
            second for second in range(before, end) if not any(a <= second < b for a, b in kernels)
        ]
        assert close(steps, step, float(end), doing)["time/outside"] == len(outside)


def test_a_worker_that_starts_is_in_no_kernel() -> None:
    steps = accounts("gen", "train")
    start = Doing(worker="gen", node="its start", what="imports", since=10.0, computes=False)
    assert close(steps, 1, 14.0, [start])["time/outside"] == 4.0


@settings(max_examples=example_count(50))
@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=12),
    cuts=st.sets(st.integers(1, 100), max_size=4),
)
def test_shares_add_up_to_the_work(parts: list[tuple[int, int]], cuts: set[int]) -> None:
    """However Steps are cut, each second of a Worker's spans is counted once."""
    spans, now = [], 0.0
    for gap, length in parts:
        spans.append((now + gap, now + gap + length))
        now += gap + length
    ends = [*sorted(cut for cut in cuts if cut <= now), now + 1.0]
    steps, busy = StepAccounts(("gen", "train")), 0.0
    steps.begin(0.0)
    for step, (before, end) in enumerate(pairwise([0.0, *ends]), start=1):
        steps.add([], [span("gen/x", a, b) for a, b in spans if before < b <= end])
        doing = [Doing(worker="gen", node="x", since=a) for a, b in spans if a < end < b]
        busy += close(steps, step, end, doing)["worker/gen/busy"] * (end - before)
    assert busy == pytest.approx(sum(length for _, length in parts))
