"""Metrics, progress, trace and samples."""

from __future__ import annotations

import io
import json
import math
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataflow.errors import DataError, RunError
from engine.keep.metrics.sinks import JsonLines
from engine.keep.metrics.step_metrics import StepMetrics, json_line
from engine.keep.run_folder import RunFolder
from engine.keep.trace.timeline import Trace, read_trace
from engine.session.progress import Progress
from tests.kit.runs import metrics
from tests.kit.turns import example_count

# metrics


def test_a_metric_is_its_weighted_mean_or_its_extreme() -> None:
    step = StepMetrics()
    for value, count in ((1.0, 3), (5.0, 1)):
        for name in ("reward/mean", "policy/lag/max", "completion/length/min"):
            step.add(name, value, count)
    extremes = {"completion/length/min": 1.0, "policy/lag/max": 5.0}
    assert step.row(7) == {"step": 7, "reward/mean": 2.0} | extremes
    assert next(iter(step.row(7))) == "step"
    step.clear()
    assert step.row(8) == {"step": 8}


def test_a_value_that_stands_for_nothing_says_nothing() -> None:
    step = StepMetrics()
    step.add("reward/mean", math.nan, 0)
    step.add("policy/lag/max", 9.0, 0)
    assert step.row(1) == {"step": 1}
    step.add("reward/mean", 0.5, 2)
    assert step.row(1) == {"step": 1, "reward/mean": 0.5}


_NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=example_count(60))
@given(
    st.lists(st.tuples(_NUMBERS, st.integers(1, 9)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@example([(0.0, 1), (-0.0, 1)], random.Random(3))
@example([(0.1, 1), (0.2, 1), (0.3, 1)], random.Random(3))
def test_the_order_of_reports_does_not_matter_to_the_bit(
    reports: list[tuple[float, int]], rng: random.Random
) -> None:
    def row(order: list[tuple[float, int]]) -> str:
        step = StepMetrics()
        for value, count in order:
            for name in ("a/mean", "a/max", "a/min"):
                step.add(name, value, count)
        return repr(step.row(1))

    assert row(reports) == row(rng.sample(reports, len(reports))) == row(reports[::-1])


@pytest.mark.parametrize(
    "name", ["", "step", "Reward", "reward/", "/reward", "a//b", "a b", "reward/x y", "KL"]
)
def test_a_name_that_is_none_is_refused_with_one_that_is(name: str) -> None:
    step = StepMetrics()
    with pytest.raises(DataError, match="expected slash-separated parts in lower case") as caught:
        step.add(name, 1.0)
    StepMetrics().add(str(caught.value).rsplit("Fix: '", 1)[1].removesuffix("'."), 1.0)
    assert step.row(1) == {"step": 1}


def test_names_of_the_users_own_things_are_kept() -> None:
    step = StepMetrics()
    names = "reward/ExactMatch/mean edge/rollout.score/bytes reward/<lambda>/mean eval/held_out:1"
    for name in names.split():
        step.add(name, 1.0)
    assert step.row(1) == {"step": 1} | dict.fromkeys(names.split(), 1.0)


def test_numbers_not_finite_are_null_and_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    noted = set()
    first = json_line(1, {"b": math.nan, "a": math.inf, "c": 0.25}, noted)
    json_line(2, {"b": math.nan}, noted)
    assert first == b'{"step":1,"a":null,"b":null,"c":0.25}\n'
    assert [r.args[0] for r in caplog.records if isinstance(r.args, tuple)] == ["a", "b"]


# the metrics file


@contextmanager
def lines(run_folder: RunFolder, *steps: int) -> Iterator[JsonLines]:
    """The metrics file, opened and given these Steps."""
    sink = JsonLines()
    sink.open(run_folder, {})
    with closing(sink):
        for step in steps:
            sink.write(step, {"reward/mean": float(step)})
        yield sink


def steps_of(run_folder: RunFolder) -> list[int]:
    return [row["step"] for row in metrics(run_folder.path)]


@pytest.mark.parametrize(
    "torn", [b'{"step":3,"rew', b'{"step":3}', b"\0\0\0\0", b"\0\0\0\n", b"\n"]
)
def test_a_torn_last_line_is_cut_off(run_folder: RunFolder, torn: bytes) -> None:
    with lines(run_folder, 1, 2):
        pass
    with open(run_folder.metrics, "ab") as file:
        file.write(torn)
    with lines(run_folder, 3, 4):
        assert steps_of(run_folder) == [1, 2, 3, 4]


def test_a_damaged_line_in_the_middle_is_an_error_not_a_cut(run_folder: RunFolder) -> None:
    run_folder.metrics.write_bytes(b'{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: expected a JSON object with a step"):
        JsonLines().open(run_folder, {})
    assert run_folder.metrics.read_bytes().count(b"\n") == 3


def test_truncate_after_drops_the_later_steps(run_folder: RunFolder) -> None:
    with lines(run_folder, *range(1, 6)) as sink:
        for last in (3, 3, 0):
            sink.truncate_after(last)
            assert steps_of(run_folder) == [*range(1, last + 1)]


def test_a_step_is_written_once(run_folder: RunFolder) -> None:
    with lines(run_folder, 1, 2):
        pass
    told = r"expected a Step after 2, found 2. Fix: truncate_after\(1\)"
    with lines(run_folder) as sink, pytest.raises(RunError, match=told):
        sink.write(2, {})


# progress

_ROW = {
    "step": 3,
    "reward/mean": 0.53125,
    "eval/held_out/mean": 0.7,
    "policy/lag/max": 2.0,
    "completion/length/mean": 7.25,
    "time/step": 0.5,
    "throughput/tokens_per_second": 12345.6,
}


def test_time_is_taken_from_the_clock_where_the_row_has_none() -> None:
    out = io.StringIO()
    times = iter([0.0, 40.0, 60.0])
    with Progress(122, stream=out, clock=lambda: next(times)) as progress:
        progress.update({"step": 1})
        progress.update({"step": 2, "reward/mean": math.nan})
    assert out.getvalue() == "step 1/122  eta 1h20m\nstep 2/122  reward nan  eta 1h00m\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return _Terminal()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_terminal_is_restored_however_the_run_ends(
    error: type[BaseException], terminal: _Terminal
) -> None:
    def run() -> None:
        with Progress(200, title="grpo [1]", stream=terminal) as progress:
            progress.update(_ROW)
            raise error

    with pytest.raises(error):
        run()
    shown = terminal.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert all(text in shown for text in ("grpo [1]", "3/200", "reward 0.531"))


def test_a_terminal_keeps_the_last_evaluation_in_sight(terminal: _Terminal) -> None:
    with Progress(200, stream=terminal) as progress:
        progress.update(_ROW)
        progress.update({"step": 4, "time/step": 0.5})
        assert "eval/held_out/mean 0.700" in progress.line()


def test_updates_between_two_refreshes_draw_nothing(terminal: _Terminal) -> None:
    with Progress(20_000, stream=terminal) as progress:
        for step in range(1, 5001):
            progress.update({**_ROW, "step": step})
    assert terminal.getvalue().count("/20000") < 500


def test_a_reader_that_left_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    with Progress(10, stream=out) as progress:
        progress.update({"step": 1})
        progress.update({"step": 2})
    assert len(caplog.records) == 1
    with pytest.raises(BrokenPipeError):
        out.close()


# trace


def _by_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["ph"] == kind]


def test_a_trace_holds_spans_tracks_and_moments(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run.json", process="coordinator")
    trace.span("loop", "step 1", 1.0, 1.5, rows=64)
    trace.span("worker0/decode", "chunk", 1.25, 1.2500005)
    trace.span("worker0/forward", "chunk", 1.5, 2.0)
    trace.instant("loop", "publish", 2.5, version=1)
    trace.close()
    trace.close()
    events = json.loads((tmp_path / "run.json").read_text())
    assert events == read_trace(tmp_path / "run.json")
    spans = [(e["ts"], e["dur"], e.get("args", {})) for e in _by_kind(events, "X")]
    assert spans == [(1e6, 5e5, {"rows": 64}), (1.25e6, 0.5, {}), (1.5e6, 5e5, {})]
    names = {e["args"]["name"]: (e["pid"], e["tid"]) for e in _by_kind(events, "M")}
    assert names["loop"][0] == names["coordinator"][0] != names["worker0"][0]
    tracks = [(e["pid"], e["tid"]) for e in _by_kind(events, "X")]
    assert tracks == [names["loop"], names["decode"], names["forward"]]
    (moment,) = _by_kind(events, "i")
    assert (moment["ts"], moment["s"], moment["args"]) == (2.5e6, "t", {"version": 1})


def test_a_trace_is_readable_after_a_kill_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with closing(Trace(path)) as trace:
        for i in range(4):
            trace.span("loop", f'"name",\n{i}', i, i + 1)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        spans = _by_kind(read_trace(path), "X")
        assert [s["ts"] for s in spans] == [i * 1e6 for i in range(len(spans))]
    assert len(spans) == 4


def test_a_trace_is_good_before_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trace = Trace(path)
    assert read_trace(path) == []
    trace.span("loop", "step", 0, 1)
    trace.flush()
    assert len(json.loads(path.read_text() + "]")) == 3
    trace.close()


def test_threads_lose_no_spans(tmp_path: Path) -> None:
    def work(name: str) -> None:
        for i in range(3000):
            trace.span(f"w/{name}", "chunk", i, i + 0.5, i=i)

    with closing(Trace(tmp_path / "run.json")) as trace, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, "0123"))
    events = read_trace(tmp_path / "run.json")
    assert len(_by_kind(events, "X")) == 12_000
    assert len(_by_kind(events, "M")) == 5


def test_an_empty_trace_and_no_trace(tmp_path: Path) -> None:
    Trace(tmp_path / "empty.json").close()
    assert json.loads((tmp_path / "empty.json").read_text()) == []
    (tmp_path / "other.json").write_text("hello\nworld")
    with pytest.raises(DataError, match=r"other.json: expected a trace"):
        read_trace(tmp_path / "other.json")
