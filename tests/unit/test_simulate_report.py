"""What is said of simulated runs that are written by hand: figures, critical paths, timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.keep.trace.timeline import read_trace
from engine.plan.cluster import Host, with_first
from engine.plan.cost.machine_load import MachineLoad
from engine.run.simulated_workers.spans import SimulatedSpan
from engine.simulation.critical_path import MESSAGE, WAIT, CriticalPaths, sum_parts
from engine.simulation.plan_comparison import (
    ComparedPlan,
    draw_comparison,
    export_comparison,
    format_plan_table,
)
from engine.simulation.report import report
from engine.simulation.summary import PredictionSummary, as_data, summary_of
from engine.simulation.timeline import write_timeline
from engine.simulation.utilisation import Utilisation
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned_on
from tests.kit.simulated import GIB, plan_of_three, span, two_steps

pytestmark = pytest.mark.usefixtures("tiny")
known_plan = cache(plan_of_three)
"""Made once: every example of a property reads it."""


def test_a_report() -> None:
    """Replicas of rollout compute 2 and 4 of 2 x 10 seconds, and load once each; training waits
    until the rewards are there, advantage until score has ended on the same Worker.
    """
    figures = summary_of(two_steps())
    require_golden("simulate/three.txt", report(figures, seconds_origins={"score": "given"}))
    narrow = report(figures, seconds_origins={"score": "given"}, width=60)
    assert max(map(len, narrow.splitlines())) <= 60


@pytest.mark.parametrize(("ends", "counted", "said"), [
    ([10.0], (1, 1, 10.0), "nodes, Step 1:"),
    # In the last one something is done once, at the run's end.
    ([10.0, 20.0, 50.0], (2, 2, 10.0), "then     10 s a Step\n           10 s, 30 s\n"),
    # At lag 1, two batches may be made together.
    ([9.0, 10.0, 14.0, 15.0, 19.0], (3, 4, 2.5), "nodes, Steps 3 to 4:"),
], ids=["a single one", "the one between", "whole turns"])  # fmt: skip
def test_steps_that_count(ends: list[float], counted: tuple[int, int, float], said: str) -> None:
    whole = two_steps()
    steps = [replace(whole.steps[0], step=i, end=end) for i, end in enumerate(ends, 1)]
    found = summary_of(replace(whole, steps=tuple(steps)))
    assert (found.first, found.last, found.step) == counted
    assert said in report(found)


def test_without_spans_the_rest_is_said() -> None:
    found = summary_of(two_steps(spans=()))
    assert (found.nodes, found.devices, found.busy) == ((), (), None)
    text = report(found)
    assert "400 tokens/s" in text
    assert "nodes" not in text
    assert "critical path" not in text


# --- utilisation ----------------------------------------------------------------------------------


def test_what_lies_outside_of_the_time_that_counts_is_left_out() -> None:
    spans = [span("train", "train", "train_policy", 0.0, 8.0, fetch=2.0, busy=4.0)]
    use = {u.node: u.shares for u in Utilisation(plan_of_three(), spans, 4.0, 6.0).nodes()}
    assert (use["train_policy"].rows, use["train_policy"].busy) == pytest.approx((0.25, 0.5))


def test_workers_on_one_device_have_it_together() -> None:
    hosts = [Host(name="a", cores=16, memory=2**38, gpus=(80 * GIB,), kind="H100")]
    pins = {"rollout": "gen@a", "train_policy": "train@a"}
    plan = planned_on(with_first(hosts), grpo_graph(), pin=pins, turns=(("gen", "train"),))
    spans = [
        span("gen", "chunk", "rollout", 0.0, 4.0),
        span("train", "train", "train_policy", 4.0, 10.0),
    ]
    (gpu, *_) = (d for d in Utilisation(plan, spans, 0.0, 10.0).devices() if d.kind == "H100")
    assert gpu.shares.busy == pytest.approx(1.0)
    assert set(gpu.nodes) >= {"rollout", "train_policy"}


WORKERS = {"gen0": "rollout", "gen1": "rollout", "train": "train_policy", "data": "score"}


@st.composite
def any_spans(draw: st.DrawFn) -> list[SimulatedSpan]:
    """Of each Worker one after another, with gaps."""
    found: list[SimulatedSpan] = []
    whats = st.sampled_from(["chunk", "train", "load", "offer", "wake", "record"])
    part = st.floats(0, 1)
    for worker, node in WORKERS.items():
        at = 0.0
        for _ in range(draw(st.integers(0, 4))):
            start = at + draw(st.floats(0, 5))
            at = start + draw(st.floats(0.001, 5))
            long = at - start
            found.append(
                span(
                    worker,
                    draw(whats),
                    node,
                    start,
                    at,
                    fetch=long * draw(part),
                    busy=long * draw(part),
                )
            )
    return found


@given(spans=any_spans(), start=st.floats(0, 10), long=st.floats(0.1, 30))
def test_shares_add_up(spans: Sequence[SimulatedSpan], start: float, long: float) -> None:
    use = Utilisation(known_plan(), spans, start, start + long)
    users = [*use.nodes(), *use.devices()]
    assert len(users) == len(known_plan().nodes) + 4
    for each in users:
        parts = asdict(each.shares).values()
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= 0.0


# --- the critical path ----------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "spans", "wanted"), [
    (
        2,
        None,  # the slower replica, which was told to begin while it loaded
        [("rollout", 1.0), ("rollout", 4.0), ("score", 1.0), ("train_policy", 4.0)],
    ),
    (
        1,
        None,  # advantage took no time
        [("prompts", 0.5), ("rollout", 4.0), ("score", 0.5), ("train_policy", 5.0)],
    ),
    (
        2,  # generation of an earlier Step, which goes on in this one, counts from its beginning
        [
            span("gen0", "chunk", "rollout", 3.0, 14.0),
            span("train", "train", "train_policy", 14.0, 18.0, cause=0, step=2),
        ],
        [("rollout", 4.0), ("train_policy", 4.0), (MESSAGE, 2.0)],
    ),
    (
        2,
        [span("train", "train", "train_policy", 15.0, 20.0, step=2)],
        [(WAIT, 5.0), ("train_policy", 5.0)],
    ),
    (2, [], [(WAIT, 10.0)]),
    (
        2,  # training began on a chunk's first rows; the chunk counts as far as that
        [
            span("gen0", "chunk", "rollout", 10.0, 19.0, step=2),
            span("train", "train", "train_policy", 14.0, 20.0, cause=0, step=2),
        ],
        [("rollout", 4.0), ("train_policy", 6.0)],
    ),
], ids=["slower", "first", "earlier", "unknown", "nothing", "first rows"])  # fmt: skip
def test_a_path_goes_by_what_each_waited_for(
    step: int, spans: list[SimulatedSpan] | None, wanted: list[tuple[str, float]]
) -> None:
    """wanted: (node, or what no node did; seconds) of each part."""
    found = two_steps(spans=spans)
    parts = CriticalPaths(found.spans).path(found.steps[step - 1], found.steps[step - 1].start)
    assert [(part.node or part.what, part.seconds) for part in parts] == wanted


@given(spans=any_spans(), cause=st.lists(st.integers(-1, 15), min_size=16, max_size=16))
def test_a_path_adds_up_to_the_step(spans: Sequence[SimulatedSpan], cause: list[int]) -> None:
    ordered = sorted(spans, key=lambda each: each.end)
    made = [
        replace(s, step=2, cause=c if c < i else -1, asked=s.start - (i % 2))
        for i, (s, c) in enumerate(zip(ordered, cause, strict=False))
    ]
    found = two_steps(known_plan(), made)
    parts = CriticalPaths(found.spans).path(found.steps[1], 10.0)
    assert [part.end for part in parts[:-1]] == pytest.approx([part.start for part in parts[1:]])
    assert sum(part.seconds for part in sum_parts(parts)) == pytest.approx(10.0)


# --- cost, JSON, timeline -------------------------------------------------------------------------


def test_a_cost_needs_all_prices() -> None:
    unknown = summary_of(two_steps(plan_of_three(price=0.0)))
    assert sorted(unknown.cost.unpriced) == ["a", "b"]
    assert "not known: no price an hour of" in report(unknown)


def test_figures_as_json_are_those_of_the_page() -> None:
    written = json.dumps(as_data(summary_of(two_steps()), {"score": "given"}))
    data = json.loads(written, parse_float=lambda text: round(float(text), 9))
    require_golden("simulate/three.json", json.dumps(data, indent=1) + "\n")


def test_a_timeline_has_a_track_for_each_worker(tmp_path: Path) -> None:
    whole = two_steps()
    write_timeline(tmp_path / "t.json", whole)
    events = read_trace(tmp_path / "t.json")
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"steps", "data", "gen0", "gen1", "train"}
    spans = [e for e in events if e["ph"] == "X"]
    fetched = sum(s.fetch > 0 for s in whole.spans)
    assert len(spans) == len(whole.spans) + fetched + len(whole.steps)
    names = {e["name"] for e in spans}
    assert {"rollout", "load rollout", "fetch", "Step 2", "train_policy"} <= names
    assert [(e["ts"], e["dur"]) for e in spans if e["name"] == "Step 2"] == [(10e6, 10e6)]


# --- plans beside each other ----------------------------------------------------------------------


def faster(found: PredictionSummary, times: float) -> PredictionSummary:
    cost = replace(found.cost, step=found.cost.step / times)
    return replace(found, step=found.step / times, rate=found.rate * times, cost=cost)


def three_plans() -> list[ComparedPlan]:
    found = summary_of(two_steps())
    return [
        ComparedPlan(values={"rollout": "1"}, summary=found),
        ComparedPlan(values={"rollout": "2"}, summary=faster(found, 1.6)),
        ComparedPlan(values={"rollout": "16"}, why="verify: gen needs 90 GiB, GPU 0 has 80 GiB."),
    ]


def test_plans_in_a_table() -> None:
    require_golden("simulate/plans.txt", format_plan_table(three_plans()))
    assert max(map(len, format_plan_table(three_plans(), width=60).splitlines())) <= 60


def test_a_profile_of_a_busy_machine_is_said_in_reports_and_tables() -> None:
    load = MachineLoad(cores=1.2, all_cores=2, share=0.4)
    busy = replace(summary_of(two_steps()), load=load)
    assert load.note in " ".join(report(busy).split())
    table = format_plan_table([ComparedPlan(values={"n": "1"}, summary=busy)])
    assert load.note in " ".join(table.split())
    assert "busy machine" not in report(replace(busy, load=MachineLoad()))


def test_where_no_plan_fits_the_table_says_why() -> None:
    assert "16  verify: gen needs 90 GiB" in format_plan_table(three_plans()[2:])


def test_what_is_the_same_as_above_is_not_said_again() -> None:
    first, second, last = three_plans()
    text = format_plan_table([first, last, replace(last, values={"rollout": "32"}), second])
    assert text.count("needs 90 GiB") == 1
    assert "32  the same\n" in text


def test_plans_with_other_seeds_have_other_rows() -> None:
    plans = [replace(plan, values={"seed": "1"}) for plan in three_plans()]
    assert "the same rows" not in format_plan_table(plans)


def test_plans_in_a_picture() -> None:
    drawn = draw_comparison(three_plans())
    for title in ("seconds a Step", "tokens/s", "busy devices, %", "cost a Step"):
        assert f">{title}</text>" in drawn
    assert drawn.count("<circle") == 8, "two that fit in four panels"
    assert ">16</text>" in drawn, "the value that does not fit has its place"


def test_a_line_for_each_combination_of_the_other_values() -> None:
    base = three_plans()[0].summary
    plans = [
        ComparedPlan(values={"rollout": n, "threads": t}, summary=faster(base, float(n)))
        for n in ("1", "2", "4")
        for t in ("2", "4")
    ]
    drawn = draw_comparison(plans)
    assert ">threads=2</text>" in drawn
    assert drawn.count("<polyline") == 8


def test_plans_as_json() -> None:
    data = export_comparison(three_plans())
    assert [plan["values"] for plan in data["plans"]] == [{"rollout": n} for n in ("1", "2", "16")]
    assert data["plans"][0]["steps"]["mean"] == 10.0
    assert data["plans"][2]["why"].startswith("verify: ")
