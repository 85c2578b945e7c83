"""What a short run tells of other runs: seconds of functions, and how much longer passes of a Model
take in a run than when one call follows another.

Owns: the comparison of the run with what is predicted of it. Does not own: the run
(short_run.py), the prediction (engine/predict/simulation).

In a run other nodes have had the caches meanwhile, rows have other lengths in each Step, so that
memory is asked for anew, and a Worker does more than to call kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engine.plan.cost.profile import PassKey, Profile
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.predict.profile.short_run import WARM, ShortRun
from engine.predict.simulation.prediction_run import predict

_STEPS = 16
"""That are simulated: rows are drawn, and their mean has to be that of the run's."""


def with_functions(profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]) -> Profile:
    """The profile with the nodes that compute with no Model: a row's seconds with a core of its
    own, and the share of them in which it computes. Of the phases of a Program the first that has a
    node counts.
    """
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for plan, run in zip(plans, runs, strict=True):
        functions = (n.name for n in plan.nodes if not n.traits.computes and n.traits.chunked)
        for name in (name for name in functions if name in run.seconds and name not in seconds):
            seconds[name] = run.seconds[name]
            if name in run.cpu:
                cpu[name] = run.cpu[name]
    return replace(profile, functions=seconds, cpu=cpu)


def compared(profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]) -> Profile:
    """The profile with `in_run` of all passes that runs of these plans had. Of what several ranks
    do together nothing is known, nor of rows of unknown length, nor of evaluations, whose rows the
    prediction does not know.
    """
    measured: defaultdict[PassKey, float] = defaultdict(float)
    predicted: defaultdict[PassKey, float] = defaultdict(float)
    for plan, run in zip(plans, runs, strict=True):
        costs, expected = plan_costs(plan, profile), _expected(plan, profile, run)
        for node in (n for n in plan.nodes if n.name in expected):
            entry = costs.entry(node.name)
            if entry is not None and node.ranks == 1 and node.region != "evaluation":
                measured[entry.key] += run.seconds.get(node.name, 0.0) * node.rows
                predicted[entry.key] += expected[node.name] * node.rows
    longer = {each: measured[each] / predicted[each] for each in predicted if measured[each]}
    nodes = (replace(n, in_run=n.in_run * longer.get(n.key, 1.0)) for n in profile.nodes)
    return replace(profile, nodes=tuple(nodes))


def _expected(plan: Plan, profile: Profile, run: ShortRun) -> dict[str, float]:
    """Seconds a row, by node, of rows as long as the run's; none if a Model's size is unknown."""
    costs = plan_costs(plan, profile)
    computing = [n.name for n in plan.nodes if n.traits.computes and n.work != "evaluate"]
    if run.rows is None or any(costs.unpriced(name) for name in computing):
        return {}
    others = [n.name for n in plan.nodes if not n.traits.computes and n.work != "train"]
    given = {name: profile.functions.get(name, 0.0) for name in others}
    seconds: defaultdict[str, float] = defaultdict(float)
    rows: defaultdict[str, float] = defaultdict(float)
    arguments = {"lengths": run.rows, "kept": run.rows.kept, "profile": profile, "seconds": given}
    prediction = predict(plan, steps=WARM + _STEPS, **arguments)
    begin = prediction.steps[WARM - 1].end
    for span in prediction.spans:
        if span.start >= begin and span.what in ("chunk", "train"):
            seconds[span.node] += span.busy
            rows[span.node] += span.rows
    return {name: seconds[name] / rows[name] for name in rows if seconds[name] and rows[name]}
