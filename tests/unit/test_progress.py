"""What a user sees while a run goes on: which numbers, which Steps, how wide; and warnings of Steps
that teach nothing.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.graph import Graph
from dataflow.width import folded, packed, screen_width
from engine.observe.events import EventStream, FailingSilently, StepEnded
from engine.observe.figures import figures
from engine.observe.progress import Progress
from engine.observe.record import row_metrics
from engine.observe.runfolder import RunFolder
from engine.observe.runlog import RunLog
from engine.observe.silent_failures import STEPS, SilentFailures, silent_failures
from engine.observe.sinks import View
from graphs.grpo import grpo
from graphs.ppo import ppo
from tests.kit.comparison import require_golden
from tests.kit.plans import planned
from tests.kit.rewards import zero

_TIME = {"time/step": 2.0, "throughput/tokens_per_second": 1234.0}
_ANSWERS = {
    "completion/length/mean": 61.25,
    "completion/truncated": 0.25,
    "policy/lag/max": 1.0,
    "policy/lag/mean": 0.5,
    "policy/mismatch/max": 0.75,
    "policy/mismatch/mean": 2.5e-5,
    "policy/mismatch_kl": 1.5e-9,
    "policy/sampled_entropy": 1.25,
    "reward/mean": 0.75,
    "reward/std": 0.25,
    "reward/no_signal": 0.125,
}
ROWS: Mapping[str, Mapping[str, float]] = {
    "supervised": {"loss/supervised_loss": 1.2345, "train/tokens": 900.0, "eval/held_out": 0.5},
    "two_rewards": {
        **_ANSWERS,
        "policy/kl_reference": 0.0123,
        "reward/correct/mean": 0.5,
        "reward/correct/std": 0.5,
        "reward/form/mean": 1.0,
        "loss/policy_gradient_loss": 0.01,
        "eval/reward": 1.5,
        "eval/correct": 0.75,
        "eval/rows": 64.0,
    },
    "lag": {**_ANSWERS, "reward/correct/mean": 0.75, "policy/entropy": 1.5},
}


class _TerminalOf60(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", sorted(ROWS))
@pytest.mark.parametrize("columns", ["", "60"])
def test_a_run_shows_what_matters_for_its_kind(
    kind: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    with Progress(500, stream=out, lag=kind == "lag", clock=lambda: 0.0) as progress:
        for step in range(1, 4):
            row = {n: v for n, v in ROWS[kind].items() if step == 2 or not n.startswith("eval/")}
            progress.update({"step": step, **row, **_TIME})
    require_golden(f"progress/{kind}{'_60' if columns else ''}.txt", out.getvalue())
    assert not columns or max(map(len, out.getvalue().splitlines())) <= 60


def test_a_terminal_of_60_columns_shows_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "60"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    out = _TerminalOf60()
    with Progress(500, title="an algorithm of a long name", phase="phase 1/2", stream=out) as shown:
        shown.update({"step": 3, **ROWS["two_rewards"], **_TIME})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    assert max(map(len, text.splitlines())) <= 60
    assert "\x1b[3" not in re.sub(r"\x1b\[3[24]m?[JK]", "", out.getvalue())  # no colour
    wanted = ("3/500", "reward/correct 0.500", "kl 0.0123", "no signal 12%", "eval/correct 0.750")
    assert all(each in text for each in wanted)


def _steps(out: io.StringIO) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+)", out.getvalue(), re.MULTILINE)]


def _run(steps: int | None, last: int, first: int = 1, every: int = 0) -> list[int]:
    """The Steps that have a line; every 64th has an evaluation."""
    out = io.StringIO()
    with Progress(steps, stream=out, every=every) as progress:
        for step in range(first, last + 1):
            progress.update({"step": step, **({"eval/x": 1.0} if step % 64 == 0 else {})})
    return _steps(out)


def test_lines_thin_out_after_the_first_hundred_steps() -> None:
    found = _run(None, 205)
    assert found == [*range(1, 101), 110, 120, 128, 130, *range(140, 191, 10), 192, 200, 205]
    assert _run(205, 205) == found


def test_a_run_that_goes_on_counts_its_steps_from_the_beginning() -> None:
    assert _run(300, 131, first=98) == [98, 99, 100, 110, 120, 128, 130, 131]


def test_a_chosen_number_of_steps_holds_from_the_first() -> None:
    assert _run(None, 135, every=50) == [50, 64, 100, 128, 135]
    assert _run(None, 3, every=1) == [1, 2, 3]


def test_an_evaluation_that_comes_late_brings_its_step_a_line() -> None:
    out = io.StringIO()
    with Progress(None, stream=out) as progress:
        progress.update({"step": 101})
        progress.update({"step": 101, "eval/x": 1.0})
    assert _steps(out) == [101]


def test_an_exact_entropy_takes_the_place_of_the_estimate() -> None:
    both = dict(figures({"policy/entropy": 1.0, "policy/sampled_entropy": 2.0}, lag=False))
    assert both == {"entropy": "1.000"}


# rows


def _rewarded(groups: list[list[float]], parts: list[float | None] | None = None) -> Batch:
    position = [at for at, group in enumerate(groups) for _ in group]
    sample = [i for group in groups for i in range(len(group))]
    columns = {"reward": pa.array([r for group in groups for r in group], pa.float32())}
    if parts is not None:
        columns["reward/some"] = pa.array(parts, pa.float32())
    records = pa.RecordBatch.from_pydict(columns)
    return Batch(Keys.of(position, sample), records)


def test_groups_without_signal_are_those_of_equal_rewards() -> None:
    found = {n: (v, c) for n, v, c in row_metrics(_rewarded([[1, 1], [0, 1], [0, 0], [5], [2, 2]]))}
    assert found["reward/no_signal"] == (0.75, 4)
    alone = [name for name, _, _ in row_metrics(_rewarded([[1.0], [2.0]]))]
    assert "reward/no_signal" not in alone


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1))
def test_their_share_does_not_depend_on_the_order_of_rows(groups: list[list[float]]) -> None:
    rows = _rewarded(groups)
    shuffled = rows.take(np.random.default_rng(0).permutation(len(rows)))
    several = [group for group in groups if len(group) > 1]
    for each in (rows, shuffled):
        share = {n: v for n, v, _ in row_metrics(each)}.get("reward/no_signal")
        expected = sum(len(set(g)) == 1 for g in several) / len(several) if several else None
        assert share == expected


def test_a_function_that_applies_to_some_rows_says_to_how_many() -> None:
    some = {n: v for n, v, _ in row_metrics(_rewarded([[1, 1], [0, 1]], [None, 1.0, None, None]))}
    assert some["reward/some/applied"] == 0.25
    none = {n: v for n, v, _ in row_metrics(_rewarded([[1, 1]], [None, None]))}
    assert none["reward/some/applied"] == 0.0
    assert "reward/some/mean" not in none
    every = {n for n, _, _ in row_metrics(_rewarded([[1, 1]], [1.0, 2.0]))}
    assert "reward/some/applied" not in every


# Steps that teach nothing

FLAT = {"reward/no_signal": 1.0, "reward/mean": 0.5, "reward/std": 0.25, "data/rows": 8.0}
GOOD = FLAT | {"reward/no_signal": 0.5}


def told(steps: list[dict[str, float]], *, compares: bool = True) -> list[tuple[int, str]]:
    """(Step, rule) of each warning."""
    stream, found = EventStream(), list[FailingSilently]()
    stream.on(found.append, FailingSilently)
    stream.add(SilentFailures(stream, Path("runs/x/samples"), compares_groups=compares))
    for step, metrics in enumerate(steps, start=1):
        stream.emit(StepEnded(step=step, metrics=metrics))
        stream.emit(StepEnded(step=step, metrics=metrics, again=True))
    return [(each.step, each.rule) for each in found]


def test_ten_steps_without_signal_are_told_and_again_after_ten_more() -> None:
    assert told([FLAT] * (STEPS - 1)) == []
    assert told([FLAT] * 35) == [(step, "no_signal") for step in (10, 20, 30)]
    assert told([FLAT] * 9 + [GOOD] + [FLAT] * 10) == [(20, "no_signal")]
    assert told([FLAT] * 5 + [{}] * 5 + [FLAT] * 5) == [(15, "no_signal")]


def test_where_groups_are_not_compared_all_rewards_of_a_step_are_equal() -> None:
    assert told([FLAT] * 10, compares=False) == []
    assert told([FLAT | {"reward/std": 0.0}] * 10, compares=False) == [(10, "no_signal")]
    one = {"reward/std": 0.0, "data/rows": 1.0}
    assert told([one] * 10, compares=False) == []


@pytest.mark.parametrize(("make", "compares"), [(grpo, True), (ppo, False)])
def test_the_graph_says_whether_groups_are_compared(make: object, compares: bool) -> None:
    graph = make("tiny", "train.parquet", zero)  # type: ignore[operator]
    assert isinstance(graph, Graph)
    found = silent_failures(planned(graph), Path("samples"), EventStream())
    assert found._compares_groups is compares


def test_answers_that_are_all_cut_off_are_told() -> None:
    cut = {"completion/truncated": 1.0}
    assert told([cut] * 10) == [(10, "all_truncated")]
    assert told([cut] * 9 + [{"completion/truncated": 0.9}, cut]) == []


def test_a_reward_that_never_applies_is_told() -> None:
    none = GOOD | {"reward/form/applied": 0.0}
    assert told([none] * 10) == [(10, "reward_never_applies")]
    assert told([none] * 9 + [GOOD] + [none] * 9) == []


def test_the_log_and_the_sinks_hear_of_it(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    sink = Mock(spec=["open", "write", "warn", "close"])
    view = View("tensorboard", sink)
    view.open(RunFolder.seen(tmp_path), {})
    stream = EventStream(RunLog(strict=True), view)
    stream.add(SilentFailures(stream, Path("runs/x/samples"), compares_groups=True))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 21):
            stream.emit(StepEnded(step=step, metrics=FLAT))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "warning: all rewards of each group were equal in the last 10 Steps (up to step 10), so"
        " that no answer was better than another. Fix: look at the answers in runs/x/samples, or"
        " with dataflow peek TARGET NODE; then the reward function, a task of another difficulty,"
        " a higher temperature or a larger n. [no_signal]"
    )
    assert "in the last 20 Steps (up to step 20)" in second
    assert [call.args[:2] for call in sink.warn.call_args_list] == [
        (10, "no_signal"),
        (20, "no_signal"),
    ]


# width


def test_the_width_is_that_of_the_environment_then_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, sizes = io.StringIO(), {"COLUMNS": "60"}
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen_width(120, out) == 120
    assert screen_width(120, _TerminalOf60()) == 120  # it has no file, so no size
    for value, width in ((sizes["COLUMNS"], 60), ("300", 120), ("5", 40), ("0", 120), ("x", 120)):
        monkeypatch.setenv("COLUMNS", value)
        assert screen_width(120, out) == width


_WORDS = st.text("ab  -", max_size=12)


@given(st.lists(_WORDS, max_size=12).map(" ".join), st.integers(40, 80))
def test_folding_keeps_every_word_and_fits(text: str, width: int) -> None:
    lines = folded(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= width for line in lines)


@given(st.lists(st.text("ab", min_size=1, max_size=30), min_size=1), st.integers(40, 80))
def test_packing_breaks_no_part_and_fills_its_lines(parts: list[str], width: int) -> None:
    lines = list(packed(parts, width, indent="  "))
    assert [part for line in lines for part in line.strip().split("  ")] == parts
    assert all(len(line) <= width for line in lines)
    assert all(len(a) + len(b.strip().split("  ")[0]) + 2 > width for a, b in pairwise(lines))
