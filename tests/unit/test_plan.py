"""The planner's passes, one by one, and `explain` as golden texts.

`UPDATE_GOLDEN=1 pytest tests/unit/test_plan.py` writes the golden texts anew; read the difference
before keeping it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.errors import GraphError, PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Logprobs, Prompt, Rollout
from dataflow.user import Columns, operator
from engine.plan.cluster import Cluster
from engine.plan.draft import Draft
from engine.plan.explain import WIDTH, explain
from engine.plan.passes.prune import prune
from engine.plan.passes.verify import verify
from engine.plan.plan import Fetch, Plan, PlannedNode
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.sft import sft
from operators.advantage import baseline_advantage, gae, group_advantage, returns, whiten
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import evaluate, train
from tests.kit.graphs import ask
from tests.kit.plans import CLUSTER, placed, planned, save_tiny_header
from tests.kit.rewards import brief, exact
from tests.right_graphs import RIGHT

GOLDEN = Path(__file__).parent.parent / "golden" / "explain"
policy = Model("policy", "tiny", trainable=True)


@operator()
def shortened(rollout: Columns[Rollout]) -> Columns[Rollout]:
    return rollout


@operator(parent="first")
def joined(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    return later


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model directory named `tiny` in the working directory."""
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)


def sampled(n: int = 8, *, max_lag: int = 0, temperature: float = 1.0) -> Port[Rollout]:
    source = prompts("train.parquet", batch=64)
    return generate(
        policy, source, n=n, max_tokens=32, max_lag=max_lag, temperature=temperature, name="rollout"
    )


def scored(rollout: Port[Rollout]) -> Port[Advantage]:
    return group_advantage(rollout, reward(exact, rollout, name="score"), name="advantage")


def fetched(plan: Plan, node: str, key: str) -> dict[str, tuple[str, ...]]:
    """What an input takes: producer -> columns."""
    found = next(i for i in plan.node(node).inputs if i.name == key)
    return {f.producer: f.columns for f in found.fetches}


# --- prune ----------------------------------------------------------------------------------------


def test_a_reference_of_weight_0_is_left_out_and_reported() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, beta=0.0))
    assert "reference" not in [n.name for n in plan.nodes]
    assert "train_policy: clipped_policy_loss.reference left out, beta is 0" in plan.notes
    assert "reference: left out, nothing reads it" in plan.notes


def test_a_reference_of_weight_above_0_stays() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, beta=0.01))
    assert plan.node("reference").work == "forward"


def with_old(*, minibatches: int = 1, temperature: float | None = None) -> Plan:
    rollout = sampled(temperature=0.7)
    loss = clipped_policy_loss(
        scored(rollout), old=logprobs(policy, rollout, temperature=temperature, name="old")
    )
    return planned(Graph("g", train(policy, rollout, loss=loss, lr=1e-3, minibatches=minibatches)))


def test_old_of_one_update_is_what_the_update_computes_itself() -> None:
    plan = with_old()
    assert "old" not in [n.name for n in plan.nodes]
    assert plan.program is not None
    assert plan.program.node("train_policy").params["loss"].terms[0].now == ("old",)


def test_old_of_two_updates_stays() -> None:
    assert with_old(minibatches=2).node("old").region == "step"


def test_old_at_another_temperature_than_the_rows_is_no_current_logprob() -> None:
    assert "old" not in [n.name for n in with_old(temperature=0.7).nodes]
    with pytest.raises(GraphError, match="they are of two distributions"):
        with_old(temperature=1.0)


def test_old_of_other_rows_is_no_current_logprob() -> None:
    rollout, other = sampled(n=2), shortened(sampled(n=2))
    loss = clipped_policy_loss(scored(rollout), old=logprobs(policy, other, name="old"))
    graph = Graph(
        "g", train(policy, rollout, loss=loss, lr=1e-3)
    )  # the check refuses it: the pass sees for itself
    assert "old" in {n.name for n in prune(Draft(graph=graph, seed=0, cluster=CLUSTER)).graph.nodes}


# --- resolve --------------------------------------------------------------------------------------


def test_logprobs_and_train_have_the_temperature_of_their_rows() -> None:
    plan = with_old(minibatches=2)
    assert plan.program is not None
    assert plan.program.node("old").params["temperature"] == 0.7
    assert plan.program.node("train_policy").params["temperature"] == 0.7
    assert plan.program.node("train_policy").params["max_tokens"] == 32
    assert "old: temperature 0.7, that of rollout" in plan.notes


def test_a_temperature_that_the_user_gave_stays() -> None:
    rollout = sampled(temperature=0.7)
    reference = logprobs(Model("reference", "tiny"), rollout, temperature=1.0)
    loss = clipped_policy_loss(scored(rollout), reference=reference, beta=0.1)
    plan = planned(Graph("g", train(policy, rollout, loss=loss, lr=1e-3)))
    assert plan.program is not None
    assert plan.program.node("reference").params["temperature"] == 1.0


def test_rows_of_two_generations_have_nobodys_temperature() -> None:
    rollout = sampled(n=1, temperature=0.7)
    later = generate(policy, ask(rollout), max_tokens=8, temperature=0.3, name="later")
    both, alone = joined(later, rollout), shortened(later)
    sink = train(policy, both, loss=supervised_loss(), lr=1e-3)
    other = logprobs(Model("reference", "tiny"), alone)
    second = Model("second", "tiny", trainable=True)
    loss = clipped_policy_loss(
        returns(alone, reward(brief, alone, name="s")), reference=other, beta=0.1
    )
    plan = planned(Graph("g", sink, train(second, alone, loss=loss, lr=1e-3)))
    assert plan.program is not None
    assert "max_tokens" not in plan.program.node("train_policy").params
    assert plan.program.node("reference").params["temperature"] == 0.3, (
        "of the one generation that wrote the tokens"
    )


def test_the_temperature_is_found_behind_a_selection_and_not_on_another_line() -> None:
    rollout = sampled(temperature=0.7)
    greedy = generate(
        policy, rollout_prompts(rollout), max_tokens=32, temperature=0.0, name="greedy"
    )
    score = reward(exact, rollout, name="score")
    kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
    teacher = logprobs(Model("teacher", "tiny"), kept)
    loss = clipped_policy_loss(group_advantage(kept, kept_score), reference=teacher, beta=0.1)
    other = logprobs(Model("teacher", "tiny"), greedy, name="of_greedy")
    graph = Graph("g", train(policy, kept, loss=loss, lr=1e-3), train_on_greedy(greedy, other))
    plan = planned(graph)
    assert plan.program is not None
    assert plan.program.node("teacher").params["temperature"] == 0.7
    assert plan.program.node("of_greedy").params["temperature"] == 1.0


def rollout_prompts(rollout: Port[Rollout]) -> Port[Prompt]:
    return rollout.node.inputs["prompt"]


def train_on_greedy(rows: Port[Rollout], reference: Port[Logprobs]) -> Node:
    second = Model("second", "tiny", trainable=True)
    advantage = whiten(
        gae(
            rows,
            reward(exact, rows, name="greedy_score"),
            values(Model("v", "hub/critic", head="scalar"), rows),
        ),
        rows,
    )
    return train(
        second, rows, loss=clipped_policy_loss(advantage, reference=reference, beta=0.1), lr=1e-3
    )


def test_demonstrations_are_trained_at_temperature_1() -> None:
    plan = planned(sft("tiny", "demos.jsonl"))
    assert plan.program is not None
    assert plan.program.node("train_policy").params["temperature"] == 1.0
    assert plan.program.node("train_policy").params["sampler_temperature"] == 0.0


# --- shape ----------------------------------------------------------------------------------------


def test_rows_for_each_prompt_and_the_order_of_sinks() -> None:
    plan = planned(ppo("tiny", "train.parquet", exact))
    assert [n.name for n in plan.nodes][-2:] == ["train_policy", "train_critic"]
    grouped = planned(grpo("tiny", "train.parquet", exact, n=8, beta=0.1))
    assert {n.name: (n.inner, n.rows) for n in grouped.nodes} == {
        "prompts": (1, 1),
        "rollout": (1, 8),
        "score": (8, 8),
        "reference": (8, 8),
        "advantage": (8, 8),
        "train_policy": (8, 8),
    }


def test_a_source_may_lag_as_much_as_the_strictest_reader_above_the_cut() -> None:
    assert planned(grpo("tiny", "train.parquet", exact, max_lag=3)).sources[0].max_lag == 3
    rollout = sampled(max_lag=3)
    loss = clipped_policy_loss(scored(rollout), old=logprobs(policy, rollout, name="old"))
    plan = planned(Graph("g", train(policy, rollout, loss=loss, lr=1e-3, minibatches=2)))
    assert plan.sources[0].max_lag == 3, "old reads at lag 0, but below the cut"


# --- project --------------------------------------------------------------------------------------


def test_only_columns_that_are_read_travel() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact))
    assert fetched(plan, "advantage", "rollout") == {"rollout": ("completion_mask",)}
    assert fetched(plan, "advantage", "score") == {"score": ("reward",)}
    assert set(plan.node("advantage").returns) == {"advantage"}


def test_training_rows_keep_what_the_sampler_recorded() -> None:
    rows = fetched(planned(grpo("tiny", "train.parquet", exact)), "train_policy", "rows")["rollout"]
    assert {"sampler_logprobs", "version", "completion_ids"} <= set(rows)


def test_a_reward_function_gets_the_dataset_columns_that_it_asks_for() -> None:
    with_answer = fetched(planned(grpo("tiny", "train.parquet", exact)), "score", "rows")
    assert with_answer == {
        "rollout": ("completion", "completion_ids"),
        "prompts": ("prompt", "answer"),
    }
    without = fetched(planned(grpo("tiny", "train.parquet", brief)), "score", "rows")
    assert without["prompts"] == ("prompt",)


def test_dataset_columns_are_expanded_by_the_reader() -> None:
    score = planned(grpo("tiny", "train.parquet", exact, n=8)).node("score")
    ratios = {f.producer: f.ratio for f in score.inputs[0].fetches}
    assert ratios == {"rollout": 1, "prompts": 8}


def filtered() -> Plan:
    rollout = sampled()
    score = reward(exact, rollout, name="score")
    kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
    advantage = group_advantage(kept, kept_score, name="advantage")
    return planned(Graph("g", train(policy, kept, loss=clipped_policy_loss(advantage), lr=1e-3)))


def test_a_select_moves_no_rows() -> None:
    plan = filtered()
    assert fetched(plan, "advantage", "score") == {"score": ("reward",)}
    assert next(i for i in plan.node("advantage").inputs if i.name == "score").gate == "select"
    assert "rollout" in fetched(plan, "train_policy", "rows")
    assert plan.node("select").returns == ()
    assert fetched(plan, "select", "port0") == {}


def test_a_loss_gets_the_columns_of_the_schema_that_it_declares() -> None:
    plan = planned(ppo("tiny", "train.parquet", exact))
    assert fetched(plan, "train_policy", "clipped_policy_loss.advantage") == {
        "whiten": ("advantage",)
    }
    assert set(fetched(plan, "train_critic", "value_loss.returns")["gae"]) == {
        "advantage",
        "returns",
    }


def test_an_evaluation_gets_each_functions_own_reward() -> None:
    rollout = sampled()
    held = generate(
        policy,
        prompts("test.parquet", name="held"),
        max_tokens=32,
        temperature=0.0,
        name="held_rollout",
    )
    score = reward([exact, brief], held, name="held_score")
    step = train(policy, rollout, loss=clipped_policy_loss(scored(rollout)), lr=1e-3)
    plan = planned(Graph("g", step, evaluate(policy, score, every=5)))
    assert fetched(plan, "evaluate", "score") == {"held_score": ("reward", "reward/*")}
    assert plan.node("held_score").region == "evaluation"


def test_the_prompt_of_a_judge_is_the_one_that_the_judge_was_asked() -> None:
    rollout = sampled()
    verdict = generate(
        Model("judge", "tiny"), ask(rollout), max_tokens=8, temperature=0.0, name="verdict"
    )
    score = mean_over(reward(brief, verdict, name="score"), rollout)
    advantage = group_advantage(rollout, score, name="advantage")
    plan = planned(Graph("g", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-3)))
    assert fetched(plan, "score", "rows")["ask"] == ("prompt",)
    assert fetched(plan, "verdict", "prompt") == {"ask": ("prompt",)}


def test_a_prompt_behind_a_selection_is_taken_from_whoever_made_it() -> None:
    rollout = sampled()
    score = reward(exact, rollout, name="score")
    kept, question = select(rollout, ask(rollout), where=mixed_groups(score), refill=True)
    verdict = generate(
        Model("judge", "tiny"), question, max_tokens=8, temperature=0.0, name="verdict"
    )
    judged = mean_over(reward(brief, verdict, name="judged"), kept)
    advantage = group_advantage(kept, judged, name="advantage")
    plan = planned(Graph("g", train(policy, kept, loss=clipped_policy_loss(advantage), lr=1e-3)))
    assert fetched(plan, "verdict", "prompt") == {"ask": ("prompt",)}
    assert fetched(plan, "judged", "rows")["ask"] == ("prompt",)


@pytest.mark.parametrize("n", [1, 4])
def test_rewards_of_another_generation_of_the_same_width_are_not_shown(n: int) -> None:
    rollout = sampled(n=n)
    asked = rollout.node.inputs["prompt"]
    other = generate(policy, asked, n=n, max_tokens=32, temperature=0.0, name="other")
    baseline = mean_over(reward([exact, brief], other, name="of_other"), asked)
    advantage = baseline_advantage(
        rollout, reward(exact, rollout, name="score"), baseline, name="advantage"
    )
    plan = planned(
        Graph("g", train(policy, rollout, loss=policy_gradient_loss(advantage), lr=1e-3))
    )
    shown = {f.producer: f.columns for f in plan.recorded[0].fetches}
    assert shown["score"] == ("reward", "reward/*")
    assert not shown.keys() & {"of_other", "mean_over"}


def test_an_evaluation_of_a_mean_has_no_parts_of_other_rows() -> None:
    held = generate(
        policy, prompts("test.parquet", name="held"), max_tokens=32, name="held_rollout"
    )
    judged = generate(Model("judge", "tiny"), ask(held), max_tokens=8, name="judged")
    score = mean_over(reward(brief, judged, name="verdict"), held)
    step = train(policy, (rollout := sampled()), loss=clipped_policy_loss(scored(rollout)), lr=1e-3)
    plan = planned(Graph("g", step, evaluate(policy, score, every=5)))
    assert fetched(plan, "evaluate", "score") == {"mean_over": ("reward",)}


@pytest.mark.parametrize("n,second", [(1, 1), (1, 3), (4, 1), (4, 2)])
def test_what_is_reduced_has_the_rows_that_it_is_reduced_to(n: int, second: int) -> None:
    rollout = sampled(n=n)
    later = generate(policy, ask(rollout), n=second, max_tokens=8, name="later")
    score = mean_over(reward(brief, later, name="score"), rollout, name="up")
    top = mean_over(score, rollout.node.inputs["prompt"], name="top")
    advantage = baseline_advantage(rollout, score, top)
    plan = planned(
        Graph("g", train(policy, rollout, loss=policy_gradient_loss(advantage), lr=1e-3))
    )
    up, highest = plan.node("up"), plan.node("top")
    assert (up.relation, up.inner, up.rows, highest.inner, highest.rows) == ("reduce", n, n, 1, 1)
    assert {i.name: (i.gate, i.ratio, i.fan_in) for i in up.inputs} == {
        "reward": ("score", 1, second),
        "rows": ("rollout", 1, 0),
    }
    assert [i.fan_in for i in highest.inputs] == [n, 0]
    assert fetched(plan, "up", "rows") == {}, "whose rows they are is enough"


def test_what_is_recorded_is_returned() -> None:
    plan = planned(ppo("tiny", "train.parquet", exact))
    columns = {f.producer: f.columns for f in plan.recorded[0].fetches}
    assert columns["prompts"] == ("prompt",)
    assert "reward/*" in columns["score"]
    for producer, names in columns.items():
        assert set(names) <= set(plan.node(producer).returns)


# --- choose_kernels -------------------------------------------------------------------------------


def with_kernels(**kernels: str) -> Graph:
    def change(node: Node) -> Node:
        if node.name != "rollout":
            return node
        others = {name: path for name, path in node.operator.kernels.items() if name not in kernels}
        return node.changed(operator=replace(node.operator, kernels=kernels | others))

    return grpo("tiny", "train.parquet", exact).map(change)


def test_a_kernel_that_is_not_installed_is_passed_over_and_reported() -> None:
    plan = planned(
        with_kernels(
            far="no_such_package.generate:Far", near="operators.kernels.no_such_module:Near"
        )
    )
    assert plan.node("rollout").kernel == "operators.kernels.torch.generate:TorchGenerate"
    assert "rollout: kernel no_such_package.generate:Far is not installed here" in plan.notes
    assert (
        "rollout: kernel operators.kernels.no_such_module:Near is not installed here" in plan.notes
    )


def test_an_operator_without_a_kernel_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"rollout: operator 'generate' has no kernel here .*no_such_package"
    ):
        planned(with_kernels(torch="no_such_package.generate:Far"))


# --- estimate -------------------------------------------------------------------------------------


def test_the_outbox_holds_all_admitted_prompts() -> None:
    synchronous, lagging = (
        planned(grpo("tiny", "train.parquet", exact, max_lag=lag)) for lag in (0, 2)
    )
    assert (
        lagging.node("rollout").estimate.bytes["outbox"]
        == 3 * synchronous.node("rollout").estimate.bytes["outbox"]
    )


def test_training_holds_gradients_and_the_optimizer() -> None:
    parts = planned(grpo("tiny", "train.parquet", exact)).node("train_policy").estimate.bytes
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (
        4 * 452_480,
        4 * 452_480,
        8 * 452_480,
    )


def test_bytes_of_an_edge_and_those_that_stay_are_all_that_the_producer_offers() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, beta=0.1))
    offered = {e.producer: e.bytes + e.saved for e in plan.edges}
    assert all(e.bytes + e.saved == offered[e.producer] for e in plan.edges)
    mask = next(e for e in plan.edges if (e.producer, e.consumer) == ("rollout", "advantage"))
    assert mask.bytes == 64 * 8 * (8 + 512)


def test_users_functions_have_no_predicted_time() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact))
    assert plan.node("score").estimate.seconds is None
    assert (
        (plan.node("train_policy").estimate.seconds or 0)
        > (plan.node("advantage").estimate.seconds or 0)
        > 0
    )


def test_a_model_that_is_not_here_is_unknown_and_said_so() -> None:
    plan = planned(grpo("some/hub-name", "train.parquet", exact))
    assert plan.models[0].parameters is None
    assert (
        "policy: parameters, memory and seconds unknown: base is not a local directory"
        in plan.notes
    )
    assert plan.node("train_policy").estimate.seconds is None
    assert "unknown: base is not a local directory" in explain(plan)


def test_a_longer_prompt_bound_replaces_the_assumption() -> None:
    bounded = generate(
        policy,
        prompts("train.parquet", batch=64),
        max_tokens=32,
        max_prompt_tokens=40,
        name="rollout",
    )
    advantage = gae(
        bounded, reward(exact, bounded), values(Model("v", "hub/critic", head="scalar"), bounded)
    )
    plan = planned(
        Graph("g", train(policy, bounded, loss=policy_gradient_loss(advantage), lr=1e-3))
    )
    assert not [note for note in plan.notes if "assumed" in note]
    assert next(e.bytes for e in plan.edges if e.consumer == "rollout") == 64 * (8 + 4 * 40)


# --- verify ---------------------------------------------------------------------------------------


def draft_of(plan: Plan, cluster: Cluster = CLUSTER) -> Draft:
    assert plan.program is not None
    return Draft(
        graph=plan.program,
        seed=0,
        cluster=cluster,
        nodes=plan.nodes,
        sources=plan.sources,
        models=plan.models,
        edges=plan.edges,
        recorded=plan.recorded,
    )


def test_a_right_plan_passes_unchanged() -> None:
    draft = draft_of(planned(ppo("tiny", "train.parquet", exact)))
    assert verify(draft) is draft


def test_a_plan_that_does_not_fit_is_refused_with_its_parts_and_a_fix() -> None:
    with pytest.raises(
        PlanError,
        match=r"^memory: main needs [\d.]+ GiB, this host has 0\.1 GiB: .*kv_cache .* Fix: ",
    ):
        planned(grpo("tiny", "train.parquet", exact), Cluster(cores=2, memory=2**26))


def test_on_a_gpu_rows_wait_in_host_memory() -> None:
    graph = grpo("tiny", "train.parquet", exact)
    assert (
        planned(graph, Cluster(cores=2, memory=2**26, gpus=(2**31,)))
        .node("rollout")
        .estimate.seconds
        is None
    )
    with pytest.raises(PlanError, match="the GPU has"):
        planned(graph, Cluster(cores=2, memory=2**35, gpus=(2**26,)))
    with pytest.raises(PlanError, match=r"rows of .* wait"):
        planned(graph, Cluster(cores=2, memory=2**20, gpus=(2**31,)))


def changed(plan: Plan, name: str, change: Callable[[PlannedNode], PlannedNode]) -> Draft:
    draft = draft_of(plan)
    return replace(draft, nodes=tuple(change(n) if n.name == name else n for n in draft.nodes))


def first_input(node: PlannedNode, **fields: object) -> PlannedNode:
    return replace(node, inputs=(replace(node.inputs[0], **fields), *node.inputs[1:]))


BROKEN: dict[str, Callable[[PlannedNode], PlannedNode]] = {
    "kernels: advantage has none": lambda n: replace(n, kernel=""),
    "producers: advantage.rollout expects rows of a node upstream, 'rolout' is no node. Fix: rollout": lambda n: (
        first_input(n, fetches=(Fetch(producer="rolout", columns=("completion_mask",)),))
    ),
    "producers: advantage.rollout expects rows of a node upstream, 'train_policy' runs after it": (
        lambda n: first_input(n, gate="train_policy")
    ),
    "producers: advantage.rollout: 'rollout' does not return finished": lambda n: first_input(
        n, fetches=(Fetch(producer="rollout", columns=("finished",)),)
    ),
    "ratios: advantage.rollout: 8 rows a prompt, and 2 for each of the 8 of 'rollout'": lambda n: (
        first_input(n, ratio=2)
    ),
    "workers: advantage: 1 replicas on []": lambda n: replace(n, workers=()),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_plan_is_refused_by_the_name_of_the_check(message: str) -> None:
    draft = changed(planned(grpo("tiny", "train.parquet", exact)), "advantage", BROKEN[message])
    with pytest.raises(PlanError) as caught:
        verify(draft)
    assert message in str(caught.value)


def test_minibatches_that_split_groups_are_refused() -> None:
    draft = draft_of(planned(grpo("tiny", "train.parquet", exact, batch=64, minibatches=4)))
    sources = (replace(draft.sources[0], batch=62),)
    with pytest.raises(
        PlanError, match=r"groups: train_policy: 62 prompts in 4 minibatches .* Fix: minibatches=2"
    ):
        verify(replace(draft, sources=sources))


def test_an_alias_above_the_cut_at_a_lag_is_refused() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact, max_lag=1))
    shared = replace(plan.node("rollout").models[0], module="policy")
    draft = changed(plan, "rollout", lambda n: replace(n, models=(shared,)))
    with pytest.raises(PlanError, match="aliases: rollout shares the weights of 'policy' at lag 1"):
        verify(draft)


def test_a_constant_divisor_needs_a_longest_completion() -> None:
    graph = sft("tiny", "demos.jsonl")
    step = graph.node("train_policy")
    constant = Graph("sft", step.changed(params=step.params | {"aggregate": "constant"}))
    with pytest.raises(PlanError, match="constant: train_policy"):
        planned(constant)


# --- all right graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_every_right_graph_has_a_plan_that_can_be_shown(make: Callable[[], Graph]) -> None:
    plan = planned(make())
    text = explain(plan)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(n.name in text for n in plan.nodes)
    assert json.loads(plan.to_json())["digest"] == plan.digest


def test_the_same_graph_has_the_same_plan() -> None:
    assert planned(ppo("tiny", "train.parquet", exact)) == planned(
        ppo("tiny", "train.parquet", exact)
    )


# --- explain --------------------------------------------------------------------------------------

PLANS: dict[str, Callable[[], Plan]] = {
    "grpo": lambda: planned(grpo("tiny", "train.parquet", exact, beta=0.04, minibatches=4)),
    "grpo_lag": lambda: placed(
        grpo("tiny", "train.parquet", exact, beta=0.04, max_lag=1, minibatches=4),
        cores=8,
        replicas={"rollout": 2},
        ranks={"train_policy": 2},
        turns=(("rollout-0", "train-1"),),
    ),
    "ppo": lambda: planned(ppo("tiny", "train.parquet", exact)),
    "sft": lambda: planned(sft("tiny", "demos.jsonl")),
}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    plan = PLANS[name]()
    found = explain(replace(plan, digest="0123456789abcdef"))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    plan = planned(grpo("tiny", "train.parquet", exact))
    line = next(
        t
        for t in explain(plan, measured={"rollout": 1.25}).splitlines()
        if t.startswith("  rollout")
    )
    assert line.endswith("1.2 s")
    assert "measured" not in explain(plan)


def test_the_header_says_how_many_rows_and_updates_a_step_has() -> None:
    text = explain(planned(grpo("tiny", "train.parquet", exact, minibatches=4, max_lag=1)))
    assert "64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)" in text
    assert "no row is more than 1 version old when it is trained" in text
    assert "at most 64 prompts" not in text


def test_a_long_name_has_a_line_of_its_own() -> None:
    rollout = sampled()
    name = "advantage_of_each_row_within_its_group_of_eight" * 2
    advantage = group_advantage(rollout, reward(exact, rollout), name=name)
    text = explain(
        planned(Graph("g", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-3)))
    )
    assert f"  {name}" in text.splitlines()
    assert max(map(len, text.splitlines())) <= WIDTH
