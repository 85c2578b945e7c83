"""`--relayout auto`: layouts that a search finds, as options of the run, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.check import check
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.program import Program
from engine.keep.layouts_file import LAYOUTS, encode_layouts
from engine.keep.run_folder import RunFolder
from engine.plan.cluster import Cluster, Host
from engine.plan.explain import explain
from engine.plan.layout_table import RunLayout, measured_table
from engine.plan.memory_margins import RunMemory
from engine.plan.options import AUTO, RunOptions, make_placing, write_wishes
from engine.plan.plan import Plan
from engine.plan.planner import choose_plan, make_plan
from engine.session.layouts import plan_resumed, plan_run
from engine.session.planning import plan
from tests.kit.graphs import grpo_graph, small_ppo
from tests.kit.plans import headers

pytestmark = pytest.mark.usefixtures("tiny")
GIB = 2**30
GPUS = (80 * GIB,) * 4
ONE_HOST = Cluster(cores=32, memory=256 * GIB, gpus=GPUS, kind="H100")


def grpo(**params: Any) -> Graph:
    return grpo_graph(batch=64, n=4, max_tokens=700, **params)


def two_hosts() -> Cluster:
    host = Host(name="a", cores=32, memory=256 * GIB, gpus=GPUS, kind="H100")
    return replace(ONE_HOST, hosts=(host, replace(host, name="b")))


def planned(graph: Graph, cluster: Cluster = ONE_HOST, **options: Any) -> Plan:
    usual: dict[str, Any] = {"relayout": AUTO}
    asked = RunOptions(**usual | options)
    return plan(check(graph, headers), asked, cluster=cluster, simulated=True)


@pytest.mark.parametrize("graph", [grpo, lambda: grpo(max_lag=1), small_ppo])
@pytest.mark.parametrize("cluster", [ONE_HOST, two_hosts()])
def test_wishes_of_a_search_are_options_of_a_run(
    graph: Callable[[], Graph], cluster: Cluster
) -> None:
    checked = check(graph(), headers)
    asked = make_placing(RunOptions())
    chosen = choose_plan(checked, seed=0, placing=asked, cluster=cluster)
    assert not chosen.why_not
    options = write_wishes(RunOptions(), chosen.wishes)
    again = make_plan(checked, seed=0, placing=make_placing(options), cluster=cluster)
    assert again.nodes == chosen.plan.nodes
    assert again.turns == chosen.plan.turns
    assert (again.hosts, again.devices) == (chosen.plan.hosts, chosen.plan.devices)


def test_a_plan_has_the_table_and_the_layout_that_a_run_begins_with() -> None:
    sizes: dict[str, Any] = {"microbatch": {"train_policy": 16384}, "slots": {"rollout": 256}}
    with_table = planned(grpo(), **sizes)
    lines = [note for note in with_table.notes if note.startswith("layouts: ")]
    assert lines[0].startswith("layouts: at first: layout 0, ")
    assert lines[0].endswith(" s a step")
    assert "44,800 live tokens from layouts" not in explain(with_table)
    text = explain(with_table, why=True, width=200)
    assert "179,200 live tokens: " in text
    assert "s a Step by price: rollout, train_policy on 4 H100" in text
    assert with_table.nodes == planned(grpo(), relayout={}, **sizes).nodes


def test_on_cpus_that_nobody_measured_a_run_has_one_layout() -> None:
    alone = planned(grpo(), Cluster(cores=8, memory=64 * GIB))
    (note,) = [note for note in alone.notes if note.startswith("one layout: ")]
    assert "on CPUs a profile of this machine says what layouts cost" in note


@pytest.mark.parametrize(("options", "problem"), [
    ({"pin": {"rollout": "here"}}, "found --pin. Fix: leave one out, or 16384=replicas.rollout=2"),
    ({"search": "off", "workers": "one"}, "found --search off, --workers one"),
    ({"replicas": {"rollout": "1..2"}}, "found a range of --replicas"),
    ({"objective": "cost"}, "found --objective cost"),
])  # fmt: skip
def test_what_leaves_nothing_to_a_search_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        planned(grpo(), **options)


def test_a_program_is_refused() -> None:
    program = check(Program((grpo(), 1), (grpo(), 1)), headers)
    with pytest.raises(PlanError, match="found a Program, whose phases have lengths of their own"):
        plan(program, RunOptions(relayout=AUTO), cluster=ONE_HOST, simulated=True)


def test_a_run_begins_with_the_layout_of_what_it_is_expected_to_have() -> None:
    options = RunOptions(relayout=AUTO)
    checked = check(grpo(), headers)
    layouts = (RunLayout(), RunLayout(text="threads=1", changes={"threads": 1}))
    grid = {1000: (1.0, 2.0), 4000: (4.0, 3.0)}

    def make(changed: RunOptions, memory: RunMemory) -> Plan:
        return plan(checked, changed, cluster=Cluster(cores=8, memory=64 * GIB), memory=memory)

    for begins, number in ((1000.0, 0), (4000.0, 1)):
        table = measured_table(layouts, grid, begins=begins)
        planned_run = plan_run(None, options, make, lambda _, table=table: table)
        assert planned_run.layouts is not None
        assert planned_run.layouts.policy.layout == number
        assert planned_run.present.options.threads == (None, 1)[number]

    alone = plan_run(None, options, make, lambda _: None)
    assert alone.layouts is None
    (planned_alone,) = alone.present.planned.phases
    assert any(note.startswith("one layout: ") for note in planned_alone.notes)


def test_a_resume_closes_what_cannot_be_planned_any_more(tmp_path: Path) -> None:
    options = RunOptions(relayout=AUTO)
    checked = check(grpo(), headers)
    layouts = (RunLayout(), RunLayout(text="threads=64", changes={"threads": 64}))
    table = measured_table(layouts, {1000: (1.0, 2.0), 4000: (4.0, 3.0)})

    def make(changed: RunOptions, memory: RunMemory) -> Plan:
        if changed.threads:
            raise PlanError("threads: this machine has 8 cores.")
        return plan(checked, changed, cluster=Cluster(cores=8, memory=64 * GIB), memory=memory)

    with RunFolder.create("moved", tmp_path) as folder:
        folder.write_text(LAYOUTS, encode_layouts(table, 0, ()))
        resumed = plan_resumed(folder, options, make, lambda _: None, asks_anew=False)
        assert resumed.layouts is not None
        closed = [layout.closed for layout in resumed.layouts.policy.table.layouts]
        assert closed == ["", "threads: this machine has 8 cores."]
        folder.write_text(LAYOUTS, encode_layouts(table, 1, ()))
        with pytest.raises(PlanError, match=r"layout 1 \(threads=64\): threads: this machine"):
            plan_resumed(folder, options, make, lambda _: None, asks_anew=False)
