"""What the rows of a loss are made of: a rollout, its ports, and the numbers of a model.

Owns: that plan. Does not own: drawing rows (generate.py), a loss's numbers (numbers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dataflow.operator import Input
from dataflow.schema import POLICY, Schema, TruncatedRollout, column
from operators.contracts.generate import RowPlan
from operators.contracts.numbers import MASS, MODEL
from operators.contracts.subject import InputPort, LossSubject

_READ = (
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "sampler_logprobs",
    "sampler_mass",
    "version",
)


def plan_of(subject: LossSubject, columns: Mapping[str, Any]) -> RowPlan:
    """Rows of a rollout, the loss's ports, and the model's numbers."""
    rollout = Input(name="rows", schema=TruncatedRollout, columns=_READ)
    schema = _said(subject)
    ports = (
        InputPort(name="rows", input=rollout, schema=TruncatedRollout),
        *subject.inputs,
        InputPort(name=MODEL, input=Input(name=MODEL, schema=schema), schema=schema),
    )
    defaults = {
        f"{term.label}.{name}": value for term in subject.loss.terms for name, value in term.params
    }
    optional = tuple(port.name for port in subject.inputs if port.input.optional)
    return RowPlan(
        ports=ports,
        given=columns,
        free=subject.free,
        defaults=defaults,
        settled=subject.settled,
        optional=(MASS, *optional),
        bounded=True,
    )


def _said(subject: LossSubject) -> type[Schema]:
    """What the loss asks of the model, as columns."""
    functions = [term.function for term in subject.loss.terms]
    made: dict[str, Any] = (
        {"values": column(pa.float32(), "T")}
        if subject.scalar
        else {"logprobs": column(pa.float32(), "T", distribution=POLICY)}
    )
    if any(function.entropy for function in functions):
        made["entropy"] = column(pa.float32(), "T")
    if any(function.scores for function in functions):
        made["scores"] = column(pa.float32())
    wide = sum(_wide(subject, *f.ids) for f in functions if f.ids)
    if wide:
        made["at_ids"] = column(pa.list_(pa.float32(), wide), "T", distribution=POLICY)
    return type("SaidByModel", (Schema,), made)


def _wide(subject: LossSubject, port: str, name: str) -> int:
    found = next(p for p in subject.inputs if p.name.endswith(f".{port}"))
    return found.schema.columns[name].type.list_size
