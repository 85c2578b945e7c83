"""What a run measured beside what its plan predicted: `explain --measured`, with golden texts.

`GOLDEN=write pytest tests/unit/test_measured.py` writes the golden texts anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.keep.flow.records import EdgeFlow, Flow, ReplicaFlow, WeightFlow, WorkerFlow
from engine.keep.run_measurements import node_seconds, read_measured
from engine.plan.explain import explain
from engine.plan.explain.measurements import MeasuredRun, error
from engine.plan.plan import Plan
from tests.kit.comparison import require_golden
from tests.kit.graphs import grpo_graph
from tests.kit.kept_runs import kept_run
from tests.kit.plans import grpo_plan, placed
from tests.kit.watched import write_flows

pytestmark = pytest.mark.usefixtures("tiny")
MIB = 1 << 20


def lagging() -> Plan:
    """Two replicas of generation, two ranks of training."""
    graph = grpo_graph(beta=0.04, max_lag=1, minibatches=4)
    return placed(graph, cores=8, replicas={"rollout": 2}, ranks={"train_policy": 2})


MEASURED = {"prompts": 0.001, "rollout": 22.0, "score": 0.25, "advantage": 0.002, "reference": 3.0}


def a_run_of_grpo_lag(folder: Path, *, events: bool = True) -> Path:
    """A run folder of two Steps, with what its Workers would have measured."""
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in (1, 2):
            times = {f"time/{name}": seconds * step / 1.5 for name, seconds in MEASURED.items()}
            file.write(json.dumps({"step": step, **times, "time/step": 30.0}) + "\n")
    if events:
        write_flows(folder / "events", (_flow(step) for step in (1, 2)))
    return folder


def _flow(step: int) -> Flow:
    trained = {"train_policy@train": 500 * MIB, "train_policy@train-1": 400 * MIB}
    return Flow(
        step=step,
        start=30.0 * (step - 1),
        end=30.0 * step,
        wall=1e9 + step,
        nodes={name: ReplicaFlow(device_peak=peak) for name, peak in trained.items()},
        edges={
            "rollout->score": EdgeFlow(bytes=step * MIB),
            "prompts->rollout": EdgeFlow(bytes=131072),
        },
        weights={
            "policy->rollout@rollout-0": WeightFlow(loads=1, seconds=0.25, bytes=1809920),
            "policy->rollout@rollout-1": WeightFlow(loads=1, seconds=0.5, bytes=MIB),
        },
        workers={
            "rollout-0": WorkerFlow(peak=(700 + step) * MIB, before=300 * MIB),
            "train": WorkerFlow(peak=1200 * MIB, before=step * 300 * MIB),
        },
    )


@pytest.mark.parametrize(("name", "width"), [("measured", 120), ("measured_narrow", 60)])
def test_what_was_measured_stands_beside_what_was_predicted(
    name: str, width: int, tmp_path: Path
) -> None:
    run = a_run_of_grpo_lag(tmp_path / "run")
    text = explain(lagging(), measured=read_measured(run), width=width)
    section = text[text.index("measured in 2 Steps") : text.index("conventions that")]
    require_golden(f"explain/{name}.txt", section)


def test_a_step_in_which_a_node_did_nothing_counts_for_its_mean(tmp_path: Path) -> None:
    kept_run(
        tmp_path / "run", rows=[{"step": 1, "time/score": 6.0}, {"step": 2, "time/rollout": 1.0}]
    )
    assert read_measured(tmp_path / "run")[0].seconds == {"score": 3.0, "rollout": 0.5}
    assert node_seconds(tmp_path / "run") == {"score": 3.0, "rollout": 0.5}


def test_of_a_plan_that_says_nothing_of_processes_what_nodes_need_is_compared() -> None:
    plan = replace(lagging(), processes={})
    found = MeasuredRun(steps=1, flows=True, peaks={"train": 1200 * MIB})
    text = explain(plan, measured={0: found})
    assert "its libraries, 0.5 GB with torch, are not predicted" in text
    grown = replace(found, grown={"train": 900 * MIB})
    text = explain(plan, measured={0: grown})
    assert "what its process has grown by since its kernels were opened" in text
    assert "900 MiB" in text


def test_of_a_run_without_events_the_seconds_are_shown(tmp_path: Path) -> None:
    run = a_run_of_grpo_lag(tmp_path / "run", events=False)
    text = explain(lagging(), measured=read_measured(run))
    section = text[text.index("measured in 2 Steps") :].partition("\n\n")[0]
    assert "bytes and memory: the run kept none, as it has no events/" in section
    assert "memory at most" not in section
    (line,) = [line for line in section.splitlines() if line.startswith("  rollout")]
    assert line.split()[-4:] == ["22", "s", "-46", "%"]


def test_a_run_of_another_graph_has_nothing_beside_it() -> None:
    told = "nothing: the run has no Step of this graph"
    assert told in explain(grpo_plan(), measured={3: MeasuredRun(steps=1)})


@pytest.mark.parametrize(
    ("predicted", "found", "text"),
    [(3.0, 2.0, "+50 %"), (1.0, 4.0, "-75 %"), (5000.0, 2.0, "2,500 x"), (2.0, 2.0, "+0 %")]
    + [(None, 2.0, "-"), (2.0, None, "-"), (2.0, 0.0, "-")],
)
def test_an_error_is_relative_to_what_was_measured(
    predicted: float | None, found: float | None, text: str
) -> None:
    assert error(predicted, found) == text
