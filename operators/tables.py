"""Tables: what earlier visits to a row of the data say of the next one.

Owns: the declarations. Does not own: the State (dataflow/model.py), the statistics
(kernels/tables.py), which row of the data a position stands for (kernels/data.py).
"""

from __future__ import annotations

from typing import Any

from dataflow.limits import text, whole
from dataflow.model import Table
from dataflow.node import Node, Port
from dataflow.operator import DATA_ROW, Input, Nothing, Operator, Same, declares
from dataflow.schema import Schema, Weight

_RECORDED_ROWS = Input(
    name="rows",
    schema=Schema,
    columns=(),
    ancestors=(DATA_ROW,),
    ancestors_from="column",
    required_from="column",
)
_COLUMN = text(like="completion_ids", filled=True)
_LAG = whole(0, like=0)
_WEIGHED_ROWS = Input(name="rows", schema=Schema, columns=(), ancestors=(DATA_ROW,))

RECORD = Operator(
    path="operators.tables:RECORD",
    name="record",
    work="record",
    scope="batch",
    rows=Nothing(),
    inputs=(_RECORDED_ROWS,),
    writes=("table",),
    kernels={"host": "operators.kernels.tables:RecordTable"},
    limits={"column": _COLUMN},
)

LOOKUP = Operator(
    path="operators.tables:LOOKUP",
    name="lookup",
    work="host",
    rows=Same("rows"),
    inputs=(_WEIGHED_ROWS,),
    outputs=(Weight,),
    reads=("table",),
    kernels={"host": "operators.kernels.tables:LookUpTable"},
    limits={"max_lag": _LAG},
)


@declares
def record(
    table: Table, rows: Port[Any], *, column: str = "completion_ids", name: str | None = None
) -> Node:
    """Add a number of each row of a Step to a Table, under the row of the data that it stands on.

    column: of these rows, or of the data: of a list its length (a list without elements counts as
    one of 1), of a number the number itself; a null is skipped. Rows that a selection removed, or
    that no Step trained, are not in it. The metric table/<name>/known is the share of a Step's rows
    whose row of the data had been visited before. What a Table keeps (`geometric_mean`) needs
    numbers above 0.
    """
    states = {"table": table}
    inputs = {"rows": rows}
    params = {"column": column}
    node_name = name or _name_with(table, "record")
    return Node(RECORD, node_name, states=states, inputs=inputs, params=params)


@declares
def lookup(
    table: Table, rows: Port[Any], *, max_lag: int = 0, name: str | None = None
) -> Port[Weight]:
    """What a Table has for the row of the data that each row stands on: a number to weigh it by.

    A row of the data that was never visited has the mean over all that were: 0 where none was.
    max_lag: how many versions old the Table may be, 0 for the version that the Step starts from;
    above a generation that may lag give it the same lag, as the least lag counts for all.
    """
    states = {"table": table}
    inputs = {"rows": rows}
    params = {"max_lag": max_lag}
    node_name = name or _name_with(table, "lookup")
    node = Node(LOOKUP, node_name, states=states, inputs=inputs, params=params)
    return node.port()


def _name_with(table: object, operator: str) -> str:
    """`record_lengths`; the operator's name for what is no Table, which is refused elsewhere."""
    if not isinstance(table, Table):
        return operator
    return f"{operator}_{table.name}"
