"""The promises of operators on columns.

Owns: what each is, when it holds, how it is tested. Does not own: rows (generate.py), comparison
(columns.py), the order and the report (suite.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.schema import Advantage, Keep
from operators.contracts.cases import MASK, Generated, GeneratedColumn
from operators.contracts.columns import (
    call_operator,
    compute_output,
    describe_place,
    drop_fix,
    find_changed_inputs,
    format_numbers,
    read_rows,
    require_same,
)
from operators.contracts.promise import Broken, Promise
from operators.contracts.subject import OperatorSubject
from operators.contracts.values import FLOATS, LOGPROBS, RUBBISH
from operators.kernels.return_checks import refuse_broken_promise

Groups = list[list[int]]


def _schema(subject: OperatorSubject, rows: Generated) -> None:
    compute_output(subject, rows, finite="")


def _finite(subject: OperatorSubject, rows: Generated) -> None:
    compute_output(subject, rows)


def _extremes(subject: OperatorSubject, rows: Generated) -> None:
    compute_output(subject, rows, finite="extremes")


def _inputs(subject: OperatorSubject, rows: Generated) -> None:
    for name in find_changed_inputs(subject, rows):
        raise Broken("inputs", f"after the call {name} is another than before")


def _pair_with_itself(rows: Iterable[int]) -> list[tuple[int, int]]:
    return [(row, row) for row in rows]


def _pair_with_place(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Each row with where it is among these."""
    return [(row, place) for place, row in enumerate(rows)]


def _deterministic(subject: OperatorSubject, rows: Generated) -> None:
    one, other = compute_output(subject, rows), compute_output(subject, rows)
    pairs = _pair_with_itself(range(len(rows)))
    require_same("deterministic", rows, one, other, pairs, "called again", exact=True)


def _results(subject: OperatorSubject, rows: Generated) -> None:
    """A later call, on the rows in another order, must leave the results of the first alone."""
    first = call_operator(subject, rows).batch
    before = {name: copy.deepcopy(read_rows(first, name)) for name in first.names}
    order = list(chain.from_iterable(rows.spare))
    call_operator(subject, rows.arrange(order, rows.position, rows.sample))
    after = {name: read_rows(first, name) for name in first.names}
    pairs = _pair_with_itself(range(len(first)))
    how = "after a call on other rows the same result says"
    require_same("results", rows, before, after, pairs, how, exact=True)


def _row_order(subject: OperatorSubject, rows: Generated) -> None:
    order = list(chain.from_iterable(rows.spare))
    moved = rows.arrange(order, rows.position, rows.sample)
    one, other = compute_output(subject, rows), compute_output(subject, moved)
    how = f"with the rows in the order {order}"
    require_same("row_order", rows, one, other, _pair_with_place(order), how)


def _relabelling(subject: OperatorSubject, rows: Generated) -> None:
    order, names = rows.spare
    groups = [rows.groups[number] for number in order]
    flat = list(chain.from_iterable(groups))
    position: list[int] = []
    for name, group in zip(names, groups, strict=True):
        position += [name] * len(group)
    sample = [rows.sample[row] for row in flat]
    moved = rows.arrange(flat, position, sample, attempt=1)
    one, other = compute_output(subject, rows), compute_output(subject, moved)
    how = f"with the groups {order} at the positions {list(names)}"
    require_same("relabelling", rows, one, other, _pair_with_place(flat), how)


def _units(subject: OperatorSubject, rows: Generated) -> Groups:
    """What a chunk may be cut into."""
    if subject.operator.scope == "row":
        return [[row] for row in range(len(rows))]
    return rows.groups


def _chunks(subject: OperatorSubject, rows: Generated) -> None:
    one = compute_output(subject, rows)
    units = _units(subject, rows)
    sides = rows.spare[: len(units)]
    for side in (True, False):
        chosen = (unit for unit, s in zip(units, sides, strict=True) if s is side)
        chunk = list(chain.from_iterable(chosen))
        if chunk:
            other = compute_output(subject, rows.take(chunk))
            how = f"in a chunk of the rows {chunk}"
            require_same("chunks", rows, one, other, _pair_with_place(chunk), how)


def _isolation(subject: OperatorSubject, rows: Generated) -> None:
    *_, unit = _units(subject, rows)
    changed = rows.change_columns(lambda port, column: make_huge(column, unit, rows.spare))
    one = compute_output(subject, rows, finite="")
    other = compute_output(subject, changed, finite="")
    how = "with huge numbers in other rows"
    require_same("isolation", rows, one, other, _pair_with_itself(unit), how)


def make_huge(
    column: GeneratedColumn, unchanged: Sequence[int], numbers: Sequence[Any]
) -> list[Any] | None:
    """Put a huge number in all rows of the column but the unchanged ones; None for a column that
    has no measurements. numbers: for log-probs, for others.
    """
    if not column.has_floats:
        return None
    assert column.declared is not None
    number = numbers[0] if column.declared.distribution else numbers[1]
    values: list[Any] = []
    for row, row_value in enumerate(column.values):
        if row in unchanged:
            values.append(row_value)
        else:
            values.append(_fill(row_value, number))
    return values


def _fill(element: Any, number: float) -> Any:
    """The number, in lists as deep and as long."""
    if isinstance(element, list):
        return [_fill(inner, number) for inner in element]
    return number


def _holes(subject: OperatorSubject, rows: Generated) -> None:
    advantages = compute_output(subject, rows)["advantage"]
    for row, mask in enumerate(rows.masks):
        for token, (advantage, trained) in enumerate(zip(advantages[row], mask, strict=True)):
            if not trained and advantage != 0:
                problem = f"advantage {format_numbers(advantage)} at token {token}"
                raise Broken("holes", f"{describe_place(rows, row)}: {problem}")


def _masked(subject: OperatorSubject, rows: Generated) -> None:
    fouled = rows.foul(rows.spare)
    one = compute_output(subject, rows)
    other = compute_output(subject, fouled, finite="masked")
    pairs = _pair_with_itself(range(len(rows)))
    how = f"with {rows.spare} at the tokens of mask 0"
    require_same("masked", rows, one, other, pairs, how, where=rows.masks)


def _keeps(subject: OperatorSubject, rows: Generated) -> None:
    compute_output(subject, rows)
    batch: Batch = call_operator(subject, rows).batch
    keep = batch.flat("keep")
    if not np.isin(keep, (0, 1)).all():
        raise Broken("keeps", f"keep is {format_numbers(keep)}")
    try:
        refuse_broken_promise(batch, subject.operator.keeps)
    except DataError as error:
        raise Broken("keeps", drop_fix(error)) from error


def draw_row_orders(groups: Groups) -> st.SearchStrategy[Any]:
    """Draw each group's rows in some order."""
    orders = map(st.permutations, groups)
    return st.tuples(*orders)


def _draw_positions(groups: Groups) -> st.SearchStrategy[Any]:
    """Draw the groups in some order, at increasing positions."""
    count = len(groups)
    positions = st.sets(st.sampled_from(_POSITIONS), min_size=count, max_size=count).map(sorted)
    return st.tuples(st.permutations(range(count)), positions)


_POSITIONS = (0, 1, 2, 3, 5, 8, 1000, 2**31, 2**40 + 1)


def draw_sides(groups: Groups) -> st.SearchStrategy[Any]:
    """Draw for each row (the first of them for each group) on which side of a cut it is."""
    count = sum(map(len, groups))
    return st.lists(st.booleans(), min_size=count, max_size=count)


HUGE = st.tuples(LOGPROBS["huge"], FLOATS["huge"])


def _unless_batch(subject: OperatorSubject) -> str:
    return "scope is batch" if subject.operator.scope == "batch" else ""


def _unless_advantage(subject: OperatorSubject) -> str:
    if not issubclass(subject.output_schema, Advantage):
        return f"it returns {subject.output_schema.__name__}, no Advantage"
    return _unless_mask(subject)


def _unless_mask(subject: OperatorSubject) -> str:
    has_mask = any(MASK in port.schema.columns for port in subject.inputs)
    return "" if has_mask else "no port of it has a mask"


def _unless_keeps(subject: OperatorSubject) -> str:
    if not issubclass(subject.output_schema, Keep):
        return f"it returns {subject.output_schema.__name__}, no Keep"
    return ""


PROMISES: tuple[Promise[OperatorSubject], ...] = (
    Promise(
        name="schema",
        says="it returns all columns of its schema, and token columns have one value a token",
        fix="return Columns.make(Schema, like=..., every column of the schema)",
        test=_schema,
    ),
    Promise(
        name="keys",
        says="it returns the rows of its first input, each once",
        fix="return score.set(...), or Columns.make(..., like=one of its arguments)",
        test=_schema,
    ),
    Promise(
        name="finite",
        says="of ordinary numbers it makes finite ones",
        fix="keep denominators away from 0: add an epsilon, or treat equal rows apart",
        test=_finite,
    ),
    Promise(
        name="inputs",
        says="it does not change its inputs",
        fix="copy before writing, or use operations that make new arrays",
        test=_inputs,
    ),
    Promise(
        name="deterministic",
        says="the same rows give the same numbers, to the bit",
        fix="no random numbers, no clock and no state between calls",
        test=_deterministic,
    ),
    Promise(
        name="results",
        says="a call leaves what earlier calls returned as it was",
        fix="a new array in each call, not one that is filled again",
        test=_results,
        rests_on=("deterministic",),
        rows={"spare": draw_row_orders},
    ),
    Promise(
        name="extremes",
        says="rewards up to 1e6 and log-ratios up to 88 give finite numbers",
        fix="compute in float64, bound what goes into an exponential",
        test=_extremes,
        rests_on=("finite",),
        rows={"size": "extreme"},
    ),
    Promise(
        name="row_order",
        says="the rows of a group in another order give the same numbers, in that order (where a"
        " choice is made, ties apart)",
        fix="compare rows by their columns, not by `sample` or by their place",
        test=_row_order,
        rests_on=("deterministic",),
        rows={"spare": draw_row_orders},
    ),
    Promise(
        name="relabelling",
        says="groups in another order, or at other positions, have the same numbers",
        fix="use positions only to tell groups apart (`rollout.groups`)",
        test=_relabelling,
        rests_on=("deterministic",),
        rows={"groups": 2, "spare": _draw_positions},
    ),
    Promise(
        name="chunks",
        says="rows have the same numbers in whatever chunk they come: any rows where scope is row,"
        " any whole groups where it is group",
        fix="no numbers of all rows, or @operator(scope='batch')",
        test=_chunks,
        unless=_unless_batch,
        rests_on=("deterministic",),
        rows={"groups": 2, "spare": draw_sides},
    ),
    Promise(
        name="isolation",
        says="no number of another group changes a group's own (of another row, where scope is"
        " row), however large",
        fix="sum each group by itself (np.bincount), not by differences of running sums",
        test=_isolation,
        unless=_unless_batch,
        rests_on=("chunks",),
        rows={"groups": 2, "spare": lambda groups: HUGE},
    ),
    Promise(
        name="holes",
        says="an advantage is 0 at each token with mask 0",
        fix="multiply by the mask: value * rollout['completion_mask'].values",
        test=_holes,
        unless=_unless_advantage,
    ),
    Promise(
        name="masked",
        says="whatever stands at a token with mask 0, nan too, changes nothing elsewhere",
        fix="np.where(mask > 0, number, 0.0) before any sum: 0 * nan is nan",
        test=_masked,
        unless=_unless_mask,
        rests_on=("deterministic", "holes"),
        rows={"spare": lambda groups: st.sampled_from(RUBBISH)},
    ),
    Promise(
        name="keeps",
        says="keep is 0 or 1, and leaves of each group what keeps= declares",
        fix="the same number for all rows of a group, or keeps='rows'",
        test=_keeps,
        unless=_unless_keeps,
    ),
)
"""In the order in which they build on each other."""
