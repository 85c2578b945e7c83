"""Whether a Step changed the weights of the Models that it trains, by its metrics.

Owns: what was 0 where one did not. Does not own: after how many such Steps a user is told
(silent_failures.py), the metrics (docs/metrics.md), which weights a kernel compares for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.model import Model
from engine.plan.metric_labels import metric_labels
from engine.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A Model of a train node. prefix: of the metrics of its optimizer. start: no update is made
    before this Step. every: nor in one whose number this does not divide.
    """

    name: str
    prefix: str
    start: int
    every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """What was 0, in words, and what may change it."""

    cause: str
    fix: str


GRADIENT = Standstill(
    cause="its gradient was exactly 0",
    fix=(
        "look at the advantages with dataflow peek TARGET NODE: a baseline may be the score, a"
        " weight 0"
    ),
)
_RATE = Standstill(
    cause="its learning rate was 0", fix="a schedule of lr= that ends later, or fewer Steps"
)
_LEAST_RATE = 1e-12
"""AdamW moves a weight by about the rate, and float32 has no number so near to one of 1e-4."""
_MASKED = Standstill(
    cause="no update was made, as no row had a token to train",
    fix="look at the answers, and at what makes their completion_mask",
)
_NO_ROW = Standstill(
    cause="no update was made, as there was no row", fix="refill=True in select(...)"
)
_UNCHANGED = Standstill(
    cause=(
        "its updates changed none of the weights that were compared, some of each tensor: they were"
        " too small for float32"
    ),
    fix="a larger lr, a smaller eps in optimizer=AdamW(eps=...), or a larger clip_norm",
)


def list_trained_models(plan: Plan) -> tuple[TrainedModel, ...]:
    """List the Models that a plan trains, in the order of its train nodes."""
    if plan.program is None:
        return ()
    models: list[TrainedModel] = []
    for name, label in metric_labels(plan).items():
        node = plan.program.node(name)
        model = next(state for state in node.states.values() if isinstance(state, Model))
        prefix = label.on("optim/updates").removesuffix("updates")
        start, every = node.params.get("start", 0), node.params.get("every", 1)
        models.append(TrainedModel(name=model.name, prefix=prefix, start=start, every=every))
    return tuple(models)


def find_standstills(
    models: Sequence[TrainedModel], metrics: Mapping[str, float], step: int, last: int | None
) -> dict[str, Standstill | None]:
    """Find why each Model's weights stayed as they were in a Step, or None where they changed; by
    Model. A Model of which the metrics do not tell is left out.

    last: the run's last Step, if it is known. A Model that begins later stands still on purpose as
    long as another one learns, and is left out, too, as it is between two Steps that train it.
    """
    reporting = [model for model in models if f"{model.prefix}updates" in metrics]
    learning = {model.name for model in reporting if metrics[f"{model.prefix}updates"] > 0}
    standstills: dict[str, Standstill | None] = {}
    for model in reporting:
        never_begins = last is not None and max(model.start, model.every) > last
        others_learn = bool(learning - {model.name})
        is_between = step >= model.start and step % model.every > 0
        waits = step < model.start and others_learn
        if (is_between or waits) and not never_begins:
            continue
        standstills[model.name] = _find_standstill(model, metrics, step)
    return standstills


def _find_standstill(
    model: TrainedModel, metrics: Mapping[str, float], step: int
) -> Standstill | None:
    if metrics[f"{model.prefix}updates"] == 0:
        if step < model.start:
            cause = f"no update was made before Step {model.start} (train(start={model.start}))"
            return Standstill(cause=cause, fix="an earlier start=, or more Steps")
        if step % model.every:
            cause = f"no update was made before Step {model.every} (train(every={model.every}))"
            return Standstill(cause=cause, fix="a smaller every=, or more Steps")
        if metrics.get(f"{model.prefix}skipped"):
            return _MASKED
        return _NO_ROW
    rate = metrics.get(f"{model.prefix}lr", 1.0)
    if 0 < rate < _LEAST_RATE:
        cause = f"its learning rate was {rate:g}, which moves no weight of float32"
        return Standstill(cause=cause, fix="lr=1e-6")
    if rate == 0:
        return _RATE
    if metrics.get(f"{model.prefix}grad_norm") == 0:
        return GRADIENT
    if metrics.get(f"{model.prefix}changed") == 0:
        return _UNCHANGED
    return None
