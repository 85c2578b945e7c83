"""What real runs tell of what flowed through them, and that they name a planted bottleneck."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from engine.api import Result, resume
from engine.observe.flow.records import Began, Flow
from engine.observe.flow.segments import read_live, read_steps
from engine.observe.flow.waits import sentences, total
from engine.top.page import page
from engine.top.seen import RunReader
from engine.watch.served import ServedRuns
from tests.kit.run_graphs import small, vowels
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


def flows(result: Result) -> list[Flow]:
    records = read_steps(result.folder / "events")
    return [record for record in records if isinstance(record, Flow)]


def waits(result: Result) -> list[str]:
    """The sentences of a run without its first Step, in which everything is made; the page has the
    same, and `top` has those of all Steps.
    """
    folder = result.folder
    plan = json.loads((folder / "plan.json").read_text())
    every = flows(result)
    found = sentences(total(every[1:]), plan)
    assert ServedRuns(folder.parent).flow(folder.name, 2, None)["sentences"] == found
    shown = "\n".join(line.plain for line in page(RunReader(folder).look(), width=200))
    assert sentences(total(every), plan)[0] in shown
    return found


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_a_run_tells_what_flowed(tiny: TinyRuns, workers: str) -> None:
    result = tiny.run(small, 3, workers=workers)
    found = flows(result)
    assert [flow.step for flow in found] == [1, 2, 3]
    whole, plan = total(found), json.loads((result.folder / "plan.json").read_text())
    by_node = {name.partition("@")[0]: each for name, each in whole.nodes.items()}
    assert {name: each.rows for name, each in by_node.items()} == {
        "prompts": 12,
        "rollout": 48,
        "score": 48,
        "advantage": 48,
        "train_policy": 48,
    }
    assert by_node["rollout"].tokens == by_node["train_policy"].tokens > 0
    assert by_node["train_policy"].version == 3
    planned = {f"{edge['producer']}->{edge['consumer']}" for edge in plan["edges"]}
    assert {name for name, edge in whole.edges.items() if edge.rows and edge.bytes} == planned
    assert not any(edge.waiting_rows for edge in whole.edges.values())
    (weights,) = (e for name, e in whole.weights.items() if name.startswith("policy->rollout@"))
    assert (weights.offered, weights.loaded, weights.loads) == (3, 3, 4)
    assert bool(weights.bytes) == (workers == "apart")
    assert all(0 < worker.memory <= worker.peak * 1.05 for worker in whole.workers.values())
    assert all(0 < worker.before <= worker.peak * 1.05 for worker in whole.workers.values())
    (cut,) = whole.cuts.values()
    assert (cut.wanted, cut.room, cut.lags) == (4, 4, [48])


def test_the_newest_rows_can_be_looked_at(tiny: TinyRuns) -> None:
    result = tiny.run(small, 1)
    newest = result.folder / "events" / "newest"
    assert {path.stem for path in newest.iterdir()} == {"prompts", "rollout", "score", "advantage"}
    with pa.OSFile(str(newest / "rollout.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.num_rows == 16
    assert table.column_names[:3] == ["position", "sample", "attempt"]
    assert {"completion", "completion_ids", "version"} <= set(table.column_names)


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


def slow(completions: Sequence[str], **columns: object) -> list[float]:
    """Takes longer than all else of a Step."""
    time.sleep(0.02 * len(completions))
    return vowels(completions=completions)


def slow_in_one_process(
    completions: Sequence[str], *, marker: str, **columns: object
) -> list[float]:
    """Slow in the first process that comes here, and in no other."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        Path(marker).write_text(str(os.getpid()))
    except FileExistsError:
        pass
    time.sleep((0.1 if Path(marker).read_text() == str(os.getpid()) else 0.01) * len(completions))
    return vowels(completions=completions)


def test_a_slow_reward_is_named(tiny: TinyRuns) -> None:
    first, *_ = waits(tiny.run(small(tiny.folder, slow), 4))
    assert first.startswith("train_policy waits ")
    assert first.endswith(" % for score")


def test_a_starved_trainer_is_named(tiny: TinyRuns) -> None:
    from graphs.grpo import grpo

    base, data = str(tiny.folder / "model"), str(tiny.folder / "train.parquet")
    graph = grpo(base, data, vowels, n=2, batch=4, max_tokens=200, max_lag=1)
    first, *_ = waits(tiny.run(graph, 5, workers="auto"))
    assert first.startswith("train_policy waits ")
    assert first.endswith(" % for rollout")


def test_a_slow_replica_is_named(tiny: TinyRuns, tmp_path: Path) -> None:
    fn = functools.partial(slow_in_one_process, marker=str(tmp_path / "marker"))
    graph = small(tiny.folder, fn, batch=6)
    first, second, *_ = waits(tiny.run(graph, 4, workers="auto", replicas={"score": 3}))
    assert first.startswith("train_policy waits ")
    assert " % for score@" in first
    slowest = first.partition(" for ")[2]
    assert second.startswith(f"{slowest} is ")
    assert second.endswith(" times slower than the other replicas of score")


def test_the_last_seconds_are_there(tiny: TinyRuns) -> None:
    result = tiny.run(small(tiny.folder, slow), 4)
    live = read_live(result.folder / "events")
    assert live
    assert sum(each.nodes["score@main"].busy for each in live) > 0
