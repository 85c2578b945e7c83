"""What a run is told of the phase of a Program that it is in."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import CheckpointError
from dataflow.graph import Phase, Threshold
from dataflow.program import Program
from engine.api import plan
from engine.keep.checkpoint.provenance import Provenance, differences, provenance
from engine.keep.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SampleWriter, read_samples
from engine.plan.options import RunOptions
from engine.protocol.events import StepEnded
from engine.protocol.messages import StopRequested
from engine.run.loop.early_end import EarlyEnd
from engine.run.loop.run_requests import RunRequests
from engine.run.loop.signals import StopSignals
from engine.session.phases import Standing, find_place
from engine.session.progress import Progress
from graphs.sft import sft
from tests.kit.files import save_jsonl
from tests.kit.plans import save_tiny_header
from tests.unit.test_samples import table_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model's header and data, and the current one."""
    save_tiny_header(tmp_path)
    save_jsonl(tmp_path / "demos.jsonl", *[{"prompt": "2", "completion": "3"}] * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def two(first: int | None = 3, until: Threshold | None = None, lr: float = 1e-3) -> Program:
    graph = sft("tiny", "demos.jsonl", batch=4, lr=lr)
    return Program(Phase(graph, first, until=until), (graph, 4))


def fill(directory: Path) -> None:
    (directory / "file").write_text("x")


# checkpoints


def test_pinned_checkpoints_stay_beside_those_that_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, pinned=(3,))
    for step in (1, 2, 3, 4, 5):
        store.write(step, fill, {})
    assert store.steps() == [3, 5]
    store.write(6, fill, {}, timed=True)
    assert store.steps() == [3, 5, 6]
    CheckpointStore(tmp_path, keep=1).write(7, fill, {})
    assert store.steps() == [6, 7], "no longer pinned"


# what is shown and written


def test_samples_have_the_step_of_the_run_and_the_phase(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, every=3, first=10, phase=2)
    assert [step for step in range(1, 7) if writer.due(step)] == [1, 3, 6]
    writer.write(3, table_of(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000013.parquet"]
    (row, *_) = read_samples(tmp_path).select([0, 1]).to_pylist()
    assert row == {"step": 13, "phase": 2}
    writer.truncate_after(12)
    assert list(tmp_path.iterdir()) == []


def test_the_progress_line_says_the_phase_and_the_steps_up_to_its_end() -> None:
    out = io.StringIO()
    with Progress(30, title="p", phase="phase 2/2 grpo", first=10, stream=out) as progress:
        progress.update({"step": 11, "time/step": 1.0})
    assert out.getvalue() == "phase 2/2 grpo  step 11/30  s/step 1.00  eta 19s\n"


# where a phase ends

AT_TWO = Threshold("x", at_least=2.0)


def ended(early: EarlyEnd, step: int, **metrics: float) -> Any:
    early.take(StepEnded(step=step, metrics=metrics))
    return early()


def test_a_threshold_asks_for_the_end_of_its_phase_once() -> None:
    early = EarlyEnd(StopSignals(), None, AT_TWO, requests=RunRequests())
    assert ended(early, 1, x=1.0) is None
    assert ended(early, 2, x=2.0) == StopRequested(reason="reached x >= 2.0", at_once=True)
    assert early() is None


def test_the_end_of_the_run_goes_before_that_of_its_phase() -> None:
    early = EarlyEnd(StopSignals(), lambda row: row["step"] == 2, AT_TWO, requests=RunRequests())
    assert ended(early, 2, x=2.0).reason == "its condition held after step 2"
    assert ended(early, 3, x=3.0) is not None


def standing(program: Program, run: RunFolder, step: int, **meta: Any) -> Standing:
    """Where a checkpoint of this Step says that the run stands."""
    planned = plan(program, RunOptions(threads=1))
    return find_place(planned, run, StoredCheckpoint(step=step, path=run.path, meta=meta))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("step, phase, boundaries, wanted", [
    (2, 1, [], (1, (), 2)),
    (3, 1, [], (2, (3,), None)),
    (5, 2, [3], (2, (3,), 5)),
    (7, 2, [3], (2, (3,), 7)),
])  # fmt: skip
def test_a_checkpoint_says_where_its_run_stands(
    run_folder: RunFolder, step: int, phase: int, boundaries: list[int], wanted: tuple[Any, ...]
) -> None:
    found = standing(two(), run_folder, step, phase=phase, boundaries=boundaries)
    within = found.checkpoint.step if found.checkpoint else None
    assert (found.number, found.boundaries, within) == wanted


@pytest.mark.usefixtures("folder")
def test_a_checkpoint_at_a_threshold_is_the_end_of_its_phase(run_folder: RunFolder) -> None:
    program = two(30, Threshold("loss/x", at_most=0.5))
    rows = [{"step": s, "phase": 1, "loss/x": 1.0 - s / 4} for s in (1, 2)]
    save_jsonl(run_folder.metrics, *rows)
    for step, number, ended_at in ((1, 1, ()), (2, 2, (2,))):
        at = standing(program, run_folder, step, phase=1, boundaries=[])
        assert (at.number, at.boundaries) == (number, ended_at)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("meta", [
    {}, {"phase": 3, "boundaries": [1, 2]}, {"phase": 2, "boundaries": []},
    {"phase": 2, "boundaries": ["3"]}, {"phase": "2", "boundaries": [3]}, {"phase": 2},
])  # fmt: skip
def test_a_checkpoint_of_no_phase_is_refused(run_folder: RunFolder, meta: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="expected a phase of 2, and where the others ended"):
        standing(two(), run_folder, 3, **meta)


# what a run is made of


def test_the_provenance_of_a_program_is_that_of_its_phases(folder: Path) -> None:
    whole, alone = provenance(two()), provenance(two().phases[0].graph)
    assert whole.nodes["1/train_policy"] == alone.nodes["train_policy"]
    assert whole.nodes["2/train_policy"] == alone.nodes["train_policy"]
    assert whole.models["2/policy"] == alone.models["policy"]
    assert whole.trains == ("1/train_policy", "2/train_policy")
    assert whole.sources == alone.sources
    until = two(until=Threshold("x", at_least=1.0))
    lr = "train_policy: lr: 0.001 -> 0.01"
    assert changed(whole, two(4)) == ["phase 1: steps: 3 -> 4"]
    assert changed(whole, until) == ["phase 1: until: nothing -> x >= 1.0"]
    assert changed(whole, two(lr=1e-2)) == [f"node 1/{lr}", f"node 2/{lr}"]
    save_jsonl(folder / "demos.jsonl", *[{"prompt": "2", "completion": "4"}] * 8)
    data = "demonstrations: data (demos.jsonl): its content changed"
    assert changed(whole, two()) == [f"node 1/{data}", f"node 2/{data}"]


def changed(old: Provenance, program: Program) -> list[str]:
    return [str(each) for each in differences(old, provenance(program))]
