"""How many rows the data of a source has, as far as that is known before any is read.

Owns: asking the source's operator. Does not own: counting (Operator.data_rows).
"""

from __future__ import annotations

from dataflow.node import Node
from dataflow.rules.context import function_at


def rows_in_data(source: Node) -> int | None:
    """Rows in one pass; None for a source without data, and where they are not known."""
    path = source.operator.data_rows
    if not path:
        return None
    return function_at(path)(source.params["data"], source.params.get("split"))
