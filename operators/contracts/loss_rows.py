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


def plan_loss_rows(subject: LossSubject, columns: Mapping[str, Any]) -> RowPlan:
    """Plan rows of a rollout, the loss's ports, and the model's numbers."""
    rollout = Input(name="rows", schema=TruncatedRollout, columns=_READ)
    schema = _make_model_schema(subject)
    model_input = Input(name=MODEL, schema=schema)
    rollout_port = InputPort(name="rows", input=rollout, schema=TruncatedRollout)
    model_port = InputPort(name=MODEL, input=model_input, schema=schema)
    defaults: dict[str, Any] = {}
    for term in subject.loss.terms:
        for name, setting in term.params:
            defaults[f"{term.label}.{name}"] = setting
    optional = tuple(port.name for port in subject.inputs if port.input.optional)
    return RowPlan(
        ports=(rollout_port, *subject.inputs, model_port),
        values_by_column=columns,
        free=subject.free,
        defaults=defaults,
        settle=subject.settle,
        optional=(MASS, *optional),
        bounded=True,
    )


def _make_model_schema(subject: LossSubject) -> type[Schema]:
    """What the loss asks of the model, as columns."""
    functions = [term.function for term in subject.loss.terms]
    columns: dict[str, Any] = {}
    if subject.scalar:
        columns["values"] = column(pa.float32(), "T")
    else:
        columns["logprobs"] = column(pa.float32(), "T", distribution=POLICY)
    if any(function.entropy for function in functions):
        columns["entropy"] = column(pa.float32(), "T")
    if any(function.scores for function in functions):
        columns["scores"] = column(pa.float32())
    width = sum(_count_ids(subject, *f.ids) for f in functions if f.ids)
    if width:
        columns["at_ids"] = column(pa.list_(pa.float32(), width), "T", distribution=POLICY)
    return type("SaidByModel", (Schema,), columns)


def _count_ids(subject: LossSubject, port: str, name: str) -> int:
    """How many ids a column of a loss's port has for each token."""
    id_port = next(p for p in subject.inputs if p.name.endswith(f".{port}"))
    return id_port.schema.columns[name].type.list_size
