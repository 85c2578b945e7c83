"""Columns of a schema: type, axis, bounds, and where the values are.

Owns: the declaration of one column, and what is refused in it. Does not own: the schemas that have
it (schema.py), its values (batch.py, device.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from dataflow.calls import call_error, declares, require

_MEASURED = "measured"

Axis = Literal["P", "T", "K"]
"""P: tokens of the prompt. T: tokens of the completion (tool output included). K: turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `type`: of one element; with an axis the column is a LargeList of it.

    device: the values are a torch tensor that stays on the device of the Worker that made it; the
    record batch only has each row's number of values. Its type is a number, or a fixed-size list of
    a number (a vector for each element). distribution: of recorded log-probs, in words; it travels
    as metadata of the Arrow field. absent: the value in rows of a schema without the column, where
    one follows from what that schema is. instead_of: the column that its readers take where it is
    missing. least, most: the bounds of each value; an operator that returns others is refused.
    measured: the values differ from run to run, as clocks do: nothing that compares rows, or takes
    digests of them, reads it; it travels as metadata of the Arrow field, too.
    """

    name: str = ""
    type: pa.DataType
    axis: Axis | None = None
    nullable: bool = False
    doc: str = ""
    device: bool = False
    distribution: str = ""
    absent: float | None = None
    instead_of: str = ""
    least: float | None = None
    most: float | None = None
    measured: bool = False

    @property
    def arrow(self) -> pa.Field:
        """The Arrow field in a record batch; for a device column, lists of nulls with its lengths
        (without an axis, nulls).
        """
        return self._field(pa.null(), nullable=True) if self.device else self.whole

    @property
    def whole(self) -> pa.Field:
        """The Arrow field with the values on the host, as in files."""
        return self._field(self.type, nullable=self.nullable)

    @property
    def metadata(self) -> dict[str, str] | None:
        """The Arrow field's metadata: what a number alone does not say."""
        pairs: dict[str, str] = {}
        if self.distribution:
            pairs["distribution"] = self.distribution
        if self.measured:
            pairs[_MEASURED] = "true"
        return pairs or None

    def _field(self, kind: pa.DataType, *, nullable: bool) -> pa.Field:
        if self.axis is None:
            return pa.field(self.name, kind, nullable, self.metadata)
        list_type = pa.large_list(pa.field("item", kind, nullable=nullable))
        return pa.field(self.name, list_type, nullable=False, metadata=self.metadata)


@declares
def column(
    type: pa.DataType,
    axis: Axis | None = None,
    *,
    nullable: bool = False,
    doc: str = "",
    device: bool = False,
    distribution: str = "",
    absent: float | None = None,
    instead_of: str = "",
    least: float | None = None,
    most: float | None = None,
    measured: bool = False,
) -> Any:
    """Declare a column in the body of a Schema (typed Any, so that a form without annotation is
    accepted).

    device: its values stay on the device of the Worker that made them, as a torch tensor: for large
    numbers, such as hidden states, that the host never needs to see. distribution: of recorded
    log-probs. Raises GraphError if a device column is nullable, or of a type that tensors do not
    have.

    absent, instead_of: what `concat` makes of rows that lack it. With `absent` these rows get that
    value, since they mean it (`sampler_mass`: nothing was truncated, log 1 = 0). `instead_of` names
    the column that readers take where this one is missing, so that they must not lose it unseen.

    least, most: the bounds of its values; an operator that returns others is refused by row.

    measured: seconds by a clock, or the like: two runs that agree in all else differ in it, and it
    is left out wherever rows are compared.
    """
    where = "column"
    is_type = isinstance(type, pa.DataType)
    require(where, "type", type, fits=is_type, expected="a type of Arrow", fix="pa.float32()")
    require(
        where,
        "axis",
        axis,
        fits=axis in (None, "P", "T", "K"),
        expected="'P', 'T', 'K' or None",
        fix="axis='T'",
    )
    _require_number(type, "absent", absent, fix="absent=0.0")
    require(
        where,
        "instead_of",
        instead_of,
        fits=isinstance(instead_of, str),
        expected="the name of a column",
        fix='instead_of="reward"',
    )
    _require_number(type, "least", least, fix="least=0")
    _require_number(type, "most", most, fix="most=0")
    flags = (("nullable", nullable), ("device", device), ("measured", measured))
    for name, flag in flags:
        fits = isinstance(flag, bool)
        require(where, name, flag, fits=fits, expected="True or False", fix=f"{name}=True")
    if device:
        _require_tensor(type, nullable)
    return Column(
        type=type,
        axis=axis,
        nullable=nullable,
        doc=doc,
        device=device,
        distribution=distribution,
        absent=absent,
        instead_of=instead_of,
        least=least,
        most=most,
        measured=measured,
    )


def is_measured(field: pa.Field) -> bool:
    """Whether a field of a record batch, or of a file of rows, is of a measured column."""
    return field.metadata is not None and _MEASURED.encode() in field.metadata


_TENSOR_TYPES = ("halffloat", "float", "double", "int8", "int16", "int32", "int64", "uint8")
"""Arrow's names for the types that tensors have, too, and that can be indexed on any device."""


def _require_number(kind: pa.DataType, name: str, number: object, *, fix: str) -> None:
    """Raises GraphError for anything but None or, in a column of numbers, a number."""
    is_numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    require(
        "column",
        name,
        number,
        fits=number is None or (is_numeric and isinstance(number, (int, float))),
        expected="a number, of a column of numbers",
        fix=fix,
    )


def _require_tensor(kind: pa.DataType, nullable: bool) -> None:
    """Raises GraphError if values of this type cannot be a tensor."""
    where = f"column({kind}, device=True)"
    if nullable:
        problem = "expected values, found nullable=True: no tensor has nulls"
        raise call_error(where, problem, "nullable=False, with nan or a mask")
    number_type = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    if str(number_type) not in _TENSOR_TYPES:
        problem = (
            f"expected a number, or a fixed-size list of one, found {kind}, which no tensor of"
            " torch is"
        )
        fix = "pa.float32(), or pa.list_(pa.float32(), 64) for 64 numbers each"
        raise call_error(where, problem, fix)
