"""The rows of a Step as a train kernel reads them: flat columns, and `Now` of a micro-batch.

Owns: which columns a loss sees, their alignment with completion tokens, and picking those of a
micro-batch. Does not own: the model's part of Now (heads.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Batch, Keys, Ragged
from dataflow.kernel import Assignment
from dataflow.loss import Loss, LossTerm, Now, Tensors
from operators.kernels.tensors import aligned, gather, index
from operators.kernels.torch.packing import Packed, prompt_groups


@dataclass(frozen=True, slots=True, eq=False)
class PortColumns:
    """Columns of one port of a loss, per completion token and per row; tensors if on a device."""

    tokens: Mapping[str, np.ndarray | Tensor]
    rows: Mapping[str, np.ndarray | Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRows:
    """All rows of a Step.

    groups int64 [rows]: a number for each key.position; prompt_groups: for each position and
    prompt. trained int64 [rows]: how many tokens of a row have mask 1.

    mask float32, sampler_logprobs, sampler_mass and version [tokens of the Step]; ports by (label,
    port).
    """

    keys: Keys
    prompts: Ragged
    completions: Ragged
    groups: np.ndarray
    prompt_groups: np.ndarray
    trained: np.ndarray
    mask: np.ndarray
    sampler_logprobs: np.ndarray | None
    sampler_mass: np.ndarray | None
    version: np.ndarray | None
    ports: Mapping[tuple[str, str], PortColumns]


def step_rows(assignment: Assignment, loss: Loss, node: str, row_set: str = "rows") -> TrainRows:
    """Read one row set of an assignment, with what the loss's terms on it read. Raises DataError
    for a token column not aligned with completions.
    """
    if row_set not in assignment.inputs or not len(assignment.inputs[row_set]):
        return _no_rows()
    rows, loss = assignment.inputs[row_set], loss.on(row_set)
    completions = rows.ragged("completion_ids")
    known = {
        name: aligned(rows, name, completions.offsets, f"{node}.{row_set}")
        for name in ("completion_mask", "sampler_logprobs", "sampler_mass", "version")
        if name in rows.names
    }
    mask = known["completion_mask"].astype(np.float32)
    prompts = rows.ragged("prompt_ids")
    return TrainRows(
        keys=rows.keys,
        prompts=prompts,
        completions=completions,
        groups=np.unique(rows.keys.position, return_inverse=True)[1],
        prompt_groups=prompt_groups(rows.keys.position, prompts),
        trained=np.bincount(completions.segments(), weights=mask, minlength=len(rows)).astype(
            np.int64
        ),
        mask=mask,
        sampler_logprobs=known.get("sampler_logprobs"),
        sampler_mass=known.get("sampler_mass"),
        version=known.get("version"),
        ports={
            (term.label, port.name): _port(
                assignment.inputs[f"{term.label}.{port.name}"], term, port.name, completions
            )
            for term in loss.terms
            for port in term.function.ports
            if f"{term.label}.{port.name}" in assignment.inputs
        },
    )


def _no_rows() -> TrainRows:
    """Of a rank whose share has no row of a set; there are no columns, either."""
    none, nothing = Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64)), np.zeros(0, np.int64)
    return TrainRows(
        keys=Keys.of([]),
        prompts=none,
        completions=none,
        groups=nothing,
        prompt_groups=nothing,
        trained=nothing,
        mask=np.zeros(0, np.float32),
        sampler_logprobs=None,
        sampler_mass=None,
        version=None,
        ports={},
    )


def _port(batch: Batch, term: LossTerm, name: str, completions: Ragged) -> PortColumns:
    """The port's columns per completion token and per row, as far as they are there."""
    schema = next(port.schema for port in term.function.ports if port.name == name)
    came = [column for column in schema.columns.values() if column.name in batch.names]
    where = f"{term.label}.{name}"
    return PortColumns(
        {c.name: aligned(batch, c.name, completions.offsets, where) for c in came if c.axis == "T"},
        {
            c.name: values
            for c in came
            if c.axis is None and (values := _numbers(batch, c.name)) is not None
        },
    )


def _numbers(batch: Batch, name: str) -> np.ndarray | Tensor | None:
    """A column with one number per row; None if it is not numeric."""
    if name in batch.device:
        return batch.tensor(name).values
    values = batch.flat(name)
    return values if values.dtype.kind in "fiu" else None


def now_of(rows: TrainRows, packed: Packed, step: int, device: torch.device) -> Now:
    """All of Now except the model's part."""
    here = rows.groups[packed.rows]
    numbers, group = np.unique(here, return_inverse=True)
    row, row_group = index(packed.row, device), index(group, device)
    return Now(
        mask=gather(rows.mask, packed.tokens, device),
        row=row,
        group=row_group[row],
        row_group=row_group,
        rows=len(packed.rows),
        groups=len(numbers),
        step=step,
        sampler_logprobs=_maybe(rows.sampler_logprobs, packed, device),
        sampler_mass=_maybe(rows.sampler_mass, packed, device),
        version=_maybe(rows.version, packed, device),
    )


def _maybe(values: np.ndarray | None, packed: Packed, device: torch.device) -> Tensor | None:
    return None if values is None else gather(values, packed.tokens, device)


def tensors_of(rows: TrainRows, term: LossTerm, packed: Packed, now: Now) -> dict[str, Tensors]:
    """The term's ports as packed tensors; those in `term.now` are detached current log-probs."""
    found: dict[str, Tensors] = {}
    for port in term.function.ports:
        if port.name in term.now and now.logprobs is not None:
            found[port.name] = Tensors({"logprobs": now.logprobs.detach().clone()})
        elif (term.label, port.name) in rows.ports:
            columns = rows.ports[term.label, port.name]
            by_token = {
                n: gather(v, packed.tokens, now.mask.device) for n, v in columns.tokens.items()
            }
            by_row = {n: gather(v, packed.rows, now.mask.device) for n, v in columns.rows.items()}
            found[port.name] = Tensors(by_token | by_row)
    return found
