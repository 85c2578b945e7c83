"""Traces of real runs, opened in Perfetto's own trace processor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from engine.keep.trace.timeline import read_trace
from engine.simulation.timeline import write_timeline
from tests.kit import run_graphs as graphs
from tests.kit.perfetto import opened
from tests.kit.plans import save_tiny_header
from tests.kit.simulated import two_steps
from tests.kit.tiny_runs import TinyRuns
from tests.kit.traces import sound_arrows

STEPS = 2

FLOWS = """
    select source.name || ' -> ' || target.name as arrow,
           source.ts + source.dur as made, target.ts as taken
    from flow
    join slice source on source.id = flow.slice_out
    join slice target on target.id = flow.slice_in
"""
WRONG = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
CHUNKS = """
    select track.name as node, extract_arg(arg_set_id, 'args.chunk') as chunk,
           extract_arg(arg_set_id, 'args.rows') as rows,
           extract_arg(arg_set_id, 'args.versions.policy') as version
    from slice join thread_track track on track.id = slice.track_id
    where slice.name = 'rollout'
"""


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_perfetto_finds_spans_and_arrows(browser: Browser, tiny: TinyRuns, workers: str) -> None:
    """Of GRPO: rows from node to node, versions from training to generation."""
    (path,) = (tiny.run(graphs.small, STEPS, workers=workers).folder / "trace").iterdir()
    arrows = sound_arrows(read_trace(path))
    with opened(browser, path) as trace:
        assert trace.query(WRONG) == []
        found = trace.query(FLOWS)
        names = Counter(row["name"] for row in trace.query("select name from slice"))
        chunks = trace.query(CHUNKS)
    assert len(found) == len(arrows)
    assert all(row["made"] <= row["taken"] for row in found)
    assert Counter(row["arrow"] for row in found) == Counter(
        f"{arrow.source['name']} -> {arrow.target['name']}" for arrow in arrows
    )
    wanted = (
        "prompts -> rollout",
        "rollout -> score",
        "score -> advantage",
        "rollout -> train_policy",
    )
    versions = "train_policy -> load policy", "load policy -> rollout"
    assert {*wanted, *versions} <= {row["arrow"] for row in found}
    assert names["train_policy"] == STEPS
    made = [row for row in chunks if row["rows"]]
    assert sum(row["rows"] for row in made) == 32
    assert {row["version"] for row in made} == {0, 1}


def test_perfetto_reads_what_a_kill_left(browser: Browser, tiny: TinyRuns, tmp_path: Path) -> None:
    (path,) = (tiny.run(graphs.small, STEPS).folder / "trace").iterdir()
    whole = path.read_bytes()
    torn = tmp_path / "torn.json"
    torn.write_bytes(whole[: whole.rindex(b"\n]")])
    with opened(browser, torn) as trace:
        assert trace.query(WRONG) == []
        assert len(trace.query("select * from flow")) == len(sound_arrows(read_trace(path)))


def test_perfetto_opens_the_timeline_of_a_simulated_run(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = two_steps()
    write_timeline(tmp_path / "timeline.json", found)
    with opened(browser, tmp_path / "timeline.json") as trace:
        assert trace.query(WRONG) == []
        slices = trace.query(
            "select slice.name as name, thread.name as worker, slice.depth as depth"
            " from slice join thread_track on thread_track.id = slice.track_id"
            " join thread using (utid)"
        )
    assert {row["worker"] for row in slices} == {"steps", *found.plan.workers}
    names = Counter(row["name"] for row in slices)
    assert (names["rollout"], names["load rollout"], names["fetch"]) == (4, 2, 2)
    assert {row["depth"] for row in slices if row["name"] == "fetch"} == {1}, "within its span"
