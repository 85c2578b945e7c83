"""The shipped graphs for three Steps on the tiny model: against a plain loop, apart, with a lag."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.set_expressions import edited
from engine.api import plan
from tests.kit import algorithms, plain_algorithms, plain_formulas, plain_rankers, runs
from tests.kit import plain_loop as loop
from tests.kit.plain_formulas import PlainRun
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)


SHAPES = (
    *("best_of_n", "dapo", "dpo", "dual_generator"),
    *("grpo_by_length", "grpo_ranked", "ppo", "self_play_two_models", "sft_and_rl"),
)
"""Between them they have every kind of node and whatever one reads of another (`shape_of`), with
one and two sources, generations and trained Models, and with prompts that are replaced.
"""

FIRST = ("grpo", "ppo", "online_dpo", "grpo_ranked")
"""Graphs that `make test` runs too."""


def require_three_steps(result: runs.Run) -> None:
    """Three Steps with finite numbers, each of which updated every trained Model."""
    rows = runs.metrics(result)
    assert [row["step"] for row in rows] == [1, 2, 3]
    bad = [(k, v) for row in rows for k, v in row.items() if not math.isfinite(v)]
    assert not bad
    for row in rows:
        updates = [v for k, v in row.items() if k.startswith("optim/") and k.endswith("updates")]
        assert min(updates) >= 1


def trains(graph: Graph) -> list[Node]:
    return [node for node in graph.sinks if node.operator.work == "train"]


def model_of(node: Node) -> Model:
    model = node.states["model"]
    assert isinstance(model, Model)
    return model


def find_loop(name: str) -> Callable[[PlainRun, loop.TrainedStep], plain_formulas.UpdateLoss]:
    """The plain loop of a shipped graph."""
    module = plain_rankers if hasattr(plain_rankers, name) else plain_algorithms
    return getattr(module, name)


def plain_run_of(name: str, graph: Graph, base: str) -> PlainRun:
    """A learner for each trained Model, and the graph function's arguments."""
    function = inspect.signature(algorithms.function_of(name)).parameters
    numbers: dict[str, Any] = {n: p.default for n, p in function.items()} | algorithms.NUMBERS
    learners = {}
    for node in trains(graph):
        model = model_of(node)
        scalar = model.head == "scalar"
        learners[model.name] = plain_formulas.learner_of(base, node.params["lr"], scalar=scalar)
    return PlainRun(base=base, learners=learners, numbers=numbers)


def difference(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, as a part of the wanted norm; the norm itself if that is 0."""
    off = sum(float((ours[name] - w).double().square().sum()) for name, w in wanted.items())
    whole = sum(float(w.double().square().sum()) for w in wanted.values())
    return math.sqrt(off / (whole or 1.0))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FIRST else pytest.mark.long) for n in algorithms.NAMES],
)
def test_each_is_the_algorithm_of_a_plain_loop(
    tiny: TinyRuns, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = algorithms.small(name, tiny.folder)
    steps = loop.watched(monkeypatch)
    result = tiny.run(graph, inproc=True)
    require_three_steps(result)
    base = str(tiny.folder / "model")
    world = plain_run_of(name, graph, base)
    models = {node.name: model_of(node).name for node in trains(graph)}
    assert [step.node for step in steps] == list(models) * 3
    for step in steps:
        learner = world.learners[models[step.node]]
        require_updates(learner, step, find_loop(name)(world, step))
    for model, learner in world.learners.items():
        assert moved_apart(learner, Path(result.trained[model])) < 1e-3


def require_updates(
    learner: loop.Learner, step: loop.TrainedStep, loss: plain_formulas.UpdateLoss
) -> None:
    """Our gradients are those of this loss; the learner makes the updates, too."""
    groups = loop.groups(step.rows)
    for update in step.updates:
        chosen = sorted(row for rows in groups if update.rows & set(rows) for row in rows)
        gradient = plain_formulas.gradients(learner.module, loss(chosen))
        assert difference(update.gradient, gradient) < 1e-5
        torch.nn.utils.clip_grad_norm_(learner.module.parameters(), 1.0)
        learner.adam.step()


def moved_apart(learner: loop.Learner, saved: Path) -> float:
    """How far our weights are from the loop's, as a part of how far they moved."""
    ours = load_file(saved / "model.safetensors")
    begun = learner.versions[0]
    named = {n: p.detach() for n, p in learner.module.named_parameters() if n in ours}
    wanted = {n: p - begun[n] for n, p in named.items()}
    assert max(float(w.abs().max()) for w in wanted.values()) > 1e-3, "the weights did not move"
    return difference({n: ours[n] - begun[n] for n in named}, wanted)


TOP_P, TEMPERATURE = 0.7, 0.8


def test_older_rows_from_behind_top_p_are_corrected(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = algorithms.small("decoupled_ppo", tiny.folder, minibatches=1, max_lag=1)
    sampling = [f"rollout.top_p={TOP_P}", f"rollout.temperature={TEMPERATURE}"]
    graph = edited(small, [*sampling, "train_policy.epochs=2"])
    steps = loop.watched(monkeypatch)
    result = tiny.run(graph, 4, inproc=True)
    world, stale = plain_run_of("decoupled_ppo", graph, str(tiny.folder / "model")), 0
    learner = world.learners["policy"]
    for step in steps:
        versions = torch.cat(loop.column(step, "rows", "version"))
        stale += int((versions < len(learner.versions) - 1).sum())
        sampled = sampled_behind_top_p(learner, step)
        loss = plain_algorithms.decoupled_ppo(world, step, sampled, TEMPERATURE)
        require_updates(learner, step, loss)
        learner.end_step()
    assert [len(step.updates) for step in steps] == [2] * 4
    assert stale > 0, "no row was stale: this is no test of a lag"
    assert moved_apart(learner, Path(result.trained["policy"])) < 1e-3


def sampled_behind_top_p(learner: loop.Learner, step: loop.TrainedStep) -> list[torch.Tensor]:
    """The log-probs of the Step's rows within top-p, by each token's version."""
    names = ("sampler_logprobs", "sampler_mass", "version")
    recorded, mass, versions = (loop.column(step, "rows", name) for name in names)
    whole, cut = [torch.zeros_like(x) for x in recorded], [torch.zeros_like(x) for x in recorded]
    for version in {int(x) for of_row in versions for x in of_row}:
        then, wrote = learner.at(version), [of_row == version for of_row in versions]
        with torch.no_grad():
            every = loop.logprobs(then, step.rows, TEMPERATURE)
            kept = loop.cut_logprobs(then, step.rows, TEMPERATURE, TOP_P, wrote)
        for row, by_it in enumerate(wrote):
            whole[row][by_it] = every[row][by_it]
            cut[row][by_it] = kept[row][by_it]
    loop.require_close(recorded, whole, "sampler_logprobs")
    behind = [a - b for a, b in zip(recorded, mass, strict=True)]
    loop.require_close(behind, cut, "sampler_logprobs - sampler_mass", 1e-4)
    assert min(float(x.min()) for x in mass) < -0.05, "nothing was cut: this compares nothing"
    return cut


def shape_of(tiny: TinyRuns, name: str) -> set[tuple[str, str, str]]:
    """Which kinds of node there are, and which of them read which."""
    planned = plan(algorithms.small(name, tiny.folder), tiny.options(workers="apart"))
    nodes = {node.name: node for node in planned.nodes}
    shape: set[tuple[str, str, str]] = set()
    for node in planned.nodes:
        shape.add((node.work, node.relation, node.region))
    for edge in planned.edges:
        reader = nodes[edge.consumer]
        shape.add((nodes[edge.producer].work, reader.work, reader.region))
    return shape


def test_no_graph_has_another_shape(tiny: TinyRuns) -> None:
    """Else it should be run below, too."""
    ours = set().union(*(shape_of(tiny, name) for name in SHAPES))
    others = {name: shape_of(tiny, name) - ours for name in algorithms.NAMES}
    assert {name for name, shape in others.items() if shape} == set()


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize("name", SHAPES)
def test_each_runs_with_every_node_apart(tiny: TinyRuns, name: str) -> None:
    graph = algorithms.small(name, tiny.folder)
    apart = tiny.run(graph, workers="apart", name="apart")
    require_three_steps(apart)
    runs.require_same_numbers(apart, tiny.run(graph, name="one"))


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize("name", [n for n in SHAPES if n != "dpo"])  # which generates nothing
def test_each_generation_may_lag(tiny: TinyRuns, name: str) -> None:
    graph = algorithms.lagging(algorithms.small(name, tiny.folder), 1)
    result = tiny.run(graph, workers="auto")
    require_three_steps(result)
    assert max(runs.column(result, "policy/lag/max")) <= 1


def test_held_out_prompts_are_evaluated_and_uniform_groups_dropped(tiny: TinyRuns) -> None:
    test = str(tiny.folder / "test.parquet")
    graph = algorithms.small("grpo", tiny.folder, eval_data=test, eval_every=2, drop_uniform=True)
    result = tiny.run(graph)
    rows = runs.metrics(result)
    kept = [row["select/kept"] for row in rows]
    assert any(0 < share < 1 for share in kept)
    assert [row["data/rows"] for row in rows] == [16 * share for share in kept]
    assert ["eval/reward" in row for row in rows] == [False, True, True]
    assert "eval/initial/reward" in rows[0]
    assert {row["eval/rows"] for row in rows[1:]} == {3.0}


def constant(completions: list[str], **columns: object) -> list[float]:
    return [1.0 for _ in completions]


def test_a_step_of_which_every_group_is_dropped_changes_no_weights(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, drop_uniform=True, reward_fn=constant)
    result = tiny.run(graph, inproc=True)
    assert [row["select/kept"] for row in runs.metrics(result)] == [0.0, 0.0, 0.0]
    trained = load_file(Path(result.trained["policy"]) / "model.safetensors")
    begun = load_file(tiny.folder / "model" / "model.safetensors")
    assert all(torch.equal(trained[name], begun[name].to(trained[name].dtype)) for name in begun)
