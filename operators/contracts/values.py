"""Strategies of single values, by what a column means and by its Arrow type.

Owns: which numbers are ordinary, extreme, or rubbish. Does not own: how many of them a row has
(generate.py).

Ordinary numbers are multiples of a quarter: few enough that equal ones and zeros occur often, and
exact in float32, so that sums do not depend on their order.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from hypothesis import strategies as st

from dataflow.schema import Column
from dataflow.testing import ContractError

Size = Literal["ordinary", "extreme", "huge"]
"""huge: what another group must not feel; extreme: what a formula must stand."""

LOGPROBS: Mapping[Size, Any] = {
    "ordinary": st.integers(0, 16).map(lambda n: -n / 4),
    "extreme": st.sampled_from([-0.0001, 0.0, -30.0, -88.0]),
    "huge": st.sampled_from([-88.0, -60.0, -30.0]),
}
FLOATS: Mapping[Size, Any] = {
    "ordinary": st.integers(-8, 8).map(lambda n: n / 4),
    "extreme": st.sampled_from([0.0, 1.0, -1.0, 1e6, -1e6, 1e-30]),
    "huge": st.sampled_from([1e30, -1e30]),
}
BOUNDED: Mapping[Size, Any] = {
    **FLOATS,
    "extreme": st.sampled_from([0.0, 1.0, -1.0, 1e-30]),
}
"""For losses: beside a ratio of exp(88) a larger advantage is beyond float32 by itself."""

RUBBISH = (float("nan"), float("inf"), float("-inf"), 1e30)
"""What may stand at a token with mask 0."""

_MEANING: Mapping[str, Any] = {
    "prompt_ids": st.integers(1, 9),
    "completion_ids": st.integers(1, 9),
    "top_ids": st.integers(1, 9),
    "version": st.integers(0, 3),
    "finish": st.sampled_from(["stop", "length"]),
    "keep": st.integers(0, 1),
    "sign": st.sampled_from([1, -1]),
    "done": st.integers(0, 1),
    "turn": st.integers(0, 2),
}
"""Columns of the vocabulary of schemas whose numbers are no measurements."""

_TEXT = st.text(alphabet="ab1 ", max_size=4)


def make_strategy(column: Column, size: Size, *, bounded: bool = False) -> st.SearchStrategy[Any]:
    """Make the strategy of one element of a column. Raises ContractError for a type that cannot be
    generated.
    """
    if column.name in _MEANING:
        return _make_elements(column.type, _MEANING[column.name])
    sizes = BOUNDED if bounded else FLOATS
    floats = sizes[size]
    if column.distribution or column.name == "sampler_mass":
        floats = LOGPROBS[size]
        if pa.types.is_fixed_size_list(column.type):
            # Each probability below 1 / (k + 1): together they are less than 1.
            apart = math.log(column.type.list_size + 1)
            floats = floats.map(lambda number: number - apart)
    strategy = make_strategy_of_type(column.type, floats)
    if strategy is None:
        fix = f"columns={{{column.name!r}: a strategy or a list of examples}}"
        raise ContractError(
            f"column {column.name!r}: expected a type that can be generated, found {column.type}."
            f" Fix: {fix}."
        )
    if column.nullable:
        return st.none() | strategy
    return strategy


def _make_elements(kind: pa.DataType, one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Single values, or fixed-size lists of them."""
    if not pa.types.is_fixed_size_list(kind):
        return one
    size = kind.list_size
    return st.lists(one, min_size=size, max_size=size, unique=size < 9)


def make_strategy_of_type(
    kind: pa.DataType, floats: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any] | None:
    """Make the strategy of values of an Arrow type; None for one that is not known."""
    if pa.types.is_floating(kind):
        return floats
    if pa.types.is_fixed_size_list(kind):
        return _make_lists(kind.value_type, floats, kind.list_size, kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _make_lists(kind.value_type, floats, 0, 3)
    if pa.types.is_struct(kind):
        return _make_structs(kind, floats)
    return next((strategy for is_of_kind, strategy in _SIMPLE if is_of_kind(kind)), None)


def _make_structs(
    kind: pa.StructType, floats: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any] | None:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in kind:
        strategy = make_strategy_of_type(field.type, floats)
        if strategy is None:
            return None
        fields[field.name] = strategy
    return st.fixed_dictionaries(fields)


def _make_lists(
    kind: pa.DataType, floats: st.SearchStrategy[Any], low: int, high: int
) -> st.SearchStrategy[Any] | None:
    inside = make_strategy_of_type(kind, floats)
    if inside is None:
        return None
    return st.lists(inside, min_size=low, max_size=high)


_DAY = datetime.datetime(2020, 1, 1)

# The first that fits: unsigned integers are integers, too.
_SIMPLE: Sequence[tuple[Any, st.SearchStrategy[Any]]] = (
    (pa.types.is_unsigned_integer, st.integers(0, 9)),
    (pa.types.is_integer, st.integers(-9, 9)),
    (pa.types.is_boolean, st.booleans()),
    (pa.types.is_string, _TEXT),
    (pa.types.is_large_string, _TEXT),
    (pa.types.is_binary, st.binary(max_size=3)),
    (pa.types.is_large_binary, st.binary(max_size=3)),
    (pa.types.is_null, st.none()),
    (pa.types.is_date, st.integers(0, 9).map(lambda n: _DAY.date() + datetime.timedelta(n))),
    (pa.types.is_timestamp, st.integers(0, 9).map(lambda n: _DAY + datetime.timedelta(n))),
    (pa.types.is_duration, st.integers(0, 9).map(lambda n: datetime.timedelta(seconds=n))),
    (pa.types.is_decimal, st.integers(-9, 9)),
)
