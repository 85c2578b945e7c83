"""Sinks: training and evaluation.

Owns: the declarations. Does not own: losses (losses.py), optimizers (optimizers.py and
the train kernel), when an evaluation runs (the coordinator).
"""

from __future__ import annotations

from typing import Literal

from dataflow.errors import Fault, GraphError
from dataflow.limits import choice, flag, number, whole
from dataflow.loss import Loss
from dataflow.model import Model, Number
from dataflow.node import Node, Port
from dataflow.operator import Input, Nothing, Operator, call_site, declares
from dataflow.schema import Completion, Reward, Schema
from operators.optimizers import AdamW

_COLUMNS = (
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "sampler_logprobs",
    "sampler_mass",
    "version",
)

_ROWS = Input(name="rows", schema=Completion, columns=_COLUMNS)

_TERMS = Input(name="loss", schema=Schema)

_UPDATES = {
    "epochs": whole(1, like=1),
    "minibatches": whole(1, like=1),
    "start": whole(0, like=0),
    "every": whole(1, like=4),
}
"""How many updates a Step makes, and which Steps make some."""

TRAIN = Operator(
    path="operators.train:TRAIN",
    name="train",
    work="train",
    scope="batch",
    rows=Nothing(),
    inputs=(_ROWS,),
    variadic=_TERMS,
    writes=("model",),
    kernels={"torch": "operators.kernels.torch.train:TorchTrain"},
    schedulable=("lr",),
    limits={
        "lr": number(0.0, above=True, like=1e-6),
        "aggregate": choice("token_mean", "sequence_mean", "sequence_sum", "constant"),
        "masked_rows": choice("skip", "count"),
        "temperature": number(0.0, above=True, like=1.0, optional=True),
        "clip_norm": number(0.0, above=True, like=1.0),
        **_UPDATES,
        "intake": choice("exact", "admission", "drop"),
    },
    fixed={"start": "it says at which Step the first update is made, from the start of the run on"},
)

_SCORE = Input(name="score", schema=Reward)

EVALUATE = Operator(
    path="operators.train:EVALUATE",
    name="evaluate",
    work="evaluate",
    scope="batch",
    whole_episodes=True,
    rows=Nothing(),
    inputs=(_SCORE,),
    reads=("model",),
    kernels={"host": "operators.kernels.host:HostEvaluate"},
    limits={"every": whole(1, like=50), "keep_best": whole(0, like=0), "allow_train_data": flag()},
)

Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@declares
def train(
    model: Model,
    rows: Port[Completion],
    *,
    loss: Loss,
    lr: Number,
    optimizer: Literal["adamw"] | AdamW = "adamw",
    aggregate: Aggregate = "token_mean",
    masked_rows: Literal["skip", "count"] = "skip",
    temperature: float | None = None,
    epochs: int = 1,
    minibatches: int = 1,
    clip_norm: float = 1.0,
    start: int = 0,
    every: int = 1,
    intake: Literal["exact", "admission", "drop"] = "exact",
    name: str | None = None,
) -> Node:
    """Minimise a loss over the rows of each Step: epochs * minibatches updates of one optimizer
    step.

    aggregate: how token terms become one number: `token_mean` over the update, `sequence_mean` of
    token means, `sequence_sum` (mean over rows of token sums), `constant`: sum / (rows of a full
    update * max_tokens), the same divisor however many rows a selection left and however short they
    are (Dr. GRPO, arXiv:2503.20783). masked_rows: whether a row without a trained token counts in a
    mean over rows: `skip` as in verl and OpenRLHF, or `count`, as 0, as in TRL's grpo; the constant
    counts them all. temperature: of the log-probs that the loss reads; None is the rollout's, which
    a ratio needs (1 if it was greedy), and 1 for supervised losses. Terms with rows of their own
    (`rows=`) are trained in the same updates, each set of rows divided into as many minibatches, at
    the temperature of these rows. start: Steps before this one consume rows without training.
    every: so do all but each `every`-th. intake: which finished rows are trained first when rows
    may lag.
    """
    if not isinstance(loss, Loss):
        raise _not_a_loss(loss)
    if not (optimizer == "adamw" or isinstance(optimizer, AdamW)):
        raise _not_an_optimizer(optimizer)
    bound, ports = loss.bound()
    params = {
        "loss": bound,
        "lr": lr,
        "optimizer": optimizer,
        "aggregate": aggregate,
        "masked_rows": masked_rows,
        "temperature": temperature,
        "epochs": epochs,
        "minibatches": minibatches,
        "clip_norm": clip_norm,
        "start": start,
        "every": every,
        "intake": intake,
    }
    default = f"train_{model.name}" if isinstance(model, Model) else "train"
    return Node(
        TRAIN,
        name or default,
        states={"model": model},
        inputs={"rows": rows, **ports},
        params=params,
    )


@declares
def evaluate(
    model: Model,
    score: Port[Reward],
    *,
    every: int,
    keep_best: int = 0,
    allow_train_data: bool = False,
    name: str = "evaluate",
) -> Node:
    """Run the graph above `score` to the end of its (finite) source, at one version of the Model.

    every: at the start, after each `every` Steps, and at the end. keep_best: how many of the best
    versions, by the mean of `score`, stay on disk. Metrics are `eval/reward` (that mean) and
    `eval/<function>` for each reward function; `eval/<name>/...` if the node has another name.
    """
    params = {"every": every, "keep_best": keep_best, "allow_train_data": allow_train_data}
    return Node(EVALUATE, name, states={"model": model}, inputs={"score": score}, params=params)


def _not_an_optimizer(argument: object) -> GraphError:
    fault = Fault(
        rule="call",
        where="train.optimizer",
        problem=f"expected 'adamw' or AdamW(...), found {argument!r:.60}",
        fix='optimizer="adamw"',
        origin=call_site(),
    )
    return GraphError(fault)


def _not_a_loss(argument: object) -> GraphError:
    fix = (
        "loss=clipped_policy_loss(advantage), or what a @loss function returned when called with"
        " Ports"
    )
    fault = Fault(
        rule="call",
        where="train.loss",
        problem=f"expected a Loss, found {type(argument).__name__} {argument!r:.60}",
        fix=fix,
        origin=call_site(),
    )
    return GraphError(fault)
