"""The contract of every Sink: what is written can be read back, and closing is safe.

Wandb gets a small recording `wandb` module: that sink only shows another service's client.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.keep.metrics.sinks import JsonLines, Sink, TensorBoard, Wandb
from engine.keep.run_folder import RunFolder

Rows = dict[int, dict[str, float]]


class RecordingWandb(ModuleType):
    """What the sink uses of wandb: one run per id, and its logged rows."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.inits: list[dict[str, Any]] = []
        self.alerts: list[tuple[str, str]] = []
        self.finished = 0

    def init(self, **settings: Any) -> RecordingRun:
        self.inits.append(settings)
        return RecordingRun(self, settings["id"])


@dataclass
class RecordingRun:
    wandb: RecordingWandb
    id: str

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert (name, step_metric) in {("step", None), ("*", "step")}

    def log(self, row: Mapping[str, float]) -> None:
        self.wandb.rows.setdefault(self.id, []).append(dict(row))

    def alert(self, title: str, text: str) -> None:
        self.wandb.alerts.append((title, text))

    def finish(self) -> None:
        self.wandb.finished += 1


def _from_json_lines(run: RunFolder) -> Rows:
    rows = [
        json.loads(line, parse_constant=_refuse) for line in run.metrics.read_text().splitlines()
    ]
    return {row.pop("step"): row for row in rows}


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not strict JSON")


def _from_tensorboard(run: RunFolder) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    rows: Rows = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            row = rows.setdefault(scalar.step, {})
            assert name not in row, "the Step is shown twice"
            row[name] = scalar.value
    return rows


def _from_wandb(run: RunFolder) -> Rows:
    wandb = sys.modules["wandb"]
    assert isinstance(wandb, RecordingWandb)
    (rows,) = wandb.rows.values()  # one id, also after a resume
    return {int(row["step"]): {k: v for k, v in row.items() if k != "step"} for row in rows}


Make = Callable[[], Sink]
READ: dict[Make, Callable[[RunFolder], Rows]] = {
    JsonLines: _from_json_lines,
    TensorBoard: _from_tensorboard,
    Wandb: _from_wandb,
}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> RecordingWandb:
    recording = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", recording)
    return recording


@pytest.fixture(params=READ)
def sink(request: pytest.FixtureRequest, wandb: RecordingWandb) -> Make:
    return request.param


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create("contract", tmp_path) as folder:
        yield folder


def _write(sink: Make, run: RunFolder, steps: range, offset: float = 0.0) -> None:
    opened = sink()
    opened.open(run, {"lr": 1e-6, "reward": len})
    for step in steps:
        opened.write(step, {"step": step, "reward/mean": step / 4 + offset, "policy/lag/max": 1})
    opened.close()


def test_what_is_written_is_read_back(sink: Make, run: RunFolder) -> None:
    _write(sink, run, range(1, 5))
    rows = {step: {"reward/mean": step / 4, "policy/lag/max": 1} for step in range(1, 5)}
    assert READ[sink](run) == rows


def test_a_reopened_sink_goes_on(sink: Make, run: RunFolder) -> None:
    _write(sink, run, range(1, 3))
    _write(sink, run, range(3, 5))
    assert [*READ[sink](run)] == [1, 2, 3, 4]


def test_steps_that_are_repeated_by_a_resume_replace_the_old(sink: Make, run: RunFolder) -> None:
    _write(sink, run, range(1, 5))
    if sink is JsonLines:
        lines = JsonLines()
        lines.open(run, {})
        lines.truncate_after(2)
        lines.close()
    _write(sink, run, range(3, 5), offset=10.0)
    found = {step: row["reward/mean"] for step, row in READ[sink](run).items()}
    assert found == {1: 0.25, 2: 0.5, 3: 10.75, 4: 11.0}


def test_numbers_that_are_not_finite_are_no_error(sink: Make, run: RunFolder) -> None:
    opened = sink()
    opened.open(run, {})
    opened.write(1, {"policy/entropy": math.nan, "optim/grad_norm": math.inf, "reward/mean": 0.5})
    opened.close()
    row = READ[sink](run)[1]
    assert row["reward/mean"] == 0.5
    assert row["policy/entropy"] is None or math.isnan(row["policy/entropy"])


def test_close_may_come_twice_and_without_a_write(sink: Make, run: RunFolder) -> None:
    opened = sink()
    opened.close()
    opened.open(run, {})
    opened.close()
    opened.close()
    assert not opened.__dict__.get("_file")


def test_a_write_before_open_is_refused(sink: Make) -> None:
    with pytest.raises(AssertionError, match="not open"):
        sink().write(1, {"reward/mean": 1.0})


@pytest.mark.parametrize(("kind", "name"), [(Wandb, "wandb"), (TensorBoard, "tensorboard")])
def test_a_library_that_is_missing_is_named(
    kind: Callable[[], Sink], name: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(RunError, match=rf'pip install "dataflow-rl\[{name}\]"'):
        kind().open(run, {})


def test_wandb_is_told_what_to_resume(run: RunFolder, wandb: RecordingWandb) -> None:
    for _ in range(2):
        wandb_sink = Wandb("digits", mode="offline")
        wandb_sink.open(run, {"lr": 0.1})
        wandb_sink.close()
    first, second = wandb.inits
    assert first == second
    expected = {"project": "digits", "mode": "offline", "resume": "allow", "name": "contract"}
    assert first.items() >= expected.items()
    assert first["config"] == {"lr": 0.1}
    assert wandb.finished == 2


def test_a_warning_is_an_alert_at_wandb_and_a_text_in_tensorboard(
    run: RunFolder, wandb: RecordingWandb
) -> None:
    for sink in (Wandb(), TensorBoard()):
        sink.open(run, {})
        sink.warn(10, "no_signal", "all rewards were equal")
        sink.close()
    assert wandb.alerts == [("no_signal", "step 10: all rewards were equal")]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (text,) = EventAccumulator(str(run.path / "tensorboard")).Reload().Tensors("warning/no_signal")
    assert text.step == 10
    assert b"all rewards were equal" in text.tensor_proto.string_val[0]
