"""What a plan makes of a Table: who shares it, where it is, and that it is no Model."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.check import check
from dataflow.draw.picture import make_picture
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Table
from dataflow.schema import Reward, Weight
from dataflow.set_expressions import edited
from dataflow.snapshot import from_json, to_json
from dataflow.user import Columns, operator
from engine.plan.explain import explain
from operators.advantage import returns
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.select import mixed_groups, select
from operators.tables import lookup, record
from tests.kit.graphs import DATA, compared, policy, scored, trained
from tests.kit.plans import CLUSTER, headers, planned, planned_on, workers_of

pytestmark = pytest.mark.usefixtures("tiny")


@operator()
def seen_before(weight: Columns[Weight]) -> Columns[Reward]:
    return Columns.make(Reward, like=weight, reward=weight["weight"])


def weighed(max_lag: int = 0, **params: Any) -> Graph:
    """GRPO with a Table; params: of `record`."""
    lengths = Table("lengths")
    prompt = prompts(DATA, batch=8)
    weight = lookup(lengths, prompt, max_lag=max_lag)
    rollout = generate(
        policy, prompt, weight=weight, n=4, max_tokens=8, max_lag=max_lag, name="rollout"
    )
    return Graph("weighed", trained(rollout), record(lengths, rollout, **params))


def test_in_one_worker_it_is_shared_and_in_others_pulled() -> None:
    (table,) = planned(weighed()).tables
    assert (table.name, table.writer) == ("lengths", "record_lengths")
    assert table.readers == table.aliases == ("lookup_lengths",)
    plan = planned_on(CLUSTER, weighed(1))
    (table,) = plan.tables
    assert (table.aliases, table.route) == ((), "pull")
    assert workers_of(plan, "lookup_lengths") == ("data",)
    assert workers_of(plan, "record_lengths", "train_policy") == ("train",)
    assert plan.stateful == {"train"}


def test_at_a_lag_in_the_writers_worker_it_is_a_copy() -> None:
    plan = planned(weighed(1))
    (table,) = plan.tables
    assert (table.readers, table.aliases) == (("lookup_lengths",), ())
    (use,) = plan.node("lookup_lengths").tables
    assert use.module == "lengths@lookup_lengths"


def test_it_is_no_model_of_the_plan() -> None:
    plan = planned(weighed())
    assert [model.name for model in plan.models] == ["policy"]
    assert plan.node("record_lengths").models == ()
    assert plan.node("lookup_lengths").weight == "weight"
    assert plan.node("prompts").returns == ("data/row", "prompt", "answer")
    assert not planned_on(CLUSTER, weighed(1)).worlds
    with pytest.raises(PlanError, match="record_lengths=2, but it is a record node"):
        planned_on(CLUSTER, weighed(), replicas={"record_lengths": 2})


def test_explain_and_drawings_say_who_writes_and_reads_it() -> None:
    text = explain(planned_on(CLUSTER, weighed(1)))
    assert "lengths  a Table, 24 bytes for each row of the data that was visited" in text
    assert "record_lengths -> lookup_lengths: copy in data, pulled from train; lag 1" in text
    states = {state.name: state for state in make_picture(weighed()).states}
    box = states["lengths"]
    assert (box.kind, box.facts) == ("Table", "geometric mean by row of the data")
    assert (len(box.writers), len(box.readers)) == (1, 1)


def test_a_snapshot_gives_the_same_graph() -> None:
    graph = weighed(column="prompt_ids")
    assert from_json(to_json(graph)) == graph
    assert "geometric_mean" in to_json(graph)


def test_settings_reach_both_nodes() -> None:
    settings = [
        "lookup_lengths.max_lag=1",
        "rollout.max_lag=1",
        "record_lengths.column=completion_mask",
    ]
    graph = edited(weighed(), settings)
    assert graph.node("lookup_lengths").params["max_lag"] == 1
    assert graph.node("record_lengths").params["column"] == "completion_mask"
    assert check(graph, headers).warnings == ()


def test_a_number_of_rows_that_a_selection_left_can_be_recorded() -> None:
    rewards = Table("rewards", statistic="mean")
    prompt = prompts(DATA, batch=8)
    weight = lookup(rewards, prompt)
    rollout = generate(policy, prompt, weight=weight, n=4, max_tokens=8, name="rollout")
    score = scored(rollout)
    left, left_score = select(rollout, score, where=mixed_groups(score))
    sink = trained(left, clipped_policy_loss(compared(left, left_score)))
    plan = planned(Graph("numbers", sink, record(rewards, left_score, column="reward")))
    (rows,) = plan.node("record_rewards").inputs
    fetched = {fetch.producer: fetch.columns for fetch in rows.fetches}
    assert fetched == {"prompts": ("data/row",), "score": ("reward",)}
    assert rows.gate == "select"


def test_a_lookup_that_no_generation_stands_on_sees_what_the_step_starts_from() -> None:
    lengths, prompt = Table("lengths"), prompts(DATA, batch=8)
    rollout = generate(policy, prompt, n=4, max_tokens=8, max_lag=1, name="rollout")
    seen = seen_before(lookup(lengths, rollout))
    loss = policy_gradient_loss(returns(rollout, seen))
    graph = Graph("baseline", trained(rollout, loss), record(lengths, rollout))
    of = check(graph, headers).regions.of
    assert (of["rollout"], of["lookup_lengths"]) == ("stream", "step")
    plan = planned_on(CLUSTER, graph)
    assert [source.max_lag for source in plan.sources] == [1]
    (table,) = plan.tables
    assert table.aliases == ("lookup_lengths",)
