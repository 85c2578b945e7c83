"""Fetches that run ahead, in processes: what the trace shows of them, and who dies meanwhile."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Keys
from dataflow.set_expressions import edited
from engine.keep.trace.timeline import read_trace
from engine.protocol import messages as m
from engine.protocol.refs import Ref
from engine.run.worker.timing import FETCH
from tests.kit import host_plans
from tests.kit.processes import KillWorkers, await_stopped
from tests.kit.run_graphs import small
from tests.kit.runs import column, require_each_row_once
from tests.kit.supervisors import Start
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)
SOON = 20.0


def ahead_of(ref: Ref) -> m.FetchAhead:
    """A whole block of the source, for the operator's next Step."""
    inputs = {"prompt": (host_plans.gathered(ref),)}
    keys = {"rows": Keys.of(ref.keys.position)}
    return m.FetchAhead(node="doubled", worker="host", step=1, keys=keys, inputs=inputs)


def ended(supervisor: Any, task: int) -> list[Any]:
    """The events up to the end of a task."""
    events = host_plans.until(supervisor, m.ChunkDone, m.FetchFailed)
    assert events[-1].id == task
    return events


def lost(supervisor: Any, worker: str) -> None:
    """Kill a Worker, and begin it again."""
    os.kill(supervisor.pids()[worker], signal.SIGKILL)
    assert supervisor._io.children[worker].over.wait(SOON)
    assert host_plans.until(supervisor, m.WorkerLost)[-1].worker == worker
    supervisor.respawn([worker])
    host_plans.until(supervisor, m.WorkerOpened)


def test_rows_that_were_fetched_ahead_outlive_the_worker_that_made_them(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        ref = host_plans.produced_block(supervisor)
        supervisor.tell(ahead_of(ref))
        supervisor.tell(host_plans.chunk_of(2, ref))
        assert isinstance(ended(supervisor, 2)[-1], m.ChunkDone)
        lost(supervisor, "source")
        supervisor.tell(host_plans.chunk_of(3, ref))
        end = ended(supervisor, 3)[-1]
        assert isinstance(end, m.ChunkDone), "they are here still: no later Step has its rows"


@pytest.mark.parametrize("dies", ["source", "host"])
def test_a_death_within_a_fetch_ahead_costs_only_its_rows(start: Start, dies: str) -> None:
    with start(host_plans.plan()) as supervisor:
        ref = host_plans.produced_block(supervisor)
        os.kill(supervisor.pids()["source"], signal.SIGSTOP)
        await_stopped(supervisor.pids()["source"])
        supervisor.tell(ahead_of(ref))  # it is never answered
        lost(supervisor, dies)
        if dies == "host":
            os.kill(supervisor.pids()["source"], signal.SIGCONT)
        supervisor.tell(host_plans.chunk_of(2, ref))
        end = ended(supervisor, 2)[-1]
        assert isinstance(end, m.FetchFailed if dies == "source" else m.ChunkDone)
        new = host_plans.produced_block(supervisor, 3)
        supervisor.tell(ahead_of(new))
        supervisor.tell(host_plans.chunk_of(4, new))
        assert isinstance(ended(supervisor, 4)[-1], m.ChunkDone)


def lanes(folder: Path) -> dict[str, list[Any]]:
    """The spans of a run's first trace by their lane, `gen/rollout`."""
    events = read_trace(sorted((folder / "trace").iterdir())[0])
    names: dict[Any, str] = {}
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    spans: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lane = f"{names[event['pid']]}/{names[event['pid'], event['tid']]}"
            spans[lane].append(event)
    return spans


@pytest.mark.parametrize("on_update", ["interrupt", "drain"])
def test_a_trace_shows_fetches_beside_the_kernels_and_none_within_them(
    tiny: TinyRuns, on_update: str
) -> None:
    graph = edited(small(tiny.folder, max_lag=1), [f"rollout.on_update={on_update}"])
    result = tiny.run(graph, 6, workers="auto")
    spans = lanes(result.folder)
    loads = [each for each in spans["rollout/rollout"] if each["name"] == "load policy"]
    fetches = {each["args"]["version"]: each for each in spans["rollout/fetches weights"]}
    assert {each["args"]["version"] for each in loads} <= fetches.keys()
    for each in loads:
        fetch = fetches[each["args"]["version"]]
        # Between the two the thread hands it over: the load has no part of the fetch.
        assert fetch["ts"] + fetch["dur"] <= each["ts"] + each["dur"]
    ahead = [each["name"] for each in spans["train/fetches rows"]]
    assert ahead
    assert set(ahead) == {"fetch for train_policy"}
    assert sum(column(result, "edge/ahead/bytes")) > 0
    waits = [each for each in spans["train/train_policy"] if each["name"] == FETCH]
    assert len(waits) < len(spans["train/train_policy"])


@pytest.mark.long
@pytest.mark.parametrize("on_update", ["interrupt", "drain"])
def test_a_run_goes_on_exactly_whoever_is_killed_as_weights_are_fetched(
    tiny: TinyRuns, on_update: str
) -> None:
    """A Step's end is when its version is told to all."""
    deaths = KillWorkers({2: "rollout-0", 4: "rollout-1", 5: "data"})
    graph = edited(small(tiny.folder, max_lag=1), [f"rollout.on_update={on_update}"])
    result = tiny.run(graph, 7, workers="auto", replicas={"rollout": 2}, on_step=[deaths])
    assert len(deaths.killed) == 3
    require_each_row_once(result, 28, 4)
    assert max(column(result, "policy/lag/max")) <= 1


@pytest.mark.long
def test_each_rank_fetches_its_own_share_ahead(tiny: TinyRuns) -> None:
    graph = small(tiny.folder, max_lag=1)
    result = tiny.run(graph, 6, workers="auto", ranks={"train_policy": 2})
    require_each_row_once(result, 24, 4)
    assert sum(column(result, "edge/ahead/bytes")) > 0
    ahead = {lane: spans for lane, spans in lanes(result.folder).items() if "fetches rows" in lane}
    assert len(ahead) == 2
