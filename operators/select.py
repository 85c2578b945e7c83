"""Selection: the only operator that removes rows, and the columns that say which rows stay.

Owns: the declarations, and the formulas of `mixed_groups`, `best_of` and `pair`. Does not own:
replacing removed rows (refill is the coordinator's).
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, overload

import numpy as np

from dataflow.calls import call_error
from dataflow.limits import flag, number, whole
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Subset, call_site, declares, refuse_unknown
from dataflow.schema import Keep, Preference, Reward, Schema
from dataflow.user import Columns, column_operator

A = TypeVar("A", bound=Schema)
B = TypeVar("B", bound=Schema)
C = TypeVar("C", bound=Schema)
D = TypeVar("D", bound=Schema)


def _mixed_groups(score: Columns[Reward], *, tolerance: float) -> Columns[Keep]:
    reward = score["reward"].astype(np.float64)
    group = score.groups
    low = np.full(group.max(initial=-1) + 1, np.inf)
    high = np.full(len(low), -np.inf)
    np.minimum.at(low, group, reward)
    np.maximum.at(high, group, reward)
    is_mixed = high - low > tolerance
    return Columns.make(Keep, like=score, keep=is_mixed[group].astype(np.uint8))


def _best_of(score: Columns[Reward], *, k: int, above: float | None) -> Columns[Keep]:
    reward, group = score["reward"], score.groups
    # By group, then from the greatest reward down, then by sample.
    order = np.lexsort((score.keys.sample, -reward, group))
    first_of_group = np.searchsorted(group[order], group[order])
    rank = np.arange(len(order)) - first_of_group
    keep = np.zeros(len(score), dtype=np.uint8)
    keep[order[rank < k]] = 1
    if above is not None:
        keep &= (reward > above).astype(np.uint8)
    return Columns.make(Keep, like=score, keep=keep)


def _pair(score: Columns[Reward], *, margin: float) -> Columns[Preference]:
    reward = score["reward"].astype(np.float64)
    group, sample = score.groups, score.keys.sample
    size = np.bincount(group)
    first_of_group = np.cumsum(size) - size
    best = np.lexsort((sample, -1 * reward, group))[first_of_group]
    worst = np.lexsort((sample, reward, group))[first_of_group]
    apart = reward[best] - reward[worst] > margin
    sign = np.zeros(len(score), dtype=np.int8)
    sign[best[apart]] = 1
    sign[worst[apart]] = -1
    return Columns.make(Preference, like=score, keep=np.abs(sign).astype(np.uint8), sign=sign)


MIXED_GROUPS = column_operator(
    _mixed_groups,
    "operators.select:MIXED_GROUPS",
    name="mixed_groups",
    scope="group",
    whole_episodes=True,
    columns={"score": ("reward",)},
    keeps="groups",
    limits={"tolerance": number(0.0, like=0.0)},
)
BEST_OF = column_operator(
    _best_of,
    "operators.select:BEST_OF",
    name="best_of",
    scope="group",
    whole_episodes=True,
    columns={"score": ("reward",)},
    keeps="rows",
    limits={"k": whole(1, like=1), "above": number(like=0.0, optional=True)},
)
PAIR = column_operator(
    _pair,
    "operators.select:PAIR",
    name="pair",
    scope="group",
    whole_episodes=True,
    columns={"score": ("reward",)},
    keeps="pairs",
    limits={"margin": number(0.0, like=0.0)},
)
SELECT = Operator(
    path="operators.select:SELECT",
    name="select",
    work="select",
    rows=Subset("where"),
    inputs=(Input(name="where", schema=Keep, columns=("keep",)),),
    variadic=Input(name="port", schema=Schema, columns=()),
    kernels={"host": "operators.kernels.host:Select"},
    limits={"refill": flag(), "max_attempts": whole(1, like=10)},
)


@declares
def mixed_groups(
    score: Port[Reward], *, tolerance: float = 0.0, name: str = "mixed_groups"
) -> Port[Keep]:
    """Keep groups whose rewards differ by more than tolerance: DAPO's dynamic sampling, verl's
    filter_groups.
    """
    return Node(MIXED_GROUPS, name, inputs={"score": score}, params={"tolerance": tolerance}).port()


@declares
def best_of(
    score: Port[Reward], *, k: int = 1, above: float | None = None, name: str = "best_of"
) -> Port[Keep]:
    """Keep the k rows of each group with the greatest reward (ties: the lower sample), if above the
    bound.
    """
    return Node(BEST_OF, name, inputs={"score": score}, params={"k": k, "above": above}).port()


@declares
def pair(score: Port[Reward], *, margin: float = 0.0, name: str = "pair") -> Port[Preference]:
    """Of each group the row with the greatest reward (sign +1) and that with the least (-1), if
    they differ by more than margin; of other groups none. Ties: the lower sample.

    `pairs = pair(score)`, then `rollout, pairs = select(rollout, pairs, where=pairs, refill=True)`:
    groups of two rows for dpo_loss, which is online DPO (arXiv:2402.04792).
    """
    return Node(PAIR, name, inputs={"score": score}, params={"margin": margin}).port()


def _declare_options(
    *, where: Port[Keep], refill: bool = False, max_attempts: int = 10, name: str = "select"
) -> None:
    """The options of select besides its ports."""


_SIGNATURE = inspect.signature(_declare_options)


@overload
def select(
    a: Port[A],
    /,
    *,
    where: Port[Keep],
    refill: bool = ...,
    max_attempts: int = ...,
    name: str = ...,
) -> Port[A]: ...
@overload
def select(
    a: Port[A],
    b: Port[B],
    /,
    *,
    where: Port[Keep],
    refill: bool = ...,
    max_attempts: int = ...,
    name: str = ...,
) -> tuple[Port[A], Port[B]]: ...
@overload
def select(
    a: Port[A],
    b: Port[B],
    c: Port[C],
    /,
    *,
    where: Port[Keep],
    refill: bool = ...,
    max_attempts: int = ...,
    name: str = ...,
) -> tuple[Port[A], Port[B], Port[C]]: ...
@overload
def select(
    a: Port[A],
    b: Port[B],
    c: Port[C],
    d: Port[D],
    /,
    *,
    where: Port[Keep],
    refill: bool = ...,
    max_attempts: int = ...,
    name: str = ...,
) -> tuple[Port[A], Port[B], Port[C], Port[D]]: ...
def select(*ports: Any, **options: Any) -> Any:
    """The rows of the ports that `where` keeps; nothing else removes rows.

    refill: another prompt takes the place of a removed one, so that the Step is full; max_attempts
    limits how many prompts are tried for each place before the run stops with the reason. Nodes
    before this one saw the removed rows (a baseline counted them), nodes after it do not.
    """
    refuse_unknown("select", _SIGNATURE, (), options)
    if not ports:
        raise call_error("select", "expected ports, found none", "select(rollout, where=keep)")
    where, name = options["where"], options.get("name", "select")
    params = {
        "refill": options.get("refill", False),
        "max_attempts": options.get("max_attempts", 10),
    }
    inputs = {"where": where}
    inputs.update((f"port{i}", port) for i, port in enumerate(ports))
    schemas = tuple(port.schema if isinstance(port, Port) else Schema for port in ports)
    node = Node(SELECT, name, inputs=inputs, params=params, schemas=schemas, origin=call_site())
    if len(ports) > 1:
        return node.ports
    return node.port()
