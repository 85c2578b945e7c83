"""`dataflow top`: which run is shown, its tables at any width, and the terminal.

`GOLDEN=write pytest tests/unit/test_top.py` writes the golden texts anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.cli import main
from engine.keep.flow.records import (
    CutFlow,
    EdgeFlow,
    Flow,
    ReplicaFlow,
    WeightFlow,
    WorkerFlow,
)
from engine.keep.flow.segments import LiveSegments, StepSegments
from engine.keep.reader.run_summary import RunSummary
from engine.watch.top.page import page_lines
from engine.watch.top.run_view import RunReader, SeenRun
from tests.kit.comparison import require_golden
from tests.kit.kept_runs import kept_run
from tests.kit.processes import ROOT
from tests.kit.terminals import on_terminal
from tests.kit.turns import example_count
from tests.kit.watched import write_flows

MIB = 1 << 20
PLAN = {
    "graph": "grpo",
    "nodes": [
        {"name": "prompts", "work": "source", "workers": ["data"], "estimate": {"bytes": {}}},
        {
            "name": "rollout",
            "work": "decode",
            "workers": ["gen0", "gen1"],
            "layout": {"replicas": 2},
            "estimate": {"bytes": {"weights": 40 * MIB, "kv_cache": 8 * MIB}},
        },
        {"name": "score", "work": "host", "workers": ["data"], "estimate": {"bytes": {}}},
        {
            "name": "train_policy",
            "work": "train",
            "workers": ["train"],
            "estimate": {"bytes": {"weights": 40 * MIB, "activations": 100 * MIB}},
        },
    ],
    "edges": [
        {"producer": "rollout", "consumer": "score", "route": "shm"},
        {"producer": "score", "consumer": "train_policy", "route": "zmq"},
    ],
    "sources": [{"name": "prompts", "max_lag": 1}],
    "devices": {"train": [0]},
}
ROW = {"step": 3, "reward/mean": 0.5, "time/step": 4.0, "time/rollout": 6.0, "time/score": 1.0}
ROW |= {"time/train_policy": 2.0, "worker/gen0/busy": 0.75, "policy/lag/max": 1.0}


def flow(step: int) -> Flow:
    """Four seconds in which training waits for a slow reward, and one replica is slow."""
    return Flow(
        step=step,
        start=4.0 * step,
        end=4.0 * (step + 1),
        wall=1000.0 + step,
        nodes={
            "prompts@data": ReplicaFlow(idle=4.0, rows=8),
            "rollout@gen0": ReplicaFlow(
                busy=1.0,
                for_room=3.0,
                blames={"train_policy": 3.0},
                rows=32,
                tokens=640,
                version=step,
            ),
            "rollout@gen1": ReplicaFlow(
                busy=3.0, for_weights=1.0, rows=32, tokens=640, version=step - 1
            ),
            "score@data": ReplicaFlow(busy=3.5, for_turn=0.5, rows=64),
            "train_policy@train": ReplicaFlow(
                busy=1.0,
                for_rows=3.0,
                blames={"score": 3.0},
                rows=64,
                tokens=1280,
                version=step,
                device_peak=120 * MIB,
            ),
        },
        edges={
            "rollout->score": EdgeFlow(
                rows=64, bytes=MIB, waiting_rows=12, waiting_bytes=4096, age=1.5
            ),
            "score->train_policy": EdgeFlow(rows=64, bytes=512),
        },
        weights={
            "policy->rollout@gen0": WeightFlow(
                offered=step, loaded=step, loads=1, seconds=0.25, bytes=MIB
            ),
            "policy->rollout@gen1": WeightFlow(offered=step, loaded=step - 1),
        },
        cuts={"prompts": CutFlow(ready=3, wanted=8, outstanding=16, room=16, lags=[56, 8])},
        workers={
            "gen0": WorkerFlow(memory=500 * MIB, peak=600 * MIB, outbox=MIB, doing="rollout"),
            "train": WorkerFlow(
                memory=700 * MIB, peak=800 * MIB, device=90 * MIB, device_peak=120 * MIB
            ),
        },
    )


def a_run(folder: Path, *, events: bool = True) -> Path:
    """A run folder of three Steps that no process holds."""
    kept_run(folder, rows=[ROW])
    for name, content in (("plan", PLAN), ("options", {"steps": 9}), ("graph", {})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    if events:
        write_flows(folder / "events", map(flow, (1, 2, 3)))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "first")


def text_of(seen: SeenRun, width: int = 100, *, replicas: bool = False) -> str:
    lines = [line.plain for line in page_lines(seen, width=width, replicas=replicas)]
    assert max(map(len, lines)) <= width
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "width", "replicas", "events"),
    [
        ("width_60", 60, False, True),
        ("width_100", 100, False, True),
        ("replicas", 100, True, True),
        ("no_events", 100, False, False),
    ],
)
def test_golden(name: str, width: int, replicas: bool, events: bool, tmp_path: Path) -> None:
    seen = RunReader(a_run(tmp_path / "first", events=events)).look()
    require_golden(f"top/{name}.txt", text_of(seen, width, replicas=replicas))


def test_steps_that_come_are_read_and_those_that_a_resume_cut_are_not_shown(run: Path) -> None:
    reader = RunReader(run)
    assert reader.look().stretch == "Steps 1 to 3"
    write_flows(run / "events", iter([flow(4)]))
    assert reader.look().stretch == "Steps 1 to 4"
    segments = StepSegments(run / "events")
    segments.truncate_after(2)
    segments.close()
    assert reader.look().stretch == "Steps 1 to 2"


def test_another_plan_is_read(run: Path) -> None:
    """A run writes one where it switches to another layout."""
    reader = RunReader(run)
    assert reader.look().title
    (run / "plan.json").write_text('{"graph": "of another layout"}')
    assert reader.look().title == "of another layout"


def test_while_it_runs_the_last_seconds_count(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveSegments(run / "events")
    for second in range(30):
        live.write(replace(flow(1), start=second, end=second + 1.0, wall=2000.0 + second))
    live.close()
    assert RunReader(run).look().stretch == "Steps 1 to 3"
    monkeypatch.setattr("engine.keep.reader.run_state.is_held", lambda path: True)
    seen = RunReader(run).look()
    assert seen.stretch == "the last 10 s"
    assert seen.flow.nodes["score@data"].rows == 640


def test_a_program_shows_the_phase_under_way(tmp_path: Path) -> None:
    run = a_run(tmp_path / "first", events=False)
    phases = [{**PLAN, "graph": "sft", "nodes": []}, PLAN]
    (run / "plan.json").write_text(json.dumps({"program": "both", "phases": phases}))
    (run / "metrics.jsonl").write_text(json.dumps({**ROW, "phase": 2}) + "\n")
    text = text_of(RunReader(run).look())
    assert "first  both  " in text
    assert "phase 2" in text
    assert "rollout" in text


def test_where_nothing_waits_for_long_it_is_said(run: Path) -> None:
    assert "Nothing waits" not in text_of(RunReader(run).look())
    busy = {"train_policy@train": ReplicaFlow(busy=4.0)}
    write_flows(run / "events", iter([replace(flow(4), phase=1, nodes=busy)]))
    assert "\nNothing waits for long.\n" in text_of(RunReader(run).look())


def test_a_wait_for_environments_has_a_letter_and_live_episodes_a_column(run: Path) -> None:
    assert "outside" not in text_of(RunReader(run).look())
    waits = ReplicaFlow(
        busy=1.0, for_outside=3.0, outside={"environments": 3.0}, in_flight=1200, version=1
    )
    does = WorkerFlow(doing="rollout", waits_for="environments", doing_for=40.0)
    nodes, workers = {"rollout@gen0": waits}, {"gen0": does}
    write_flows(run / "events", iter([replace(flow(4), phase=1, nodes=nodes, workers=workers)]))
    text = text_of(RunReader(run).look(), 120)
    assert "rollout waits 75 % for environments" in text
    line = next(each for each in text.splitlines() if "ooo" in each)
    assert re.search(r"25%\s+outside 75%\s+environments\s+1,200\s+1$", line), line
    assert "o outside" in text
    assert "rollout, for environments, 40" in text


@pytest.mark.parametrize("plan", ["", "[1]", "{}", '{"phases": []}'])
def test_a_damaged_plan_is_left_out(plan: str, run: Path) -> None:
    (run / "plan.json").write_text(plan)
    assert "train_policy" in text_of(RunReader(run).look())


NAMES = st.text(st.characters(codec="ascii", exclude_characters="@>-"), min_size=1, max_size=60)


@settings(max_examples=example_count(60))
@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    seconds=st.lists(st.floats(0.0, 1e6), min_size=7, max_size=7),
    count=st.integers(0, 10**12),
    width=st.integers(60, 160),
    replicas=st.booleans(),
)
def test_no_line_is_wider_than_the_screen_and_none_has_control_characters(
    names: list[str], seconds: list[float], count: int, width: int, replicas: bool
) -> None:
    waits = ("for_rows", "for_weights", "for_turn", "for_room", "for_outside")
    states = ("busy", *waits, "idle")
    times = dict(zip(states, seconds, strict=True))
    counts = {"rows": count, "tokens": count, "in_flight": count, "version": 7}
    node = ReplicaFlow(**times, **counts, blames={names[0]: 1.0}, outside={names[-1]: 1.0})
    edge = EdgeFlow(bytes=count, waiting_rows=count, waiting_bytes=count, age=seconds[0])
    found = Flow(
        step=1,
        start=0.0,
        end=sum(seconds) + 1.0,
        wall=1.0,
        nodes={f"{name}@w{i}": node for name in names for i in range(2)},
        edges={f"{name}->{names[0]}": edge for name in names},
        weights={f"m->{name}@w": WeightFlow(loads=1, bytes=count) for name in names},
        cuts={name: CutFlow(ready=count, lags=[count, count]) for name in names},
        workers={name: WorkerFlow(memory=count, peak=count, doing=name) for name in names},
    )
    ended = RunSummary(name=names[0], path="x", state="running", reason=names[-1] * 9)
    row = {f"reward/{name}/mean": 0.5 for name in names} | {"reward/mean": 0.5}
    seen = SeenRun(run=ended, title=names[0], row=row, flow=found, stretch="Step 1", waits=names)
    for line in page_lines(seen, width=width, replicas=replicas):
        assert len(line) <= width
        assert line.plain.isprintable() or not line.plain


def once(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["top", "--once", *words]) == 0
    return capsys.readouterr().out


def test_the_run_that_is_named_or_was_written_last_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "first")
    second = a_run(tmp_path / "second")
    root = ("--root", str(tmp_path))
    assert once(capsys, "first", *root).startswith("first  grpo")
    assert once(capsys, str(second)).startswith("second  grpo")
    (second / "metrics.jsonl").touch()
    assert once(capsys, *root).startswith("second  grpo")
    assert main(["top", "thrid", *root]) == 2
    assert "no run 'thrid'" in capsys.readouterr().err
    assert main(["top", "--root", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.long
def test_a_terminal_shows_it_until_q(run: Path) -> None:
    call = f"from engine.cli import main; raise SystemExit(main(['top', {str(run)!r}]))"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {call}"
    written = on_terminal(code, columns=100, rows=60, typed="rq")
    # The last one: the screen of before comes back.
    for part in ("rollout x2", "rollout@gen1", "\x1b[?1049l"):
        assert part in written
    plain = on_terminal(code, columns=60, rows=20, typed="q", env={"NO_COLOR": "1"})
    assert "more lines" in plain
    assert "\x1b[32m" not in plain
