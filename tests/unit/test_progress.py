"""What a user sees while a run goes on: which numbers, which Steps, how wide; and warnings of Steps
that teach nothing.
"""

from __future__ import annotations

import io
import logging
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.width import fold_lines, pack_parts, screen_width
from engine.keep.metrics.sinks import View
from engine.keep.run_folder import RunFolder
from engine.protocol.events import EventStream, FailingSilently, StepEnded
from engine.run.worker.row_metrics import row_metrics
from engine.session.progress import Progress
from engine.session.run_log import RunLog
from engine.session.silent_failures import STEPS, SilentFailures, watch_silent_failures
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
ROWS = {
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
    "two_policies": {
        "rows/red/reward/mean": 0.25,
        "rows/blue/reward/mean": 0.75,
        "rows/blue/reward/no_signal": 0.5,
        "policy/red/mismatch/mean": 1e-5,
        "policy/blue/mismatch/mean": 2e-5,
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
    row = ROWS[kind]
    without = {name: value for name, value in row.items() if not name.startswith("eval/")}
    with Progress(500, stream=out, lag=kind == "lag", clock=lambda: 0.0) as progress:
        for step, shown in enumerate((without, row, without), start=1):
            progress.update({"step": step, **shown, **_TIME})
    require_golden(f"progress/{kind}{'_60' if columns else ''}.txt", out.getvalue())


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


THINNED = [*range(1, 101), 110, 120, 128, 130, *range(140, 191, 10), 192, 200, 205]
"""Steps with a line: after the first hundred every tenth, the evaluated ones, and the last."""


def _run(steps: int | None, last: int, first: int = 1, every: int = 0) -> list[int]:
    """The Steps that have a line; every 64th has an evaluation."""
    out = io.StringIO()
    with Progress(steps, stream=out, every=every) as progress:
        for step in range(first, last + 1):
            progress.update({"step": step, "eval/x" if step % 64 == 0 else "x": 1.0})
    return _steps(out)


@pytest.mark.parametrize(("how", "lines"), [
    ({"steps": None, "last": 205}, THINNED),
    ({"steps": 205, "last": 205}, THINNED),
    ({"steps": 300, "last": 131, "first": 98}, [98, 99, 100, 110, 120, 128, 130, 131]),
    ({"steps": None, "last": 135, "every": 50}, [50, 64, 100, 128, 135]),
    ({"steps": None, "last": 3, "every": 1}, [1, 2, 3]),
], ids=["without an end", "with one", "that goes on", "every 50th", "each"])  # fmt: skip
def test_which_steps_of_a_run_have_a_line(how: dict[str, Any], lines: list[int]) -> None:
    assert _run(**how) == lines


def test_an_evaluation_that_comes_late_brings_its_step_a_line() -> None:
    out = io.StringIO()
    with Progress(None, stream=out) as progress:
        progress.update({"step": 101})
        progress.update({"step": 101, "eval/x": 1.0})
    assert _steps(out) == [101]


# rows


def _rewarded(
    groups: list[list[float]], parts: list[float | None] | None = None
) -> dict[str, tuple[float, float]]:
    """Metrics and their counts, of these groups in any order; parts: the reward `some` of rows."""
    position = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    columns = {"reward": pa.array([r for group in groups for r in group], pa.float32())}
    if parts is not None:
        columns["reward/some"] = pa.array(parts, pa.float32())
    rows = Batch(Keys.of(position, np.arange(len(position))), pa.RecordBatch.from_pydict(columns))
    shuffled = rows.take(np.random.default_rng(0).permutation(len(rows)))
    return {name: (value, count) for name, value, count in row_metrics(shuffled)}


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1))
@example([[1, 1], [0, 1], [0, 0], [5], [2, 2]])
def test_groups_without_signal_are_those_of_equal_rewards(groups: list[list[float]]) -> None:
    several = [group for group in groups if len(group) > 1]
    equal = [group for group in several if len(set(group)) == 1]
    expected = (len(equal) / len(several), len(several)) if several else None
    assert _rewarded(groups).get("reward/no_signal") == expected


def test_a_function_that_applies_to_some_rows_says_to_how_many() -> None:
    assert _rewarded([[1, 1], [0, 1]], [None, 1.0, None, None])["reward/some/applied"] == (0.25, 4)
    none = _rewarded([[1, 1]], [None, None])
    assert none["reward/some/applied"] == (0.0, 2)
    assert "reward/some/mean" not in none
    assert "reward/some/applied" not in _rewarded([[1, 1]], [1.0, 2.0])


# Steps that teach nothing

FLAT = {"reward/no_signal": 1.0, "reward/mean": 0.5, "reward/std": 0.25, "data/rows": 8.0}
GOOD = FLAT | {"reward/no_signal": 0.5}


def told(steps: list[dict[str, float]], *, compares: bool = True) -> list[tuple[int, str]]:
    """(Step, rule) of each warning."""
    stream, warnings = EventStream(), []
    stream.on(warnings.append, FailingSilently)
    stream.add(SilentFailures(stream, Path("runs/x/samples"), compares_groups=compares))
    for step, metrics in enumerate(steps, start=1):
        stream.emit(StepEnded(step=step, metrics=metrics))
        stream.emit(StepEnded(step=step, metrics=metrics, again=True))
    return [(each.step, each.rule) for each in warnings]


CUT = {"completion/truncated": 1.0}
NOT_CUT = {"completion/truncated": 0.9}
OF_TWO = {
    "data/rows": 16.0,
    "rows/red/reward/no_signal": 1.0,
    "rows/blue/reward/no_signal": 0.5,
    "rows/blue/completion/truncated": 1.0,
}
NEVER = GOOD | {"reward/form/applied": 0.0}


@pytest.mark.parametrize(("steps", "warnings"), [
    ([FLAT] * (STEPS - 1), []),
    ([FLAT] * 35, [(step, "no_signal") for step in (10, 20, 30)]),
    ([FLAT] * 9 + [GOOD] + [FLAT] * 10, [(20, "no_signal")]),
    ([FLAT] * 5 + [{}] * 5 + [FLAT] * 5, [(15, "no_signal")]),
    ([CUT] * 10, [(10, "all_truncated")]),
    ([CUT] * 9 + [NOT_CUT, CUT], []),
    ([NEVER] * 10, [(10, "reward_never_applies")]),
    ([NEVER] * 9 + [GOOD] + [NEVER] * 9, []),
    ([OF_TWO] * 10, [(10, "no_signal"), (10, "all_truncated")]),
])  # fmt: skip
def test_ten_steps_with_a_sign_are_told_and_again_after_ten_more(
    steps: list[dict[str, float]], warnings: list[tuple[int, str]]
) -> None:
    assert told(steps) == warnings


def test_where_groups_are_not_compared_all_rewards_of_a_step_are_equal() -> None:
    equal = FLAT | {"reward/std": 0.0}
    assert told([FLAT] * 10, compares=False) == []
    assert told([equal] * 10, compares=False) == [(10, "no_signal")]
    assert told([equal | {"data/rows": 1.0}] * 10, compares=False) == []


@pytest.mark.parametrize(("make", "compares"), [(grpo, True), (ppo, False)])
def test_the_graph_says_whether_groups_are_compared(make: Any, compares: bool) -> None:
    plan = planned(make("tiny", "train.parquet", zero))
    assert watch_silent_failures(plan, Path("samples"), EventStream())._compares_groups is compares


def test_the_log_and_the_sinks_hear_of_it(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    sink = Mock(spec=["open", "write", "warn", "close"])
    view = View("tensorboard", sink)
    view.open(RunFolder.open_remote(tmp_path), {})
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
    warned = [call.args[:2] for call in sink.warn.call_args_list]
    assert warned == [(10, "no_signal"), (20, "no_signal")]


# width


@pytest.mark.parametrize(
    ("columns", "width"), [("60", 60), ("300", 120), ("5", 40), ("0", 120), ("x", 120)]
)
def test_the_width_is_that_of_the_environment_then_of_the_terminal(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen_width(120, io.StringIO()) == 120
    assert screen_width(120, _TerminalOf60()) == 120  # it has no file, so no size
    monkeypatch.setenv("COLUMNS", columns)
    assert screen_width(120, io.StringIO()) == width


_WORDS = st.text("ab  -", max_size=12)


@given(st.lists(_WORDS, max_size=12).map(" ".join), st.integers(40, 80))
def test_folding_keeps_every_word_and_fits(text: str, width: int) -> None:
    lines = fold_lines(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= width for line in lines)


@given(st.lists(st.text("ab", min_size=1, max_size=30), min_size=1), st.integers(40, 80))
def test_packing_breaks_no_part_and_fills_its_lines(parts: list[str], width: int) -> None:
    lines = list(pack_parts(parts, width, indent="  "))
    assert [part for line in lines for part in line.strip().split("  ")] == parts
    assert all(len(line) <= width for line in lines)
    assert all(len(a) + len(b.strip().split("  ")[0]) + 2 > width for a, b in pairwise(lines))
