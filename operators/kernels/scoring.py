"""Rewards by the user's functions: the kernel of `reward`.

Owns: the weighted sum over the functions that apply, and handling failures: finding the row, then
stopping the run or dropping the row. Does not own: the declaration (operators/reward.py), the
columns that each function gets (scoring_columns.py), the processes (scoring_process.py), the call
(scoring_child.py).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Reward as RewardSchema
from operators.kernels.scoring_columns import Function, columns_for, episode_columns_for
from operators.kernels.scoring_frames import FaultKind, ScoringFault, ScoringOutcome
from operators.kernels.scoring_process import Children, InProcess, Scorers
from operators.rewards import CALL_TIMEOUT, part_names, wants

_log = logging.getLogger(__name__)

FIXES: dict[str, str] = {
    "raised": "correct the function",
    "type": "return a list with one number for each completion; None where it does not apply",
    "length": "one value per completion; None where it does not apply",
    "value": "one finite number per completion; None where it does not apply",
    "timeout": "a faster function or a longer timeout=",
    "metric": (
        "log_metric(name, value): a name of 1 to 100 characters that can be printed, and a finite"
        " number"
    ),
    "answer": (
        "a function that ends its forks by os._exit and leaves descriptors alone that it did not"
        " open"
    ),
    "died": "a function that does not end its process",
    "nothing": "a function that applies to every row",
}
_ROWS_ALONE = frozenset({"raised", "timeout", "answer", "died", "nothing"})
"""Faults for which on_error="drop_group" is advised: other rows may be fine."""


class HostReward:
    """Kernel of `reward`: each function runs in its own child process, all at once.

    params: fns; weights (default: all 1); timeout: seconds for one call; on_error: `stop` or
    `drop_group`; episodes: whether the rows are such; segments: whether an episode may have several
    of them, of which the last one is scored. The node's scope is the smallest set of rows on which
    a failed call is repeated; inproc calls the functions in this process (no time limit).
    """

    fixes: ClassVar[Mapping[str, str]] = FIXES

    def __init__(self) -> None:
        self._scorers: Scorers | None = None

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Start the children. Raises KernelError (cannot be shipped) or GraphError (cannot fit)."""
        fns = tuple(node.params["fns"])
        weights = node.params.get("weights") or (1.0,) * len(fns)
        names = part_names(node.params)
        self._node = node.name
        self._session = session
        self._functions: list[Function] = []
        for name, fn, weight in zip(names, fns, weights, strict=True):
            self._functions.append(Function(name=name, asked=wants(fn), weight=weight))
        self._timeout = float(node.params.get("timeout", CALL_TIMEOUT))
        self._drop = node.params.get("on_error", "stop") == "drop_group"
        self._by_group = node.scope == "group"
        self._has_episodes = bool(node.params.get("episodes"))
        self._has_segments = bool(node.params.get("segments"))
        self._entry_names: set[str] = set()
        """Of the environments' states, those of all rows so far."""
        if node.inproc:
            self._scorers = InProcess(names, fns)
        else:
            self._scorers = Children(names, fns, self._timeout)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Yield `reward` and, nullable, `reward/<function>`; dropped rows are tombstoned.

        Raises KernelError naming function and rows if a call fails and on_error is `stop`.
        """
        if self._has_segments:
            finishes = chunk.inputs["rows"].flat("finish")
            is_last = np.array([finish != "segment" for finish in finishes], bool)
            yield from self._leave_unscored(chunk.keys.take(~is_last))
            rows = chunk.inputs["rows"].take(np.flatnonzero(is_last))
            chunk = replace(chunk, keys=chunk.keys.take(is_last), inputs={"rows": rows})
        yield from self._score(chunk)

    def _leave_unscored(self, keys: Keys) -> Iterator[Batch]:
        """Rows of episodes that go on in another row: reward 0, of no function."""
        if len(keys):
            rewards = np.full((len(keys), len(self._functions)), np.nan)
            yield self._batch(keys, rewards, np.ones(len(keys), bool))

    def _score(self, chunk: Chunk) -> Iterator[Batch]:
        """Score all rows of a chunk."""
        rows = chunk.inputs["rows"]
        calls: dict[int, pa.RecordBatch] = {}
        if len(rows):
            for i, function in enumerate(self._functions):
                calls[i] = self._columns(function, rows)
        outcomes = self._call(calls)
        rewards = np.full((len(rows), len(self._functions)), np.nan)
        lost = np.zeros(len(rows), dtype=bool)
        for i, records in calls.items():
            fault = outcomes[i].fault
            if fault is None:
                self._accept(i, outcomes[i], rewards, slice(None))
            else:
                self._narrow(i, fault, records, chunk, rewards, lost)
        lost |= self._none_applied(chunk, rewards, lost)
        if not lost.all():
            yield self._batch(chunk.keys, rewards, ~lost)

    def close(self) -> None:
        """End the children; busy ones are killed."""
        if self._scorers is not None:
            self._scorers.close()

    def _columns(self, function: Function, rows: Batch) -> pa.RecordBatch:
        """What one function receives of these rows."""
        if self._has_episodes:
            return episode_columns_for(function, rows, self._entry_names)
        return columns_for(function, rows)

    def _call(self, calls: Mapping[int, pa.RecordBatch]) -> dict[int, ScoringOutcome]:
        assert self._scorers is not None, "run before open"
        outcomes = self._scorers.score(calls)
        for outcome in outcomes.values():
            self._session.count_computed(outcome.processors)
        return outcomes

    def _narrow(
        self,
        i: int,
        fault: ScoringFault,
        records: pa.RecordBatch,
        chunk: Chunk,
        rewards: np.ndarray,
        lost: np.ndarray,
    ) -> None:
        """After a fault: call function i again on the smallest units, in a fresh process, to find
        the rows that cause it. Fills the rewards of the others, and marks these as lost.
        """
        units = _units(chunk.keys, self._by_group)
        if len(units) == 1:
            self._give_up(i, fault, units[0], records, chunk, lost)
            return
        assert self._scorers is not None, "run before open"
        self._scorers.replace(i)
        failed_again = 0
        for unit in units:
            unit_records = records.slice(unit.start, unit.stop - unit.start)
            outcome = self._call({i: unit_records})[i]
            if outcome.fault is None:
                self._accept(i, outcome, rewards, unit)
            else:
                failed_again += 1
                self._give_up(i, outcome.fault, unit, records, chunk, lost)
        if failed_again:
            return
        self._session.metric(f"reward/{self._functions[i].name}/passed_when_repeated", 1.0)
        message = self._message(i, fault, slice(0, len(chunk.keys)), records, chunk)
        _log.warning("passed when repeated: %s", message)
        if fault.kind in ("type", "length", "value", "metric"):
            # It fails only for rows together, and which rows share a chunk is chance: no answer can
            # be trusted.
            raise KernelError(message)

    def _accept(self, i: int, outcome: ScoringOutcome, rewards: np.ndarray, unit: slice) -> None:
        rewards[unit, i] = self._rewards(outcome.values, unit)
        for name, number in outcome.metrics:
            self._session.metric(f"reward/{self._functions[i].name}/{name}", number)

    def _rewards(self, numbers: Sequence[float | None], unit: slice) -> np.ndarray:
        """float64 [rows of the unit]: one function's reward of each row, NaN where it has none."""
        return np.array(numbers, dtype=np.float64)  # None becomes NaN

    def _give_up(
        self,
        i: int,
        fault: ScoringFault,
        unit: slice,
        records: pa.RecordBatch,
        chunk: Chunk,
        lost: np.ndarray,
    ) -> None:
        """Mark the unit's rows as lost; raises KernelError instead where on_error is `stop`."""
        message = self._message(i, fault, unit, records, chunk)
        if not self._drop:
            assert self._scorers is not None, "run before open"
            raise KernelError(message) from self._scorers.raised_error(i)
        self._tombstone(chunk.keys, np.flatnonzero(~lost[unit]) + unit.start, message)
        lost[unit] = True

    def _tombstone(self, keys: Keys, rows: Sequence[int] | np.ndarray, message: str) -> None:
        for key in keys.take(np.asarray(rows, dtype=np.int64)).rows():
            self._session.tombstone(key, message)

    def _none_applied(self, chunk: Chunk, rewards: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """bool [rows]: where every function returned None; an error unless rows are dropped."""
        has_none = np.isnan(rewards).all(axis=1) & ~lost
        names = ", ".join(function.name for function in self._functions)
        for row in np.flatnonzero(has_none).tolist():
            message = (
                f"node {self._node!r}: no reward for {_describe_rows(chunk, slice(row, row + 1))}:"
                f" {names} returned None. Fix: {self._fix('nothing')}."
            )
            if not self._drop:
                raise KernelError(message)
            self._tombstone(chunk.keys, [row], message)
        return has_none

    def _batch(self, keys: Keys, rewards: np.ndarray, is_kept: np.ndarray) -> Batch:
        columns = self._reward_columns(rewards[is_kept])
        return Batch.make(keys.take(is_kept), columns, RewardSchema)

    def _reward_columns(self, rewards: np.ndarray) -> dict[str, pa.Array]:
        """`reward` and each function's own column. rewards [rows, functions]: NaN is none."""
        weights = np.array([f.weight for f in self._functions], dtype=np.float64)
        total = np.nansum(rewards * weights, axis=1)  # in float64, rounded to float32 at the end
        columns = {"reward": pa.array(total.astype(np.float32))}
        for i, function in enumerate(self._functions):
            column = rewards[:, i]
            numbers = pa.array(column.astype(np.float32), mask=np.isnan(column))
            columns[f"reward/{function.name}"] = numbers
        return columns

    def _message(
        self, i: int, fault: ScoringFault, unit: slice, records: pa.RecordBatch, chunk: Chunk
    ) -> str:
        completion = records.column("completion")[unit.start].as_py()
        if len(completion) > 80:
            completion = completion[:80] + "..."
        limit = f" after {self._timeout:g} s" if fault.kind == "timeout" else ""
        detail = f"\n{fault.detail}" if fault.detail else ""
        return (
            f"node {self._node!r}: reward {self._functions[i].name!r} {fault.text}{limit}"
            f" ({_describe_rows(chunk, unit)}); first completion: {completion!r}. Fix:"
            f" {self._fix(fault.kind)}.{detail}"
        )

    def _fix(self, kind: FaultKind | Literal["nothing"]) -> str:
        if self._drop or kind not in _ROWS_ALONE:
            return self.fixes[kind]
        return self.fixes[kind] + ', or on_error="drop_group" to go on without such rows'


def _units(keys: Keys, by_group: bool) -> list[slice]:
    """The smallest slices that a function may be called on: rows, or all rows of one prompt."""
    if not by_group:
        return [slice(row, row + 1) for row in range(len(keys))]
    edges = np.flatnonzero(np.diff(keys.position)) + 1
    bounds = [0, *edges.tolist(), len(keys)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _describe_rows(chunk: Chunk, unit: slice) -> str:
    """`row 7/3, step 2` or `rows 4/0 to 7/3, step 2`: position/sample of the first and last row."""
    keys = chunk.keys
    last_row = unit.stop - 1
    first = f"{keys.position[unit.start]}/{keys.sample[unit.start]}"
    last = f"{keys.position[last_row]}/{keys.sample[last_row]}"
    step = f", step {chunk.step}" if chunk.step else ""
    if first == last:
        return f"row {first}{step}"
    return f"rows {first} to {last}{step}"
