"""Drawings of plans, and with a run's figures: what they say, and of a Program by phase."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dataflow.draw import draw
from dataflow.errors import DataError
from engine.keep.flow.records import EdgeFlow, Flow, ReplicaFlow, WeightFlow
from engine.plan.cluster import Cluster
from engine.plan.drawing import places, planned_notes
from engine.plan.plan import Plan
from engine.watch.flow_drawing import measured_notes
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned_on
from tests.kit.watched import write_flows

SVG = "{http://www.w3.org/2000/svg}"


def apart() -> Plan:
    """GRPO with two replicas of generation and two ranks of training."""
    graph = grpo_graph(max_lag=1)
    return planned_on(Cluster(cores=8, memory=24 << 30), graph, replicas={"rollout": 2})


def flows(steps: int = 2, phase: int = 0) -> list[Flow]:
    """Steps of a second; two replicas of rollout."""
    return [
        Flow(
            step=step,
            start=step - 1.0,
            end=float(step),
            wall=1e9 + step,
            phase=phase,
            nodes={
                "rollout@a": ReplicaFlow(busy=0.5, for_room=0.5, rows=30, tokens=600),
                "rollout@b": ReplicaFlow(busy=0.7, for_room=0.3, rows=10, tokens=200),
                "score@c": ReplicaFlow(idle=1.0),
            },
            edges={
                "rollout->score": EdgeFlow(rows=40, bytes=40 << 10),
                "prompts->rollout": EdgeFlow(),
            },
            weights={
                "policy->rollout@a": WeightFlow(loads=1, seconds=0.02),
                "policy->rollout@b": WeightFlow(loads=1, seconds=0.04),
            },
        )
        for step in range(1, steps + 1)
    ]


def test_a_plan_drawn_as_text() -> None:
    plan = apart()
    shown = draw(grpo_graph(max_lag=1), placed=places(plan), notes=planned_notes(plan))
    require_golden("draw/plan.txt", shown)


def test_frames_hold_the_nodes_of_their_workers() -> None:
    plan = apart()
    made = draw(grpo_graph(max_lag=1), "svg", placed=places(plan), notes=planned_notes(plan))
    root = ElementTree.fromstring(made)
    frames = [g.get("data-worker", "") for g in root.iter(f"{SVG}g") if g.get("class") == "worker"]
    assert sorted(worker for frame in frames for worker in frame.split()) == sorted(plan.workers)


def test_figures_of_a_run_are_means_over_its_steps(tmp_path: Path) -> None:
    write_flows(tmp_path / "events", iter(flows()))
    assert measured_notes(tmp_path) == {
        "rollout": ("busy 60 %, waits 40 % for room", "40 rows/s, 800 tokens/s"),
        "score": ("busy 0 %",),
        "rollout->score": ("40 rows/s, 40.0 KiB/s",),
        "policy->rollout": ("4 loads, 30 ms each",),
    }


def test_those_of_a_program_have_its_phases_number(tmp_path: Path) -> None:
    write_flows(tmp_path / "events", iter([*flows(1, phase=1), *flows(1, phase=2)]))
    names = measured_notes(tmp_path)
    assert {name.partition("/")[0] for name in names} == {"1", "2"}
    assert names["2/rollout->score"] == ("40 rows/s, 40.0 KiB/s",)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_step_is_refused(tmp_path: Path, there: bool) -> None:
    if there:
        write_flows(tmp_path / "events", iter([]))
        (tmp_path / "events").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=r"records of a Step in events/, found none. Fix: --meas"):
        measured_notes(tmp_path)
