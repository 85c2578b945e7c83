"""Simulated runs in which replicas come and go, by the rule that runs have."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.cost.transfers import START
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.simulation.prediction import Prediction
from engine.simulation.report import report
from engine.simulation.summary import as_data, summary_of
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed
from tests.kit.simulated_rows import SeenLengths, predicted

pytestmark = pytest.mark.usefixtures("tiny")
LONG_TAILED = SeenLengths(constant_length(20), lognormal(120, 0.9, 512))
MOST = 4


def plan(*, max_lag: int = 1, **asked: Any) -> Plan:
    """Generation of few long rows, which takes several times as long as their training."""
    graph = grpo_graph(batch=16, n=2, max_tokens=512, max_lag=max_lag)
    replicas = {"rollout": MOST}
    return placed(graph, cores=16, workers="apart", threads=1, replicas=replicas, **asked)


def elastic(**asked: Any) -> Plan:
    return plan(least={"rollout": 1}, **asked)


def run(of: Plan, **asked: Any) -> Prediction:
    return predicted(of, **{"steps": 12, "lengths": LONG_TAILED, "scaling": "balance"} | asked)


def seconds(found: Prediction) -> list[float]:
    return [step.end - step.start for step in found.steps]


def counts(found: Prediction) -> list[int]:
    return [step.replicas["rollout"] for step in found.steps]


@pytest.mark.parametrize(("max_lag", "share"), [(0, 0.75), (1, 0.8)])
def test_long_answers_bring_replicas_and_shorter_steps(max_lag: int, share: float) -> None:
    """With a lag a replica alone decodes all rows at once, too, and gains less by others."""
    scaled, alone = (
        run(elastic(max_lag=max_lag), scaling=scaling) for scaling in ("balance", "fixed")
    )
    added = counts(scaled)
    assert added == sorted(added)
    assert (added[0], added[-1]) == (1, MOST)
    assert set(counts(alone)) == {1}
    assert fmean(seconds(scaled)[-4:]) < share * fmean(seconds(alone)[-4:])
    assert [s.tokens for s in scaled.steps] == [s.tokens for s in alone.steps]


def test_most_has_all_at_once() -> None:
    result = run(elastic(), scaling="most", steps=4)
    assert counts(result)[1:] == [MOST] * 3


def test_fixed_replicas_are_what_they_were() -> None:
    balanced, fixed = (run(plan(), scaling=scaling, steps=4) for scaling in ("balance", "fixed"))
    assert seconds(balanced) == seconds(fixed)
    assert all(not step.replicas for step in balanced.steps)
    assert "replicas\n" not in report(summary_of(balanced))


def test_a_replica_that_joins_has_to_start_and_to_fetch_weights() -> None:
    of = elastic()
    result = run(of)
    starts = {span.worker: span for span in result.spans if span.what == "start"}
    assert starts.keys() == {"rollout-1", "rollout-2", "rollout-3"}
    for worker, start in starts.items():
        took = plan_costs(of).start(worker)
        assert took > START
        assert start.end - start.start == pytest.approx(took)
        first, second, *_ = (span for span in result.spans if span.worker == worker)
        assert (first, second.what) == (start, "load")
        assert second.start >= start.end
        assert second.end > second.start
        assert result.present[worker][0][0] == start.start


def test_the_page_and_the_figures_say_how_many_there_were() -> None:
    result = run(elastic())
    figures = summary_of(result)
    text = report(figures)
    added = counts(result)
    for step, (before, after) in enumerate(pairwise(added), 2):
        if after > before:
            assert f"{after} at the end of Step {step}" in text
    assert f"1 to {MOST} may be" in text
    assert as_data(figures)["replicas"] == {"rollout": added}
    (use,) = (use for use in figures.nodes if use.node == "rollout")
    assert 1 < use.workers < MOST, "the mean; shares are of the time in which they were there"
    assert use.shares.busy > 0.5


def test_weights_are_fetched_by_the_replicas_that_are_there() -> None:
    """One that has the writer to itself is faster than four at once."""
    alone, together = (
        [span for span in run(of, steps=4, scaling="fixed").spans if span.what == "load"]
        for of in (elastic(), plan())
    )
    assert {span.worker for span in alone} == {"rollout-0"}
    longest = (max(span.end - span.start for span in loads) for loads in (alone, together))
    assert next(longest) < next(longest)
