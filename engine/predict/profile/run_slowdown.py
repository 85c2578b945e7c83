"""What a short run tells of other runs: seconds of functions, and how much longer passes of a Model
take in a run than when one call follows another.

Owns: the comparison of the run with what is predicted of it. Does not own: the run
(short_run.py), the prediction (engine/simulation).

In a run other nodes have had the caches meanwhile, rows have other lengths in each Step, so that
memory is asked for anew, and a Worker does more than to call kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engine.plan.cost.profile import PassKey, Profile, ProfiledNode
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.predict.profile.short_run import WARM, ShortRun
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict

_STEPS = 16
"""Steps that are simulated: rows are drawn, and their mean has to be that of the run's."""


def add_functions(profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]) -> Profile:
    """Add the nodes that compute with no Model to a profile: a row's seconds with a core of its
    own, and the share of them in which it computes. Of the phases of a Program the first that has a
    node counts.
    """
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for plan, run in zip(plans, runs, strict=True):
        for node in plan.nodes:
            name, is_function = node.name, node.traits.chunked and not node.traits.computes
            if not is_function or name in seconds or name not in run.seconds:
                continue
            seconds[name] = run.seconds[name]
            if name in run.cpu:
                cpu[name] = run.cpu[name]
    return replace(profile, functions=seconds, cpu=cpu)


def compare_with_runs(profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]) -> Profile:
    """Set `in_run` of all passes that runs of these plans had, and what a message takes of
    cores beside nodes. Of what several ranks do together nothing is known, nor of rows of unknown
    length, nor of evaluations, whose rows the prediction does not know.
    """
    measured: defaultdict[PassKey, float] = defaultdict(float)
    predicted: defaultdict[PassKey, float] = defaultdict(float)
    engine = messages = 0.0
    for plan, run in zip(plans, runs, strict=True):
        costs = plan_costs(plan, profile)
        prediction = _predict_run(plan, profile, run)
        if prediction is None:
            continue
        row_seconds = _count_row_seconds(prediction)
        if run.engine:
            engine += run.engine
            messages += _count_messages(prediction)
        for node in plan.nodes:
            if node.name not in row_seconds:
                continue
            entry = costs.entry(node.name)
            if entry is not None and node.ranks == 1 and node.region != "evaluation":
                # Several nodes may have the same pass: each counts by its rows of a Step.
                measured[entry.key] += run.seconds.get(node.name, 0.0) * node.rows
                predicted[entry.key] += row_seconds[node.name] * node.rows
    longer = {key: measured[key] / predicted[key] for key in predicted if measured[key]}
    nodes: list[ProfiledNode] = []
    for node in profile.nodes:
        in_run = node.in_run * longer.get(node.key, 1.0)
        nodes.append(replace(node, in_run=in_run))
    return replace(profile, nodes=tuple(nodes), handling=engine / messages if messages else 0.0)


def _count_messages(prediction: Prediction) -> float:
    """What the coordinator hears and tells in a Step."""
    load = prediction.coordinator
    return (load.events + load.instructions) / len(prediction.steps)


def _predict_run(plan: Plan, profile: Profile, run: ShortRun) -> Prediction | None:
    """Predict a run with rows as long as this one's; None if a Model's size is unknown."""
    costs = plan_costs(plan, profile)
    computing = [node for node in plan.nodes if node.traits.computes]
    priced = [node.name for node in computing if node.work != "evaluate"]
    if run.rows is None or any(costs.unpriced_reason(name) for name in priced):
        return None
    others = [node for node in plan.nodes if not node.traits.computes]
    functions = [node.name for node in others if node.work != "train"]
    return predict(
        plan,
        steps=WARM + _STEPS,
        lengths=run.rows,
        kept=run.rows.kept,
        profile=profile,
        # One that the run did not measure takes no time: passes alone are compared.
        seconds={name: profile.functions.get(name, 0.0) for name in functions},
    )


def _count_row_seconds(prediction: Prediction) -> dict[str, float]:
    """Seconds a row, by node."""
    seconds: defaultdict[str, float] = defaultdict(float)
    rows: defaultdict[str, float] = defaultdict(float)
    # As in the run, whose first Steps do not count.
    begin = prediction.steps[WARM - 1].end
    for span in prediction.spans:
        if span.start >= begin and span.what in ("chunk", "train"):
            seconds[span.node] += span.busy
            rows[span.node] += span.rows
    return {name: seconds[name] / rows[name] for name in rows if seconds[name] and rows[name]}
