"""Positions: how long the rows of a generation may be for every Model that reads them.

Owns: the least positions among the readers of each node's token ids. Does not own: who wrote them
(rows.py), what a configuration says of positions (model_files.py), what happens to overlong prompts
(operators/kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataflow.errors import DataError
from dataflow.graph import Graph
from dataflow.loss_terms import row_sets
from dataflow.model import Model
from dataflow.model_files import CONFIG, folder_of, maybe_object, positions_of
from dataflow.node import Node
from dataflow.rows import writers


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The most tokens per row. model: the Model with that limit; node: the reader that uses it."""

    limit: int
    model: str
    node: Node


def row_positions(graph: Graph) -> dict[str, Positions]:
    """For each node that writes token ids, the least positions of itself and its rows' readers.

    Models whose files are not on this machine, or give no positions, do not count.
    """
    least: dict[str, Positions] = {}
    for maker, reader in _list_readers(graph):
        for state in reader.states.values():
            limit = _read_limit(state) if isinstance(state, Model) else None
            if limit is None:
                continue
            if maker.name not in least or limit < least[maker.name].limit:
                least[maker.name] = Positions(limit=limit, model=state.name, node=reader)
    return least


def _read_limit(model: Model) -> int | None:
    """The positions of a Model if its files are here and give them; None for an unreadable file."""
    folder = folder_of(model.base)
    if folder is None:
        return None
    try:
        return positions_of(maybe_object(folder / CONFIG))
    except (DataError, OSError):
        return None


def _list_readers(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """(maker, reader) of token ids: a generation reads its own rows, a train node those that it
    trains.
    """
    for node in graph.nodes:
        if node.operator.traits.generates:
            yield node, node
        elif node.operator.work in ("forward", "train") and not node.operator.reads_text:
            token_inputs = [port for port in node.inputs.values() if port.schema.vocabulary]
            for rows in row_sets(node).values() or token_inputs[:1]:
                for maker in writers(rows):
                    yield maker, node
