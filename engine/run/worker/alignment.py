"""Checks that the token columns of a row have one length, where rows are made and where joined.

Owns: which ports of a node describe the same tokens. Does not own: the comparison
(dataflow/token_alignment.py).

An operator's inputs on the same rows describe the same tokens, unless several of them hold token
ids: then each has its own (a draft and its revision). A node's output describes its inputs' tokens,
unless it holds ids itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dataflow.arrays import same_array
from dataflow.batch import Batch, Keys
from dataflow.errors import KernelError
from dataflow.loss import Loss
from dataflow.node import Node
from dataflow.operator import Concat, Reduce
from dataflow.schema import Schema
from dataflow.token_alignment import find_misaligned

Ports = Iterable[tuple[str, Batch, type[Schema]]]


class Alignment:
    """The token columns of one node."""

    def __init__(self, node: Node) -> None:
        self._name = node.name
        self._inputs = {
            key: port.schema for key, port in node.inputs.items() if _same_rows(node, key)
        }
        ids = [key for key, schema in self._inputs.items() if schema.vocabulary]
        self._one_text = len(ids) == 1 or node.operator.work == "train"
        schemas = [s for s in node.schemas if s.columns]
        self._made = schemas[0] if len(schemas) == 1 else None

    def require_inputs(self, keys: Keys, inputs: Mapping[str, Batch]) -> None:
        """Raises KernelError naming the row where two columns of a node differ in length."""
        ports = [(key, inputs[key], kind) for key, kind in self._inputs.items() if key in inputs]
        fix = "Fix: columns that were made from the tokens of this very port."
        if self._one_text:
            self._require(keys, ports, fix)
            return
        for port in ports:
            self._require(keys, [port], fix)

    def require_made(self, keys: Keys, batch: Batch, inputs: Mapping[str, Batch]) -> None:
        """The same for rows that a node made from the chunk with these keys."""
        if self._made is None:
            return
        ports: list[tuple[str, Batch, type[Schema]]] = [("", batch, self._made)]
        if self._one_text and not self._made.vocabulary and _same(batch.keys, keys):
            of_text = next(key for key, schema in self._inputs.items() if schema.vocabulary)
            ports = [(of_text, inputs[of_text], self._inputs[of_text]), *ports]
        fix = "Fix: one value for each token (rollout['completion_mask'].like(values))."
        self._require(batch.keys, ports, fix)

    def _require(self, keys: Keys, ports: Ports, fix: str) -> None:
        difference = find_misaligned(ports)
        if difference is not None:
            row = keys.rows()[difference.row]
            where = f"{self._name}: row (position, sample, attempt) {row}"
            raise KernelError(f"{where}: {difference}. {fix}")


def _same_rows(node: Node, key: str) -> bool:
    """Whether an input has the chunk's own rows, not an ancestor's or descendants'."""
    rows = node.operator.rows
    if isinstance(rows, Reduce):
        return key == rows.to
    if isinstance(rows, Concat):
        return False
    return isinstance(node.params.get("loss"), Loss) or node.operator.input(key).rows == "rows"


def _same(a: Keys, b: Keys) -> bool:
    return same_array(a.position, b.position) and same_array(a.sample, b.sample)
