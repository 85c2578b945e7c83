"""The arithmetic of the benchmark of several processes: Steps out of a trace, and their ratios."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.across import TracedStep, results, steps_of

NODES = ("prompts", "rollout", "train_policy", "record")


def trace(*spans: tuple[str, str, float, float]) -> list[dict[str, Any]]:
    """Events of spans (node, name, start, end), in seconds; each node has a process of its own."""
    thread = {"ph": "M", "name": "thread_name", "tid": 0}
    events = [thread | {"pid": 1 + i, "args": {"name": node}} for i, node in enumerate(NODES)]
    for node, what, start, end in spans:
        times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        events.append({"ph": "X", "name": what, "pid": 1 + NODES.index(node), "tid": 0, **times})
    return events


def test_a_step_goes_from_end_to_end_of_training_and_its_rest_is_what_no_node_had() -> None:
    (step,) = steps_of(trace(
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


def test_ratios_are_medians_over_pairs_of_steps() -> None:
    one = [
        TracedStep(seconds=1.0, nodes=0.9),
        TracedStep(seconds=2.0, nodes=1.9),
        TracedStep(seconds=4.0, nodes=3.9),
    ]
    times = ((1.5, 1.0), (2.2, 2.0), (12.0, 11.0))
    slower = [TracedStep(seconds=seconds, nodes=nodes) for seconds, nodes in times]
    by_name = {r.name: r for r in results({"one": one, "apart": slower})}
    assert by_name["apart/ratio"].value == pytest.approx(1.5)
    assert by_name["apart/ratio"].holds is False
    # The rests 0.5, 0.2 and 1.0 beside what the nodes take in one process: 1.4 / 1, 2.1 / 2, 4.9 /
    # 4.
    assert by_name["apart/ratio, nodes as in one"].value == pytest.approx(1.225)
    assert by_name["apart/rest"].value == pytest.approx(500.0)
