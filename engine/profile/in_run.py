"""How much longer passes of a Model take in a run than when one call follows another.

Owns: the comparison of a short run with what is predicted of it. Does not own: the run
(short_run.py), the prediction (engine/simulate).

In a run other nodes have had the caches meanwhile, rows have other lengths in each Step, so that
memory is asked for anew, and a Worker does more than to call kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.cost.devices import Kind
from engine.cost.profile import Profile, ProfiledNode
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.profile.short_run import WARM, ShortRun
from engine.simulate.predict import predict

_STEPS = 16
"""That are simulated: rows are drawn, and their mean has to be that of the run's."""

_Passes = tuple[str, Kind, str]
"""A Model (`model_key`), what is done with it, and by which kernel, on however many threads."""


def compared(profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun]) -> Profile:
    """The profile with `in_run` of all passes that runs of these plans had, on a device of one's
    own; of what several ranks do together, or of rows of unknown length, nothing is known. Raises
    PlanError for a node whose time nobody knows.
    """
    measured: Counter[_Passes] = Counter()
    predicted: Counter[_Passes] = Counter()
    for plan, run in zip(plans, runs, strict=True):
        costs, expected = plan_costs(plan, profile), _expected(plan, profile, run)
        for node in (n for n in plan.nodes if n.ranks == 1 and n.name in expected):
            entry = costs.entry(node.name)
            if entry is not None and node.name in run.seconds:
                measured[_passes(entry)] += run.seconds[node.name] * node.rows
                predicted[_passes(entry)] += expected[node.name] * node.rows
    longer = {passes: measured[passes] / predicted[passes] for passes in predicted}
    nodes = (replace(n, in_run=longer.get(_passes(n), n.in_run)) for n in profile.nodes)
    return replace(profile, nodes=tuple(nodes))


def _passes(entry: ProfiledNode) -> _Passes:
    return entry.model, entry.kind, entry.kernel


def _expected(plan: Plan, profile: Profile, run: ShortRun) -> dict[str, float]:
    """Seconds a row, by node, of rows as long as the run's."""
    if run.rows is None or not run.steps:
        return {}
    seconds: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    found = predict(plan, steps=WARM + _STEPS, lengths=run.rows, profile=profile)
    begin = found.steps[WARM - 1].end
    for span in found.spans:
        if span.start >= begin and span.what in ("chunk", "train"):
            seconds[span.node] += span.busy
            rows[span.node] += span.rows
    return {name: seconds[name] / rows[name] for name in rows if seconds[name] and rows[name]}
