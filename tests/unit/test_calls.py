"""Public calls with any argument: only a GraphError comes out, with the line of the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow import calls
from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss
from dataflow.model import Buffer, Model, Table, cosine, linear, warmup
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Completion, Keep, Logprobs, Prompt, Reward, Rollout, column
from dataflow.user import Columns, operator
from operators import losses
from operators.advantage import (
    add,
    baseline_advantage,
    gae,
    group_advantage,
    kl_in_reward,
    overlong_penalty,
    returns,
    whiten,
)
from operators.answers import answers
from operators.concat import concat
from operators.data import demonstrations, preferences, prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.optimizers import AdamW
from operators.reward import reward
from operators.rewards import verl_reward
from operators.select import best_of, mixed_groups, pair, select
from operators.train import evaluate, train
from tests.kit.rewards import exact
from tests.unit.test_check import headers

policy = Model("policy", "models/tiny", trainable=True)
prompt = prompts("data/train.parquet", batch=64)
rollout = generate(policy, prompt, n=8, max_tokens=64)
score = reward(exact, rollout)
advantage = group_advantage(rollout, score)
reference = logprobs(Model("reference", "models/tiny"), rollout)
value = values(Model("critic", "models/tiny", head="scalar"), rollout)
keep = best_of(score)
clipped = losses.clipped_policy_loss(advantage)
sink = train(policy, rollout, loss=clipped, lr=1e-6)

JUNK = [
    None, -1, 0, 1.5, float("nan"), "x", True, (1, 2), [], {}, object(), b"x", ("a", 1), type,
    10**30, rollout, policy, clipped, exact, [exact, "x"],
]  # fmt: skip

RAMP = {"start": 0.1, "stop": 0.0, "steps": 10}
READ = {"model": policy, "rows": rollout}
SCORED = {"rollout": rollout, "score": score}
RIGHT = {
    Model: {"name": "reference", "base": "models/tiny"},
    Buffer: {"name": "old", "writer": sink},
    Table: {"name": "success"},
    AdamW: {},
    linear: RAMP,
    cosine: RAMP,
    warmup: {"steps": 10, "then": 0.1},
    column: {"type": pa.float32()},
    operator: {},
    loss: {},
    prompts: {"data": "data/train.parquet", "batch": 8},
    demonstrations: {"data": "data/demos.jsonl", "batch": 8},
    preferences: {"data": "data/pairs.jsonl", "batch": 8},
    generate: {"policy": policy, "prompt": prompt, "max_tokens": 8},
    logprobs: READ,
    values: READ,
    scores: READ,
    reward: {"fn": exact, "rows": rollout},
    verl_reward: {"compute_score": exact},
    group_advantage: SCORED,
    baseline_advantage: SCORED | {"baseline": score},
    gae: SCORED | {"values": value},
    returns: SCORED,
    whiten: {"advantage": advantage, "rollout": rollout},
    kl_in_reward: SCORED | {"reference": reference, "beta": 0.1},
    overlong_penalty: SCORED | {"max_tokens": 8, "buffer": 2},
    add: {},
    concat: {},
    answers: {"prompt": prompt, "column": "answer"},
    mixed_groups: {"score": score},
    best_of: {"score": score},
    pair: {"score": score},
    train: READ | {"loss": clipped, "lr": 1e-6},
    evaluate: {"model": policy, "score": score, "every": 1},
    losses.clipped_policy_loss: {"advantage": advantage},
    losses.policy_gradient_loss: {"advantage": advantage},
    losses.decoupled_policy_loss: {"advantage": advantage, "proximal": reference},
    losses.entropy_loss: {},
    losses.supervised_loss: {},
    losses.value_loss: {"returns": gae(rollout, score, value)},
    losses.dpo_loss: {"pairs": keep, "reference": reference},
    losses.trajectory_balance_loss: {"score": score, "reference": reference, "beta": 0.1},
}
"""Everything that is called in a graph function, with the least that it can be called with."""


def refused(call: Callable[[], Any]) -> Any:
    """What a call returns, None where it was refused: with the place, in this file."""
    try:
        return call()
    except GraphError as error:
        for fault in error.faults:
            assert fault.origin is not None, fault
            assert fault.origin.file == __file__, fault
            assert fault.problem, fault
            assert fault.fix, fault
        return None


def checked(value: Any) -> None:
    """Check a graph that has what a call made."""
    graph = refused(lambda: graph_with(value))
    if graph is not None:
        refused(lambda: check(graph, headers))


def graph_with(value: Any) -> Graph | None:
    if isinstance(value, Node):
        return Graph("g", value)
    rows, objective = rollout, value
    if isinstance(value, Model):
        other = logprobs(value, rollout, name="other")
        objective = losses.clipped_policy_loss(advantage, reference=other, beta=0.1)
    elif isinstance(value, Port):
        rows, objective = trained_with(value)
    if not isinstance(objective, Loss):
        return None
    return Graph("g", train(policy, rows, loss=objective, lr=1e-6))


def trained_with(port: Port[Any]) -> tuple[Any, Loss | None]:
    """Rows and a loss of which one is made of the port; no loss for a port of something else."""
    pg = losses.policy_gradient_loss
    if issubclass(port.schema, Advantage):
        return rollout, pg(port)
    if issubclass(port.schema, Logprobs):
        return rollout, losses.clipped_policy_loss(advantage, old=port)
    if issubclass(port.schema, Reward):
        return rollout, pg(group_advantage(rollout, port, name="second"))
    if issubclass(port.schema, Keep):
        return select(rollout, where=port), losses.supervised_loss()
    if issubclass(port.schema, Prompt):
        answers = generate(policy, port, max_tokens=8, name="second")
        return answers, losses.supervised_loss()
    return port, losses.supervised_loss() if issubclass(port.schema, Completion) else None


@pytest.mark.long
@pytest.mark.parametrize("call", RIGHT)
def test_whatever_an_argument_is_only_a_graph_error_comes_of_it(call: Callable[..., Any]) -> None:
    for parameter in inspect.signature(call).parameters.values():
        for junk in JUNK if parameter.name != "origin" else ():
            if parameter.kind is parameter.VAR_POSITIONAL:
                checked(refused(partial(call, junk)))
            else:
                checked(refused(partial(call, **RIGHT[call] | {parameter.name: junk})))


@pytest.mark.parametrize("call", RIGHT)
def test_what_does_not_bind_is_refused(call: Callable[..., Any]) -> None:
    assert refused(partial(call, **RIGHT[call], misspelt=1)) is None
    if call is not add:
        assert refused(partial(call, *range(20))) is None
    if RIGHT[call]:
        assert refused(call) is None


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: f"{junk!r:.20}")
def test_graphs_losses_and_decorators_refuse_junk(junk: Any) -> None:
    graph = Graph("g", sink)

    def brief(rollout: Columns[Rollout], *, weight: float = 1.0) -> Columns[Reward]:
        return Columns.make(Reward, like=rollout, reward=[weight])

    def careful(now: Now, advantage: Tensors[Advantage], *, strength: float = 1.0) -> Terms:
        return Terms(strength * advantage["advantage"])

    declared, own = operator()(brief), loss()(careful)
    for call in (
        lambda: Graph(junk, sink),
        lambda: Graph("g", junk),
        lambda: graph.extend(junk),
        lambda: graph.replace(group_advantage=junk),
        lambda: graph.node(junk),
        lambda: graph.port("generate", junk),
        lambda: clipped + junk,
        lambda: junk + clipped,
        lambda: clipped * junk,
        lambda: select(junk, where=keep),
        lambda: select(rollout, where=junk),
        lambda: select(rollout, where=keep, refill=junk),
        lambda: select(rollout, where=keep, max_attempts=junk),
        lambda: select(rollout, where=keep, name=junk),
        lambda: operator()(junk),
        lambda: operator(reads={"rollout": junk})(brief)(rollout),
        lambda: operator(reads=junk)(brief)(rollout),
        lambda: operator(reads={str(junk): ["answer"]})(brief)(rollout),
        lambda: loss()(junk),
        lambda: declared(rollout, weight=junk),
        lambda: declared(junk),
        lambda: declared.named(junk)(rollout),
        lambda: own(advantage, strength=junk),
        lambda: own(junk),
    ):
        value = refused(call)
        if isinstance(value, (Graph, Node, Port, Loss)):
            checked(value)


def test_the_line_of_a_call_is_the_users_whatever_is_between() -> None:
    here = calls.call_site()
    assert Path(here.file).name == "test_calls.py"
    for value in (Model("m", "base"), Graph("g", sink)):
        assert value.origin.file == here.file
        assert here.line < value.origin.line < here.line + 4


def test_a_models_line_is_no_part_of_it() -> None:
    first = Model("m", "base")
    second = Model("m", "base")
    assert first == second
    assert first.origin != second.origin
