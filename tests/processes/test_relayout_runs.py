"""Runs that switch to another layout, and back, while they go on: the numbers of one that does not.

Their episodes are longer in the middle of the data, which comes in its order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import KernelError
from dataflow.graph import Graph
from dataflow.set_expressions import edited
from engine.api import Result, resume, run
from engine.plan.layout_table import RunLayout, measured_table
from engine.plan.options import write_wishes
from engine.plan.placement import Placing
from engine.plan.relayout_option import find_changes
from engine.protocol.workers import Workers
from engine.session.attempts import _Run
from graphs.agent import agent
from tests.kit.environments import Echo
from tests.kit.processes import KillWorkers
from tests.kit.runs import (
    column,
    metrics,
    require_alike,
    require_alike_weights,
    require_each_row_once,
    require_same_numbers,
    samples,
)
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300)]
LONG = pytest.mark.long

BATCH, N = 2, 4
LETTERS = (4, 4, 60, 60, 4, 4)
"""In each prompt of a Step, and in what the environment answers."""
BETWEEN = "200"
"""Live tokens, fewer than those of long episodes and more than those of short ones."""
TIMES = ["model_seconds", "environment_seconds"]
APART: dict[str, Any] = {"workers": "apart", "chunks": {"episode": 2}}


def growing(folder: Path, *, max_lag: int = 0, letters: tuple[int, ...] = LETTERS) -> Graph:
    """An agent whose episodes grow and shrink."""
    rows = folder / f"growing_{len(letters)}.parquet"
    prompts: list[str] = []
    for step, count in enumerate(letters):
        prompts += [chr(97 + step) * (count - 1) + letter for letter in "xy"]
    pq.write_table(pa.table({"prompt": prompts}), rows)
    shape = {"n": N, "batch": BATCH, "max_turns": 2, "max_tokens": 96, "max_turn_tokens": 6}
    graph = agent(str(folder / "model"), str(rows), Echo, lr=1e-3, max_lag=max_lag, **shape)
    return edited(graph, ["prompts.shuffle=False"])


def layouts_of(run: Result) -> list[int]:
    """The layout of each Step."""
    return [int(number) for number in column(run, "relayout/layout")]


def after_5(row: Mapping[str, float]) -> bool:
    """Ends a run early."""
    return row["step"] == 5


def switches_of(run: Result) -> list[tuple[int, int, int]]:
    """(the Step before, its layout, the next one's) of each switch."""
    record = json.loads((run.folder / "layouts.json").read_text())
    return [(each["step"], each["before"], each["layout"]) for each in record["switches"]]


def test_generation_on_one_two_and_one_replica_has_the_bits_of_one(tiny: TinyRuns) -> None:
    """The numbers, weights and samples; with equal chunks."""
    graph = growing(tiny.folder)
    to_two = {BETWEEN: "replicas.episode=2"}
    run = tiny.run(graph, 6, name="switching", relayout=to_two, **APART)
    assert layouts_of(run) == [0, 0, 0, 1, 1, 0]
    assert switches_of(run) == [(3, 0, 1), (5, 1, 0)]
    fixed = tiny.run(graph, 6, name="fixed", **APART)
    require_same_numbers(run, fixed)
    ours, theirs = (samples(each).drop_columns(TIMES) for each in (run, fixed))
    assert ours.equals(theirs)


@LONG
def test_training_on_one_two_and_one_tensor_rank_has_the_numbers_of_one(tiny: TinyRuns) -> None:
    graph = growing(tiny.folder)
    to_two = {BETWEEN: "tensor.train_policy=2"}
    run = tiny.run(graph, 6, name="switching", relayout=to_two, **APART)
    assert layouts_of(run) == [0, 0, 0, 1, 1, 0]
    fixed = tiny.run(graph, 6, name="fixed", **APART)
    require_alike(run, fixed, rel=1e-5)
    require_alike_weights(run, fixed)
    changes = json.loads((run.folder / "changes.json").read_text())["changes"]
    changed = [(each["step"], each["where"], each["what"], each["new"]) for each in changes]
    assert (4, "plan of train_policy", "tensor", "2") in changed
    assert (6, "plan of train_policy", "tensor", "1") in changed
    reasons = [new for _, where, _, new in changed if where == "plan of the run"]
    assert len(reasons) == 2
    assert reasons[0].startswith("1 (tensor.train_policy=2), as there were 2")
    costs = [row["step"] for row in metrics(run) if row.get("relayout/seconds", 0.0) > 0]
    assert costs == [4, 6]


@LONG
def test_deaths_in_and_after_a_switch_and_a_resume_go_on_with_its_layout(tiny: TinyRuns) -> None:
    """One that trains dies as the switch's checkpoint is due; with the second layout one that
    generates, then one that trains.
    """
    graph = growing(tiny.folder, letters=(4, 4, 60, 60, 60, 60))
    to_two = {BETWEEN: "replicas.episode=2"}
    deaths = KillWorkers({3: "train_policy", 4: "episode-1", 5: "train_policy"})
    often = {"checkpoint_every": 1, "on_step": [deaths]}
    run = tiny.run(graph, 6, name="dying", relayout=to_two, until=after_5, **often, **APART)
    assert layouts_of(run) == [0, 0, 0, 1, 1]
    resume(run.folder, steps=6)
    assert layouts_of(run) == [0, 0, 0, 1, 1, 1]
    assert len(switches_of(run)) == 1
    require_same_numbers(run, tiny.run(graph, 6, name="fixed", **APART))


@LONG
def test_with_a_lag_what_is_under_way_is_finished_first(tiny: TinyRuns) -> None:
    graph = growing(tiny.folder, max_lag=1, letters=(4, 4, 60, 60, 4, 4))
    run = tiny.run(graph, 6, relayout={BETWEEN: "replicas.episode=2"}, **APART)
    assert {0, 1} == set(layouts_of(run))
    require_each_row_once(run, 6 * BATCH, N)
    assert max(column(run, "policy/lag/max")) <= 1
    for switch in switches_of(run):
        cut = run.folder / "checkpoints" / f"step_{switch[0]}" / "cut.json"
        if cut.is_file():
            assert json.loads(cut.read_text())["sources"]["prompts"]["running"] == []


def test_a_layout_that_cannot_be_opened_is_closed_and_the_run_goes_on(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = growing(tiny.folder)
    opened = _Run._open_workers

    def open_one_replica(attempt: _Run, stack: ExitStack) -> Workers:
        if attempt._plan.node("episode").layout.replicas == 2:
            raise KernelError("episode-1: no device")
        return opened(attempt, stack)

    monkeypatch.setattr(_Run, "_open_workers", open_one_replica)
    to_two = {BETWEEN: "replicas.episode=2"}
    run = tiny.run(graph, 6, name="closing", relayout=to_two, **APART)
    assert layouts_of(run) == [0] * 6
    assert switches_of(run) == [(3, 0, 1), (3, 1, 0)]
    record = json.loads((run.folder / "layouts.json").read_text())
    assert [each["closed"] for each in record["layouts"]] == ["", "episode-1: no device"]
    changes = json.loads((run.folder / "changes.json").read_text())["changes"]
    reasons = [each["new"] for each in changes if each["where"] == "plan of the run"]
    assert reasons[1].endswith("as layout 1 cannot be opened: episode-1: no device")
    require_same_numbers(run, tiny.run(graph, 6, name="fixed", **APART))
    resume(run.folder, steps=6)


@LONG
def test_wishes_of_a_search_are_switched_to_and_resumed(tiny: TinyRuns) -> None:
    """Layouts as a search writes them, with equal chunks: the numbers of one layout."""
    graph = growing(tiny.folder, letters=(4, 4, 60, 60, 60, 60, 60))
    options = tiny.options(6, name="searched", **APART)
    layouts: list[RunLayout] = []
    for replicas in (("gen",), ("gen", "gen-1")):
        pin = {"episode": replicas, "train_policy": ("train",)}
        written = write_wishes(options, Placing(pin=pin, search="off"))
        changes = find_changes(options, written)
        layouts.append(RunLayout(text=f"{len(replicas)} replicas", changes=changes))
    table = measured_table(layouts, {100: (1e3, 2e3), 400: (2e3, 1e3)})
    switching = run(graph, options, layouts=table)
    assert layouts_of(switching) == [0, 0, 0, 1, 1, 1]
    require_same_numbers(switching, tiny.run(graph, 6, name="fixed", **APART))
    resume(switching.folder, steps=7)
    assert layouts_of(switching)[-1] == 1
