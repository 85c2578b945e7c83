"""What real runs tell of what flowed through them, and that they name a planted bottleneck."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from engine.api import Result, resume
from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.records import Began, Flow
from engine.keep.flow.segments import read_live, read_steps
from engine.watch.waits import sentences
from tests.kit.run_graphs import small, vowels
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def flows(result: Result) -> list[Flow]:
    records = read_steps(result.folder / "events")
    return [record for record in records if isinstance(record, Flow)]


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_a_run_tells_what_flowed_and_shows_the_newest_rows(tiny: TinyRuns, workers: str) -> None:
    result = tiny.run(small, 3, workers=workers)
    found = flows(result)
    assert [flow.step for flow in found] == [1, 2, 3]
    whole, plan = sum_flows(found), json.loads((result.folder / "plan.json").read_text())
    nodes = {name.partition("@")[0]: each for name, each in whole.nodes.items()}
    rows = {name: each.rows for name, each in nodes.items()}
    assert rows == {
        "prompts": 12,
        "rollout": 48,
        "score": 48,
        "advantage": 48,
        "train_policy": 48,
    }
    assert nodes["rollout"].tokens == nodes["train_policy"].tokens > 0
    assert nodes["train_policy"].version == 3
    planned = {f"{edge['producer']}->{edge['consumer']}" for edge in plan["edges"]}
    assert {name for name, edge in whole.edges.items() if edge.rows and edge.bytes} == planned
    assert not any(edge.waiting_rows for edge in whole.edges.values())
    (weights,) = (e for name, e in whole.weights.items() if name.startswith("policy->rollout@"))
    # Nobody waits for a load on the spot, and so not for the last one.
    expected = (3, 2, 3) if workers == "one" else (3, 3, 4)
    assert (weights.offered, weights.loaded, weights.loads) == expected
    assert bool(weights.bytes) == (workers == "apart")
    for worker in whole.workers.values():
        assert 0 < worker.memory <= worker.peak * 1.05
        assert 0 < worker.before <= worker.peak * 1.05
    (cut,) = whole.cuts.values()
    assert (cut.wanted, cut.room, cut.lags) == (4, 4, [48])
    newest = result.folder / "events" / "newest"
    assert {path.stem for path in newest.iterdir()} == rows.keys() - {"train_policy"}
    table = pa.ipc.open_file((newest / "rollout.arrow").read_bytes()).read_all()
    assert table.num_rows == 16
    assert {"completion", "completion_ids", "version"} <= set(table.column_names)


@pytest.mark.long
def test_a_resume_tells_no_step_twice(tiny: TinyRuns) -> None:
    first = tiny.run(small, 3, checkpoint_every=2)
    events = first.folder / "events"
    with open(events / "steps-000001.seg", "ab") as file:  # as a kill leaves it
        file.write(b"\x40\x00\x00\x00torn")
    (first.folder / "checkpoints" / "step_3").rename(tiny.runs / "step_3")
    second = resume(first.folder, steps=4, progress=False)
    assert [flow.step for flow in flows(second)] == [1, 2, 3, 4]
    begun = [r.step for r in read_steps(events) if isinstance(r, Began)]
    assert begun == [0, 2]


def looks(completions: Sequence[str], **columns: object) -> list[float]:
    """Computes until whoever looks at the run's folder can see that it does."""
    deadline = time.monotonic() + 60.0
    (folder,) = Path.cwd().glob("runs/*")
    while not any(each.workers["main"].doing == "score" for each in read_live(folder / "events")):
        if time.monotonic() > deadline:
            raise RuntimeError("nobody sees that it computes")
    return vowels(completions=completions)


def test_a_run_in_one_process_tells_what_it_computes(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it does: the loop itself stands still in the kernel."""
    monkeypatch.chdir(tiny.runs.parent)
    result = tiny.run(small(tiny.folder, looks), 1, workers="one")
    assert result.step == 1


def slow(completions: Sequence[str], **columns: object) -> list[float]:
    """Takes longer than all else of a Step."""
    time.sleep(0.02 * len(completions))
    return vowels(completions=completions)


@pytest.mark.long
def test_a_slow_reward_is_named_also_in_the_last_seconds(tiny: TinyRuns) -> None:
    result = tiny.run(small(tiny.folder, slow), 4)
    plan = json.loads((result.folder / "plan.json").read_text())
    # in the first Step everything is made
    first, *_ = sentences(sum_flows(flows(result)[1:]), plan)
    assert first.startswith("train_policy waits ")
    assert first.endswith(" % for score")
    live = read_live(result.folder / "events")
    assert sum(each.nodes["score@main"].busy for each in live) > 0
