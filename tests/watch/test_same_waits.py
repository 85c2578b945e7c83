"""The page, `top` and the report say the same of who waits for whom, live and afterwards."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.keep.flow.records import Flow, ReplicaFlow, WorkerFlow
from engine.keep.flow.segments import LiveSegments
from engine.watch.report import make_report
from engine.watch.run_questions import ServedRuns
from engine.watch.top.run_view import RunReader
from tests.kit.watched import SMALL, plan_of, watched_run, write_flows

BEGAN = 1e9
FINISHED = {"state": "finished", "reason": "all steps are done"}


def stretch(number: int, *, step: int, phase: int = 0, trainer_bound: bool) -> Flow:
    """One second, in which score alone works, or the trainer alone."""
    busy = ReplicaFlow(busy=1.0)
    waits = {"score": 1.0} if not trainer_bound else {"train_policy": 1.0}
    starved = ReplicaFlow(for_rows=1.0, blames=waits)
    full = ReplicaFlow(for_room=1.0, blames=waits)
    return Flow(
        step=step,
        phase=phase,
        start=float(number),
        end=number + 1.0,
        wall=BEGAN + number,
        nodes={
            "rollout@gen": full,
            "score@data": full if trainer_bound else busy,
            "train_policy@train": busy if trainer_bound else starved,
        },
    )


def moved(*, phases: bool = False) -> Iterator[Flow]:
    """Twenty seconds in which the reward bounds the run, then twenty in which the trainer does."""
    for second in range(40):
        late = second >= 20
        phase = 1 + late if phases else 0
        yield stretch(second, step=second + 1, phase=phase, trainer_bound=late)


def run_of(folder: Path, flows: list[Flow], **more: object) -> Path:
    run = watched_run(folder / "moved", steps=len(flows), samples=0, events=False, **more)
    write_flows(run / "events", iter(flows))
    live = LiveSegments(run / "events")
    for each in flows:
        live.write(each)
    live.close()
    return run


def first_sentences(run: Path) -> dict[str, str]:
    """By who says it."""
    runs = ServedRuns(run.parent)
    seen = RunReader(run).look()
    words = html.unescape(make_report(runs, run.name, now=0.0))
    found = {
        "answer": runs.flow(run.name, None, None)["sentences"][0],
        "top": seen.waits[0],
        "report": re.findall(r"<li>([^<]* waits [^<]*)</li>", words)[0],
    }
    if seen.run.state == "running":
        found["stream"] = runs.watcher(run.name).look()["flow"]["sentences"][0]
    return found


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.keep.reader.run_state.is_held", lambda path: True)


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (1, "train_policy waits 100 % for score"),
        (20, "train_policy waits 100 % for score"),
        (27, "rollout waits 70 % for train_policy (no room for more prompts)"),
        (40, "rollout waits 100 % for train_policy (no room for more prompts)"),
    ],
)
def test_live_all_say_what_bounds_the_last_seconds(
    seconds: int, sentence: str, running: None, tmp_path: Path
) -> None:
    found = first_sentences(run_of(tmp_path, list(moved())[:seconds]))
    assert set(found.values()) == {sentence}, found
    assert set(found) == {"answer", "top", "report", "stream"}


def test_live_the_page_and_top_say_what_computes_for_long(running: None, tmp_path: Path) -> None:
    """Afterwards it is over, whatever the last record says."""
    does = {"data": WorkerFlow(doing="score", doing_for=25.4)}
    flows = [replace(each, workers=does) for each in list(moved())[:20]]
    run, words = run_of(tmp_path, flows), "score has computed for 25 s"
    runs = ServedRuns(tmp_path)
    assert runs.flow("moved", None, None)["sentences"][1] == words
    assert runs.watcher("moved").look()["flow"]["sentences"][1] == words
    assert RunReader(run).look().waits[1] == words
    (run / "ended.json").write_text(json.dumps(FINISHED))
    assert words not in RunReader(run).look().waits
    assert words not in runs.flow("moved", None, None)["sentences"]


def test_a_running_runs_report_names_both_stretches(running: None, tmp_path: Path) -> None:
    words = make_report(ServedRuns(tmp_path), run_of(tmp_path, list(moved())).name, now=0.0)
    assert "In the last 10 s:" in words
    assert "In Steps 1 to 40:" in words


def test_afterwards_all_say_what_bounded_the_whole_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, list(moved()), ended=FINISHED)
    found = first_sentences(run)
    assert set(found.values()) == {"train_policy waits 50 % for score"}, found
    assert RunReader(run).look().stretch == "Steps 1 to 40"
    assert ServedRuns(tmp_path).flow("moved", None, None)["words"] == "all 40 Steps"


def test_of_a_program_all_speak_of_its_last_phase(tmp_path: Path) -> None:
    """And the page of the phase of the Steps that are selected, by that phase's plan."""
    before = plan_of({"score": "host", "train_policy": "train"}, {"score": ["data"], **WORKERS})
    run = run_of(tmp_path, list(moved(phases=True)), ended=FINISHED)
    (run / "plan.json").write_text(json.dumps({"program": "both", "phases": [before, SMALL]}))
    rows = [{"step": step, "phase": 1 + (step > 20)} for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = first_sentences(run)
    bound = "rollout waits 100 % for train_policy (no room for more prompts)"
    assert set(found.values()) == {bound}, found
    assert RunReader(run).look().stretch == "Steps 21 to 40"
    early = ServedRuns(tmp_path).flow("moved", 1, 10)
    assert early["sentences"] == ["train_policy waits 100 % for score"]
    assert early["words"] == "Steps 1 to 10 of phase 1"


WORKERS = {"train_policy": ["train"]}


def test_a_second_that_comes_again_counts_once(tmp_path: Path, running: None) -> None:
    """The stream reads a file from its beginning again when another has taken its place."""
    flows = [replace(f, wall=BEGAN + 61.0 * i) for i, f in enumerate(list(moved())[:4])]
    run = run_of(tmp_path, flows[:2])
    watcher = ServedRuns(tmp_path).watcher(run.name)
    assert watcher.look()["flow"]["words"] == "the last 1 s"
    live = LiveSegments(run / "events")
    for each in flows[2:]:
        live.write(each)
        assert watcher.look()["flow"]["flow"]["wall"] == each.wall
        assert watcher.look()["flow"]["words"] == "the last 1 s"
    live.close()
