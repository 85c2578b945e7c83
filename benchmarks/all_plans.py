"""The plan that the search takes, against every plan of two cores, all of them run.

    python -m benchmarks.all_plans [--quick] [--json FILE] [--folder FOLDER]

Owns: which plans there are, the comparison, the goals. Does not own: a run and its seconds
(flow_runs.py), the graphs (predicted_cases.py), the search.

Each node with a Model is in one of two Workers, or in both, as replicas or ranks; or all are in
one Worker with both cores. A profile of each graph is measured first; by it the search takes a
plan, and the seconds of every plan are predicted just as the search predicts them. Then all are
run, in an order that is drawn anew in each round, and at last the plan that was taken and the
fastest in turns. Runs and profiles stay in FOLDER, and what is there is not measured again.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from statistics import median

import tyro

from benchmarks.flow_runs import FlowSide, step_seconds
from benchmarks.predicted import MODELS, make
from benchmarks.predicted_cases import CaseFiles, case_files, digits
from benchmarks.report import SavedResults, SideResult
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import plan
from engine.plan.cost.profile import Profile, read_profile, write_profile
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.profiler import ProfileRequest, measure_profile
from engine.simulation.step_seconds import simulate_step
from graphs.grpo import grpo
from graphs.self_play_two_models import self_play_two_models
from operators.advantage import gae
from operators.data import prompts
from operators.forward import values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.reward import reward
from operators.train import train

CHOSEN_GOAL = 1.05
"""The plan that is taken, over the fastest: seconds of a Step."""
ORDER_GOAL = 0.9
"""Share of pairs whose order is predicted right."""
APART = 1.1
"""Seconds of a slower plan over those of a faster one, from which their order counts."""
STEPS = 8
ROUNDS, FINAL_ROUNDS = 2, 4
_PLACES = ("a", "b", "a,b")
_CHOSEN, _ONE = "chosen", "one Worker"
_PLAIN = RunOptions(progress=False, samples_every=4)
_REQUEST = ProfileRequest(quick=True, repeats=3, longest=1.0, steps=6, accept_busy=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldGraph:
    """A graph all of whose plans are run."""

    name: str
    graph: Graph

    def list_nodes(self) -> list[str]:
        """Its nodes that compute with a Model."""
        planned = _plan(self.graph, replace(_PLAIN, workers="one", search="off"))
        return [n.name for n in planned.nodes if n.traits.computes or n.work == "train"]

    def list_options(self) -> Iterator[tuple[str, RunOptions]]:
        """Each way to place them, by name. Those that differ by names of Workers are one."""
        yield _ONE, replace(_PLAIN, workers="one", search="off")
        nodes = self.list_nodes()
        for places in product(_PLACES, repeat=len(nodes)):
            first = next((place for place in places if place != "a,b"), "a")
            if first == "b" or set(places) == {"a"}:
                continue
            pin = dict(zip(nodes, places, strict=True))
            name = "-".join(place.replace(",", "") for place in places)
            yield name, replace(_PLAIN, pin=pin, search="off")


def list_graphs(files: CaseFiles) -> Iterator[WorldGraph]:
    """The graphs. Of a short Step all parts count: messages, weights, chunks."""
    for lag in (0, 1):
        policy = grpo(
            files.base, files.data, digits, n=8, batch=16, max_tokens=64, beta=0.04, max_lag=lag
        )
        yield WorldGraph(name=f"GRPO at lag {lag}", graph=policy)
    yield WorldGraph(name="PPO with a critic", graph=_make_ppo(files))
    models = self_play_two_models(
        files.base, files.teacher, files.data, digits, n=4, batch=8, max_tokens=48
    )
    yield WorldGraph(name="two Models", graph=models)


def _make_ppo(files: CaseFiles) -> Graph:
    """PPO without the nodes of forward passes that a small task does without: of six nodes there
    would be 365 plans.
    """
    policy = Model("policy", files.base, trainable=True)
    critic = Model("critic", files.base, trainable=True, head="scalar")
    prompt = prompts(files.data, batch=64)
    rollout = generate(policy, prompt, max_tokens=64, name="rollout")
    score = reward(digits, rollout, name="score")
    value = values(critic, rollout)
    advantage = gae(rollout, score, value, gamma=1.0, lam=0.95)
    clipped, fit = clipped_policy_loss(advantage), value_loss(advantage, old=value, clip=0.2)
    actor = train(policy, rollout, loss=clipped, lr=1e-6)
    judge = train(critic, rollout, loss=fit, lr=1e-5)
    return Graph("ppo", actor, judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """Of a Step of one plan. measured: round by round."""

    side: FlowSide
    predicted: float
    measured: list[float] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """The median of the rounds."""
        return median(self.measured)


def compare_graph(
    world: WorldGraph, folder: Path, *, rounds: int, steps: int, most_plans: int
) -> Iterator[SideResult]:
    """Run all plans of a graph, and say how good the one is that the search takes."""
    folder.mkdir(parents=True, exist_ok=True)
    rates = _find_profile(world, folder / "profile.json")
    options = replace(_PLAIN, profile=folder / "profile.json")
    chosen = _make_measured_plan(world.graph, _CHOSEN, options, rates)
    plans: list[MeasuredPlan] = []
    for name, placed in world.list_options():
        try:
            plans.append(_make_measured_plan(world.graph, name, placed, rates))
        except PlanError as error:
            _say(f"{world.name}, {name}: no plan: {str(error).splitlines()[0]}")
    plans = [chosen, *plans[:most_plans]]
    for turn in range(rounds):
        for each in random.Random(turn).sample(plans, len(plans)):
            _run_turn(each, folder, turn, steps)
    fastest = min(plans, key=lambda each: each.usual)
    for turn in range(rounds, rounds + FINAL_ROUNDS):
        pair = (chosen, fastest) if turn % 2 else (fastest, chosen)
        for each in dict.fromkeys(pair):
            _run_turn(each, folder, turn, steps)
    yield from _show(world.name, chosen, fastest, plans)


def _show(
    name: str, chosen: MeasuredPlan, fastest: MeasuredPlan, plans: Sequence[MeasuredPlan]
) -> Iterator[SideResult]:
    over = chosen.usual / fastest.usual
    yield SideResult(name=f"{name}/plans", value=len(plans) - 1, unit="")
    yield SideResult(
        name=f"{name}/fastest: {fastest.side.name}", value=1e3 * fastest.usual, unit="ms"
    )
    slowest = max(each.usual for each in plans) / fastest.usual
    yield SideResult(name=f"{name}/slowest over fastest", value=slowest, unit="")
    yield SideResult(
        name=f"{name}/chosen over fastest", value=over, unit="", goal=CHOSEN_GOAL, least=False
    )
    right, count = 0, 0
    for one, other in combinations(plans, 2):
        faster, slower = sorted((one, other), key=lambda each: each.usual)
        if slower.usual > APART * faster.usual:
            count += 1
            right += slower.predicted > faster.predicted
    yield SideResult(name=f"{name}/pairs that differ", value=count, unit="")
    if count:
        share = right / count
        yield SideResult(name=f"{name}/order predicted", value=share, unit="", goal=ORDER_GOAL)


def _make_measured_plan(
    graph: Graph, name: str, options: RunOptions, rates: Profile
) -> MeasuredPlan:
    """Raises PlanError where there is no such plan."""
    side = FlowSide(name=name, graph=graph, options=options)
    return MeasuredPlan(side=side, predicted=simulate_step(side.plan, rates))


def _run_turn(each: MeasuredPlan, folder: Path, turn: int, steps: int) -> None:
    seconds = step_seconds(each.side.run_turn(folder, turn, steps))
    each.measured.append(seconds)
    _say(f"{each.side.name}: {1e3 * seconds:.0f} ms, predicted {1e3 * each.predicted:.0f}")


def _find_profile(world: WorldGraph, path: Path) -> Profile:
    """Read the profile of a graph, measured before if it is not there."""
    if not path.exists():
        planned = _plan(world.graph, replace(_PLAIN, workers="one", search="off"))
        measured = measure_profile(world.graph, [planned], _PLAIN, _REQUEST, _say)
        write_profile(path, measured.profile)
    return read_profile(path)


def _plan(graph: Graph, options: RunOptions) -> Plan:
    planned = plan(graph, options)
    assert isinstance(planned, Plan)
    return planned


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    folder: Path | None = None,
    only: str = "",
    rounds: int = ROUNDS,
) -> None:
    """Measure.

    Args:
        quick: a few plans and Steps of one graph; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        folder: where runs and profiles stay; a temporary one by default.
        only: the name of one graph, to measure it alone.
        rounds: of all plans, before the last ones of two of them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        base, _ = make(place, MODELS[0])
        (place / "teacher").mkdir(exist_ok=True)
        teacher, _ = make(place / "teacher", MODELS[1])
        results = SavedResults(json)
        limits: Mapping[str, int] = {"rounds": rounds, "steps": STEPS, "most_plans": 1000}
        graphs = list(list_graphs(case_files(place, base, teacher)))
        if quick:
            graphs, limits = graphs[:1], {"rounds": 1, "steps": 3, "most_plans": 2}
        for world in graphs:
            if only in ("", world.name):
                where = place / world.name.replace(" ", "-")
                results.add(*compare_graph(world, where, **limits))
        results.show("all_plans")


if __name__ == "__main__":
    tyro.cli(main)
