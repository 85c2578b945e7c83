"""Seconds of a Step of a plan, by simulating a few: how the layouts of a search are compared.

Owns: how many, and what is assumed of what nobody knows. Does not own: the simulation
(prediction_run.py), the choice (engine/plan/layout_choice.py).
"""

from __future__ import annotations

from statistics import mean

from engine.plan.cost.distribution import assumed_answers
from engine.plan.cost.profile import Profile
from engine.plan.costs import PlanCosts, plan_costs
from engine.plan.plan import Plan
from engine.plan.priced_work import ASSUMED, StepLengths
from engine.plan.step_price import price_step
from engine.simulation.lengths import DrawnLengths, UnknownDistributions
from engine.simulation.prediction_run import predict

_STEPS = 4
_MOST_ROWS = 100_000
"""Rows of a Step, at each of its nodes, of which a simulation is too long: then prices count."""


def simulate_step(
    plan: Plan, profile: Profile | None = None, lengths: StepLengths = ASSUMED
) -> float:
    """Seconds of a Step, with answers of these lengths: the mean of some, without the first and the
    last. A function that nobody has measured takes none. Of very large Steps the price counts
    (engine/plan/step_price.py). Raises PlanError where the seconds of a Model's node are not known.
    """
    batches = {source.name: source.batch for source in plan.sources}
    rows = sum(batches.get(node.source, 0) * node.rows for node in plan.nodes)
    if rows > _MOST_ROWS:
        return price_step(plan, lengths, profile=profile).seconds()
    drawn = DrawnLengths(plan, UnknownDistributions(), plan.seed)
    lengths_of_nodes = [drawn.greatest(node.name) for node in plan.nodes]
    longest = max((lengths.completion for lengths in lengths_of_nodes), default=0)
    costs = plan_costs(plan, profile)
    answers = lengths.answers or assumed_answers(max(1, longest))
    prediction = predict(
        plan,
        steps=_STEPS,
        lengths=UnknownDistributions(prompts=lengths.prompts, answers=answers),
        profile=profile,
        seconds=_list_unknown(plan, costs),
        spans=False,
    )
    return mean(step.end - step.start for step in prediction.steps[1:-1])


def _list_unknown(plan: Plan, costs: PlanCosts) -> dict[str, float]:
    """Functions of which nobody knows how long they take."""
    names: dict[str, float] = {}
    for node in plan.nodes:
        is_function = not node.traits.computes and node.work not in ("train", "evaluate")
        if is_function and costs.function(node.name, 1) is None:
            names[node.name] = 0.0
    return names
