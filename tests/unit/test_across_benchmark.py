"""The arithmetic of the benchmark of several processes: Steps out of a trace, and their ratios."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.across import TracedStep, results, steps_of
from engine.keep.trace.timeline import Trace, read_trace


def traced(folder: Path, *spans: tuple[str, str, float, float]) -> list[dict[str, Any]]:
    """A trace of spans (node, name, start, end), in seconds."""
    with closing(Trace(folder / "run.json")) as trace:
        for node, name, start, end in spans:
            trace.span(f"worker/{node}", name, start, end)
    return read_trace(folder / "run.json")


def test_a_step_goes_from_end_to_end_of_training_and_its_rest_is_what_no_node_had(
    tmp_path: Path,
) -> None:
    (step,) = steps_of(traced(
        tmp_path,
        ("rollout", "rollout", 0.0, 1.0),
        ("train_policy", "train_policy", 1.0, 2.0),
        ("train_policy", "offer policy", 2.1, 2.2),
        ("rollout", "load policy", 2.3, 2.5),
        ("rollout", "rollout", 2.5, 3.5),
        ("record", "samples", 3.6, 3.9),
        ("train_policy", "train_policy", 3.6, 5.0),
    ))  # fmt: skip
    assert step.seconds == pytest.approx(3.0)
    assert step.nodes == pytest.approx(2.4)
    assert step.rest == pytest.approx(0.6)


def steps(*times: tuple[float, float]) -> list[TracedStep]:
    """Steps of these seconds, and of their nodes."""
    return [TracedStep(seconds=seconds, nodes=nodes) for seconds, nodes in times]


def test_ratios_are_medians_over_pairs_of_steps() -> None:
    one = steps((1.0, 0.9), (2.0, 1.9), (4.0, 3.9))
    slower = steps((1.5, 1.0), (2.2, 2.0), (12.0, 11.0))
    found = {r.name: r for r in results({"one": one, "apart": slower})}
    assert found["apart/ratio"].value == pytest.approx(1.5)
    assert found["apart/ratio"].holds is False
    # The rests 0.5, 0.2 and 1.0 beside what the nodes take in one process: 1.4 / 1, 2.1 / 2, 4.9 /
    # 4.
    assert found["apart/ratio, nodes as in one"].value == pytest.approx(1.225)
    assert found["apart/rest"].value == pytest.approx(500.0)
