"""The rows of a Step as a train kernel reads them: flat columns, and the `Now` of a micro-batch.

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
from dataflow.schema import Schema
from operators.kernels.tensors import gather, require_aligned, to_index_tensor
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
    rows = assignment.inputs.get(row_set)
    if rows is None or not len(rows):
        return _no_rows()
    completions = rows.ragged("completion_ids")
    prompts = rows.ragged("prompt_ids")
    columns = {
        name: require_aligned(rows, name, completions.offsets, f"{node}.{row_set}")
        for name in ("completion_mask", "sampler_logprobs", "sampler_mass", "version")
        if name in rows.names
    }
    mask = columns["completion_mask"].astype(np.float32)
    trained = np.bincount(completions.segments(), weights=mask, minlength=len(rows))
    _, groups = np.unique(rows.keys.position, return_inverse=True)
    return TrainRows(
        keys=rows.keys,
        prompts=prompts,
        completions=completions,
        groups=groups,
        prompt_groups=prompt_groups(rows.keys.position, prompts),
        trained=trained.astype(np.int64),
        mask=mask,
        sampler_logprobs=columns.get("sampler_logprobs"),
        sampler_mass=columns.get("sampler_mass"),
        version=columns.get("version"),
        ports=_read_ports(assignment, loss.on(row_set), completions),
    )


def _no_rows() -> TrainRows:
    """The rows of a rank whose share has none of a set; there are no columns, either."""
    no_lists = Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))
    no_numbers = np.zeros(0, np.int64)
    return TrainRows(
        keys=Keys.of([]),
        prompts=no_lists,
        completions=no_lists,
        groups=no_numbers,
        prompt_groups=no_numbers,
        trained=no_numbers,
        mask=np.zeros(0, np.float32),
        sampler_logprobs=None,
        sampler_mass=None,
        version=None,
        ports={},
    )


def _read_ports(
    assignment: Assignment, loss: Loss, completions: Ragged
) -> dict[tuple[str, str], PortColumns]:
    """Read the ports of all terms for which rows came, by (label, port)."""
    ports: dict[tuple[str, str], PortColumns] = {}
    for term in loss.terms:
        for port in term.function.ports:
            input_name = f"{term.label}.{port.name}"
            batch = assignment.inputs.get(input_name)
            if batch is not None:
                columns = _read_columns(batch, port.schema, input_name, completions)
                ports[term.label, port.name] = columns
    return ports


def _read_columns(
    batch: Batch, schema: type[Schema], input_name: str, completions: Ragged
) -> PortColumns:
    """Read those columns of a port's schema that came, per completion token and per row."""
    by_token: dict[str, np.ndarray | Tensor] = {}
    by_row: dict[str, np.ndarray | Tensor] = {}
    for column in schema.columns.values():
        if column.name not in batch.names:
            continue
        if column.axis == "T":
            by_token[column.name] = require_aligned(
                batch, column.name, completions.offsets, input_name
            )
        elif column.axis is None:
            numbers = _read_numbers(batch, column.name)
            if numbers is not None:
                by_row[column.name] = numbers
    return PortColumns(by_token, by_row)


def _read_numbers(batch: Batch, name: str) -> np.ndarray | Tensor | None:
    """Read a column with one number per row; None if it is not numeric."""
    if name in batch.device:
        return batch.tensor(name).values
    numbers = batch.flat(name)
    return numbers if numbers.dtype.kind in "fiu" else None


def now_of(rows: TrainRows, packed: Packed, step: int, device: torch.device) -> Now:
    """Make the Now of a micro-batch, except for the model's part."""
    # Groups are numbered anew, from 0, so that a loss can sum over those of the micro-batch.
    step_groups, group = np.unique(rows.groups[packed.rows], return_inverse=True)
    row, row_group = to_index_tensor(packed.row, device), to_index_tensor(group, device)
    return Now(
        mask=gather(rows.mask, packed.tokens, device),
        row=row,
        group=row_group[row],
        row_group=row_group,
        rows=len(packed.rows),
        groups=len(step_groups),
        step=step,
        sampler_logprobs=_gather_known(rows.sampler_logprobs, packed, device),
        sampler_mass=_gather_known(rows.sampler_mass, packed, device),
        version=_gather_known(rows.version, packed, device),
    )


def _gather_known(column: np.ndarray | None, packed: Packed, device: torch.device) -> Tensor | None:
    if column is None:
        return None
    return gather(column, packed.tokens, device)


def tensors_of(rows: TrainRows, term: LossTerm, packed: Packed, now: Now) -> dict[str, Tensors]:
    """Gather the term's ports as packed tensors; those in `term.now` are the current log-probs,
    detached.
    """
    device = now.mask.device
    tensors: dict[str, Tensors] = {}
    for port in term.function.ports:
        if port.name in term.now and now.logprobs is not None:
            # A copy: a term may write into its ports, and other terms read these log-probs.
            tensors[port.name] = Tensors({"logprobs": now.logprobs.detach().clone()})
        elif (term.label, port.name) in rows.ports:
            columns = rows.ports[term.label, port.name]
            by_token = {n: gather(v, packed.tokens, device) for n, v in columns.tokens.items()}
            by_row = {n: gather(v, packed.rows, device) for n, v in columns.rows.items()}
            tensors[port.name] = Tensors(by_token | by_row)
    return tensors
