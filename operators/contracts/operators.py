"""The promises of operators on columns.

Owns: what each is, when it holds, how it is tested. Does not own: rows (generate.py), comparison
(columns.py), the order and the report (suite.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.schema import Advantage, Keep
from operators.contracts.cases import MASK, Generated, GeneratedColumn
from operators.contracts.columns import (
    by_row,
    called,
    changed_inputs,
    output,
    place,
    require_same,
    shown,
)
from operators.contracts.promise import Broken, Promise
from operators.contracts.subject import OperatorSubject
from operators.contracts.values import FLOATS, LOGPROBS, RUBBISH
from operators.kernels.return_checks import refuse_broken_promise

Groups = list[list[int]]


def _schema(subject: OperatorSubject, rows: Generated) -> None:
    output(subject, rows, finite="")


def _finite(subject: OperatorSubject, rows: Generated) -> None:
    output(subject, rows)


def _extremes(subject: OperatorSubject, rows: Generated) -> None:
    output(subject, rows, finite="extremes")


def _inputs(subject: OperatorSubject, rows: Generated) -> None:
    for name in changed_inputs(subject, rows):
        raise Broken("inputs", f"after the call {name} is another than before")


def _deterministic(subject: OperatorSubject, rows: Generated) -> None:
    one, other = output(subject, rows), output(subject, rows)
    same = [(row, row) for row in range(len(rows))]
    require_same("deterministic", rows, one, other, same, "called again", exact=True)


def _results(subject: OperatorSubject, rows: Generated) -> None:
    """A later call, on the rows in another order, must leave the results of the first alone."""
    first = called(subject, rows).batch
    before = {name: copy.deepcopy(by_row(first, name)) for name in first.names}
    order = [row for group in rows.spare for row in group]
    called(subject, rows.arranged(order, rows.position, rows.sample))
    after = {name: by_row(first, name) for name in first.names}
    same = [(row, row) for row in range(len(first))]
    how = "after a call on other rows the same result says"
    require_same("results", rows, before, after, same, how, exact=True)


def _row_order(subject: OperatorSubject, rows: Generated) -> None:
    order = [row for group in rows.spare for row in group]
    moved = rows.arranged(order, rows.position, rows.sample)
    pairs = [(row, place) for place, row in enumerate(order)]
    how = f"with the rows in the order {order}"
    require_same("row_order", rows, output(subject, rows), output(subject, moved), pairs, how)


def _relabelling(subject: OperatorSubject, rows: Generated) -> None:
    order, names = rows.spare
    kept = [rows.groups[group] for group in order]
    flat = [row for group in kept for row in group]
    position = [name for name, group in zip(names, kept, strict=True) for _ in group]
    moved = rows.arranged(flat, position, [rows.sample[row] for row in flat], attempt=1)
    pairs = [(row, place) for place, row in enumerate(flat)]
    how = f"with the groups {order} at the positions {list(names)}"
    require_same("relabelling", rows, output(subject, rows), output(subject, moved), pairs, how)


def _units(subject: OperatorSubject, rows: Generated) -> Groups:
    """What a chunk may be cut into."""
    by_row = subject.operator.scope == "row"
    return [[row] for row in range(len(rows))] if by_row else rows.groups


def _chunks(subject: OperatorSubject, rows: Generated) -> None:
    whole, units = output(subject, rows), _units(subject, rows)
    sides = rows.spare[: len(units)]
    for side in (True, False):
        part = [row for unit, s in zip(units, sides, strict=True) if s is side for row in unit]
        if part:
            made = output(subject, rows.take(part))
            pairs = [(row, place) for place, row in enumerate(part)]
            require_same("chunks", rows, whole, made, pairs, f"in a chunk of the rows {part}")


def _isolation(subject: OperatorSubject, rows: Generated) -> None:
    *_, mine = _units(subject, rows)
    other = rows.changed(lambda port, column: huge(column, mine, rows.spare))
    pairs = [(row, row) for row in mine]
    one, two = (output(subject, given, finite="") for given in (rows, other))
    require_same("isolation", rows, one, two, pairs, "with huge numbers in other rows")


def huge(column: GeneratedColumn, kept: Sequence[int], numbers: Sequence[Any]) -> list[Any] | None:
    """The column with a huge number in all rows but those kept. numbers: log-prob, other."""
    if not column.floats:
        return None
    assert column.declared is not None
    number = numbers[0] if column.declared.distribution else numbers[1]
    return [
        value if row in kept else _filled(value, number) for row, value in enumerate(column.values)
    ]


def _filled(value: Any, number: float) -> Any:
    return [_filled(v, number) for v in value] if isinstance(value, list) else number


def _holes(subject: OperatorSubject, rows: Generated) -> None:
    made = output(subject, rows)["advantage"]
    for row, mask in enumerate(rows.masks):
        for token, (value, trained) in enumerate(zip(made[row], mask, strict=True)):
            if not trained and value != 0:
                raise Broken(
                    "holes", f"{place(rows, row)}: advantage {shown(value)} at token {token}"
                )


def _masked(subject: OperatorSubject, rows: Generated) -> None:
    fouled = rows.fouled(rows.spare)
    same = [(row, row) for row in range(len(rows))]
    one, two = output(subject, rows), output(subject, fouled, finite="masked")
    how = f"with {rows.spare} at the tokens of mask 0"
    require_same("masked", rows, one, two, same, how, where=rows.masks)


def _keeps(subject: OperatorSubject, rows: Generated) -> None:
    output(subject, rows)
    made: Batch = called(subject, rows).batch
    keep = made.flat("keep")
    if not np.isin(keep, (0, 1)).all():
        raise Broken("keeps", f"keep is {shown(keep)}")
    try:
        refuse_broken_promise(made, subject.operator.keeps)
    except DataError as error:
        raise Broken("keeps", str(error).partition(" Fix:")[0].rstrip(".")) from error


def within(groups: Groups) -> st.SearchStrategy[Any]:
    """Each group's rows in some order."""
    return st.tuples(*(st.permutations(group) for group in groups))


def _renamed(groups: Groups) -> st.SearchStrategy[Any]:
    """The groups in some order, at increasing positions."""
    count = len(groups)
    places = st.sets(st.sampled_from(_PLACES), min_size=count, max_size=count).map(sorted)
    return st.tuples(st.permutations(range(count)), places)


_PLACES = (0, 1, 2, 3, 5, 8, 1000, 2**31, 2**40 + 1)


def sides(groups: Groups) -> st.SearchStrategy[Any]:
    """For each row (the first of them for each group) on which side of a cut it is."""
    count = sum(map(len, groups))
    return st.lists(st.booleans(), min_size=count, max_size=count)


HUGE = st.tuples(LOGPROBS["huge"], FLOATS["huge"])


def _unless_batch(subject: OperatorSubject) -> str:
    return "scope is batch" if subject.operator.scope == "batch" else ""


def _unless_advantage(subject: OperatorSubject) -> str:
    if not issubclass(subject.made, Advantage):
        return f"it returns {subject.made.__name__}, no Advantage"
    return _unless_mask(subject)


def _unless_mask(subject: OperatorSubject) -> str:
    seen = any(MASK in port.schema.columns for port in subject.inputs)
    return "" if seen else "no port of it has a mask"


def _unless_keeps(subject: OperatorSubject) -> str:
    if not issubclass(subject.made, Keep):
        return f"it returns {subject.made.__name__}, no Keep"
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
        rows={"spare": within},
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
        rows={"spare": within},
    ),
    Promise(
        name="relabelling",
        says="groups in another order, or at other positions, have the same numbers",
        fix="use positions only to tell groups apart (`rollout.groups`)",
        test=_relabelling,
        rests_on=("deterministic",),
        rows={"groups": 2, "spare": _renamed},
    ),
    Promise(
        name="chunks",
        says="rows have the same numbers in whatever chunk they come: any rows where scope is row,"
        " any whole groups where it is group",
        fix="no numbers of all rows, or @operator(scope='batch')",
        test=_chunks,
        unless=_unless_batch,
        rests_on=("deterministic",),
        rows={"groups": 2, "spare": sides},
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
