"""Metrics of the rows of a Step.

Owns: the row metrics (docs/metrics.md) of each train node. Does not own: metrics of kernels, and
of weights (weight_metrics.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from dataflow.arrays import any_true, steps_between
from dataflow.batch import Batch
from dataflow.schema import Reward
from engine.plan.planned_input import Fetch, PlannedInput
from engine.protocol.reports import Report
from engine.run.worker.weight_metrics import weight_metrics


def step_metrics(
    recorded: Iterable[PlannedInput],
    rows: Mapping[str, Batch],
    slots: Mapping[str, int] | None = None,
) -> Iterator[Report]:
    """Metrics of the rows of each recorded train node, once for those with the same rows and
    rewards: `rows/<node>/...` where there are several. data/rows and completion/tokens count
    shared rows once. slots: of all replicas of each generation.
    """
    nodes = list(recorded)
    firsts: dict[str, PlannedInput] = {}
    for node in nodes:
        firsts.setdefault(node.gate, node)
    for node in firsts.values():
        yield "data/rows", float(len(rows[node.name])), 1.0
        yield "completion/tokens", float(_tokens(rows[node.name])), 1.0
    several = _with_rows_of_their_own(nodes)
    for node in several:
        prefix = f"rows/{node.name}/" if len(several) > 1 else ""
        for name, number, count in row_metrics(rows[node.name], _slots_of(node, slots or {})):
            yield f"{prefix}{name}", number, count


def _slots_of(node: PlannedInput, slots: Mapping[str, int]) -> int:
    """The slots of the one generation that made its answers; 0 of several, and of none."""
    generations = {f.producer for f in node.fetches if "completion_mask" in f.columns}
    if len(generations) != 1:
        return 0
    return slots.get(generations.pop(), 0)


def _with_rows_of_their_own(nodes: Sequence[PlannedInput]) -> list[PlannedInput]:
    """The nodes without those whose rows and rewards are those of a node before."""
    measured: list[tuple[str, Sequence[Fetch]]] = []
    firsts = []
    for node in nodes:
        what = (node.gate, [f for f in node.fetches if "advantage" not in f.columns])
        if what not in measured:
            measured.append(what)
            firsts.append(node)
    return firsts


def row_metrics(rows: Batch, slots: int = 0) -> Iterator[Report]:
    """(metric, value, count) of each number that these rows' columns allow. slots: of the
    generation of their answers, 0 where nobody knows them.
    """
    if not len(rows):
        return
    names = [name for name in rows.names if name.partition("/")[0] == "reward"]
    rewarded = rows.select(names)
    if {"episode", "segment"} <= set(rows.names):
        rewarded = sum_by_episode(rewarded, rows.flat("segment"))
    for name in names:
        yield from _spread(name, rewarded.array(name))
    yield from _no_signal(rewarded)
    if "completion_mask" in rows.names:
        lengths = rows.lengths("completion_mask")
        yield "completion/length/mean", float(lengths.mean()), len(lengths)
        yield "completion/length/max", float(lengths.max()), 1.0
        yield "completion/length/min", float(lengths.min()), 1.0
    if "finish" in rows.names:
        yield "completion/truncated", float((rows.flat("finish") == "length").mean()), len(rows)
    yield from weight_metrics(rows, slots)


def sum_by_episode(rewards: Batch, segment: np.ndarray) -> Batch:
    """Rewards of episodes that have several rows: a row for each, with the sums; null where none of
    its rows has a number. segment: int32 [rows], which of its episode's rows each is; they stand
    next to one another.
    """
    number, first_rows = rewards.keys.number_episodes(segment)
    sums: dict[str, pa.Array] = {}
    for name in rewards.names:
        column = rewards.array(name)
        is_known = np.asarray(column.is_valid())
        numbers = column.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        known_count = np.bincount(number, weights=is_known)
        total = np.bincount(number, weights=numbers).astype(np.float32)
        sums[name] = pa.array(total, mask=known_count == 0)
    return Batch.make(rewards.keys.take(first_rows), sums, Reward)


def _tokens(rows: Batch) -> int:
    if "completion_mask" not in rows.names:
        return 0
    return int(rows.lengths("completion_mask").sum())


def _spread(name: str, column: pa.Array) -> Iterator[Report]:
    """Mean and (population) standard deviation over the rows that have a number, and their share,
    where some of a function's have none.
    """
    if column.null_count:
        yield f"{name}/applied", 1.0 - column.null_count / len(column), len(column)
    values = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
    if len(values):
        # As `mean` and `std` compute them, without what a call of these costs.
        mean = np.add.reduce(values) / len(values)
        off = values - mean
        yield f"{name}/mean", float(mean), len(values)
        yield f"{name}/std", math.sqrt(np.add.reduce(off * off) / len(values)), len(values)


def _no_signal(rows: Batch) -> Iterator[Report]:
    """The share of groups, of two rows or more, whose rewards are all equal."""
    if "reward" not in rows.names:
        return
    position = rows.keys.position
    rewards = rows.array("reward").to_numpy(zero_copy_only=False)
    between = steps_between(position)
    if any_true(between < 0):
        order = position.argsort(kind="stable")
        rewards, between = rewards[order], steps_between(position[order])
    starts = np.concatenate([[0], between.nonzero()[0] + 1])
    several = steps_between(np.append(starts, len(position))) > 1
    groups = int(np.count_nonzero(several))
    if groups:
        equal = np.minimum.reduceat(rewards, starts) == np.maximum.reduceat(rewards, starts)
        yield "reward/no_signal", int(np.count_nonzero(equal & several)) / groups, groups
