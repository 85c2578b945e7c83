"""What a short run tells of other runs: seconds of functions, and how much longer passes of a Model
take in a run than when one call follows another.

Owns: the comparison of the run with what is predicted of it. Does not own: the run
(short_run.py), the prediction (engine/simulate).

In a run other nodes have had the caches meanwhile, rows have other lengths in each Step, so that
memory is asked for anew, and a Worker does more than to call kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engine.cost.profile import PassKey, Profile
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.profile.short_run import WARM, ShortRun
from engine.simulate.predict import predict
from engine.simulate.priced import SHARES, squeezed

_STEPS = 16
"""That are simulated: rows are drawn, and their mean has to be that of the run's."""


def functions_alone(
    profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]
) -> dict[str, float]:
    """Seconds a row of the nodes that compute with no Model, had each a core of its own: a run that
    keeps all cores busy lengthens them, and so will a prediction. Of the phases of a Program the
    first that has a node counts.
    """
    found: dict[str, float] = {}
    for plan, run in zip(plans, runs, strict=True):
        costs = plan_costs(plan, profile)
        for node in (n for n in plan.nodes if not n.traits.computes and n.traits.chunked):
            if node.name in run.seconds:
                shares = SHARES if squeezed(plan, costs, node) else 1.0
                found.setdefault(node.name, run.seconds[node.name] / shares)
    return found


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
    found = predict(plan, steps=WARM + _STEPS, lengths=run.rows, profile=profile, seconds=given)
    begin = found.steps[WARM - 1].end
    for span in found.spans:
        if span.start >= begin and span.what in ("chunk", "train"):
            seconds[span.node] += span.busy
            rows[span.node] += span.rows
    return {name: seconds[name] / rows[name] for name in rows if seconds[name] and rows[name]}
