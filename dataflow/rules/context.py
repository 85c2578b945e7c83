"""What the rules look at: a graph, and what several of them derive from it.

Owns: wires (each input with its declaration and its place in the user's file), who writes and reads
each State, what each source feeds, the columns of data files. Does not own: any judgement, except
that an unreadable data file is a fault at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from dataflow.errors import DataError, Fault, Origin
from dataflow.graph import Graph
from dataflow.loss_terms import input_of
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.operator import Input
from dataflow.regions import Regions, regions, trained_models
from dataflow.rows import Domains
from dataflow.samplers import Samplers

ColumnReader = Callable[[str, str | None], Mapping[str, pa.DataType]]
"""(data, split) -> the columns of that file. Raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One input of a node. `where` and `origin`: the user's call; for a loss's port, the loss's.
    row_set: the input with whose rows it is compared.
    """

    node: Node
    key: str
    name: str
    row_set: str
    port: Port
    input: Input
    where: str
    origin: Origin | None

    @property
    def fits(self) -> bool:
        """Whether the port has the columns that its reader declares."""
        return issubclass(self.port.schema, self.input.schema)

    def fault(self, rule: str, problem: str, fix: str) -> Fault:
        """A fault in this input, at the user's call."""
        return Fault(rule=rule, where=self.where, problem=problem, fix=fix, origin=self.origin)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """A graph and what is derived from it once. Maps by node use its id as key: names may be
    ambiguous here.
    """

    graph: Graph
    domains: Domains
    samplers: Samplers
    regions: Regions
    trained: frozenset[str]
    """Names of the Models that change during a run."""
    wires: Mapping[int, tuple[Wire, ...]]
    writers: Mapping[str, tuple[Node, ...]]
    readers: Mapping[str, tuple[Node, ...]]
    sources: tuple[Node, ...]
    fed: Mapping[int, tuple[Node, ...]]
    """Source -> the sinks that it feeds, in the order of the graph."""
    data: Mapping[int, Mapping[str, pa.DataType]]
    """Source -> the columns of its data file; absent if the file could not be read."""
    doubtful: frozenset[int]
    """Nodes below a wire that does not fit: their rows are unknown."""
    data_faults: tuple[Fault, ...] = field(default=())
    carried: frozenset[str] = frozenset()
    """Models that begin with weights of an earlier phase of a Program, not with their base."""

    @property
    def models(self) -> tuple[Model, ...]:
        """The Models, in the order of first use."""
        return tuple(s for s in self.graph.states if isinstance(s, Model))

    def dataset(self, port: Port) -> Mapping[str, pa.DataType]:
        """The dataset columns of the source that a port's rows come from."""
        domain = self.domains.of(port)
        return self.data.get(id(domain.source), {}) if domain else {}


def context_of(
    graph: Graph, columns_of: ColumnReader | None = None, carried: Iterable[str] = ()
) -> Context:
    """Derive what the rules need. columns_of: used instead of the source operators' own readers."""
    states: dict[str, dict[str, list[Node]]] = {"writes": {}, "reads": {}}
    for node in graph.nodes:
        for param, state in node.states.items():
            kind = "writes" if param in node.operator.writes else "reads"
            states[kind].setdefault(state.name, []).append(node)
    sources = tuple(n for n in graph.nodes if n.operator.work == "source")
    wires = {id(n): tuple(_wires(n)) for n in graph.nodes}
    data, faults = _read_columns(sources, columns_of)
    domains = Domains(graph)
    return Context(
        graph=graph,
        domains=domains,
        samplers=Samplers(graph, domains),
        regions=regions(graph),
        trained=frozenset(trained_models(graph)),
        wires=wires,
        writers={name: tuple(nodes) for name, nodes in states["writes"].items()},
        readers={name: tuple(nodes) for name, nodes in states["reads"].items()},
        sources=sources,
        fed=_fed(graph, sources),
        data=data,
        doubtful=_doubtful(graph, wires),
        data_faults=faults,
        carried=frozenset(carried),
    )


def _wires(node: Node) -> Iterator[Wire]:
    for key, port in node.inputs.items():
        declared, term = input_of(node, key)
        row_set, name = next(iter(node.inputs)), key
        where, origin = f"{node.operator.name}.{key}", node.origin
        if term is not None:
            row_set, name = term.on, key.partition(".")[2]
            where, origin = f"{term.function.name}.{name}", term.origin or node.origin
        yield Wire(
            node=node,
            key=key,
            name=name,
            row_set=row_set,
            port=port,
            input=declared,
            where=where,
            origin=origin,
        )


def _doubtful(graph: Graph, wires: Mapping[int, tuple[Wire, ...]]) -> frozenset[int]:
    found: set[int] = set()
    for node in graph.nodes:
        if any(not wire.fits or id(wire.port.node) in found for wire in wires[id(node)]):
            found.add(id(node))
    return frozenset(found)


def _fed(graph: Graph, sources: tuple[Node, ...]) -> dict[int, tuple[Node, ...]]:
    """One bit per source, passed down from node to node."""
    bits = {id(s): 1 << i for i, s in enumerate(sources)}
    mask: dict[int, int] = {}
    fed: dict[int, list[Node]] = {id(s): [] for s in sources}
    sinks = {id(s) for s in graph.sinks}
    for node in graph.nodes:
        made = bits.get(id(node), 0)
        for parent in node.parents:
            made |= mask[id(parent)]
        mask[id(node)] = made
        if id(node) in sinks:
            while made:
                low = made & -made
                fed[id(sources[low.bit_length() - 1])].append(node)
                made ^= low
    return {key: tuple(nodes) for key, nodes in fed.items()}


def _read_columns(
    sources: tuple[Node, ...], columns_of: ColumnReader | None
) -> tuple[dict[int, Mapping[str, pa.DataType]], tuple[Fault, ...]]:
    found: dict[int, Mapping[str, pa.DataType]] = {}
    faults = []
    for node in sources:
        data, split = node.params.get("data"), node.params.get("split")
        if not node.operator.data_columns or not isinstance(data, str):
            continue
        read = columns_of or _reader(node.operator.data_columns)
        try:
            found[id(node)] = read(data, split)
        except DataError as error:
            faults.append(_unreadable(node, str(error)))
    return found, tuple(faults)


def _reader(path: str) -> ColumnReader:
    return function_at(path)


def function_at(path: str) -> Any:
    """The function that an operator names as module:function."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _unreadable(node: Node, message: str) -> Fault:
    problem, _, fix = message.rstrip(".").partition(". Fix: ")
    fix = fix or "a file or folder of Parquet, JSONL or CSV with these columns"
    return fault_at(node, "data", problem, fix)


def fault_at(node: Node, rule: str, problem: str, fix: str) -> Fault:
    """A fault in a node, at the user's line."""
    return Fault(rule=rule, where=place(node), problem=problem, fix=fix, origin=node.origin)


def place(node: Node) -> str:
    """`generate 'rollout'`, or `train_policy` if the name says it all."""
    operator = node.operator.name
    return node.name if node.name.startswith(operator) else f"{operator} {node.name!r}"


def line_of(thing: Node | Model, seen_from: Origin | None) -> str:
    """`line 9`; `ppo.py:9` if that is another file than the fault's; `another line` if unknown."""
    origin = thing.origin
    if origin is None:
        return "another line"
    return (
        f"line {origin.line}"
        if seen_from is not None and origin.file == seen_from.file
        else str(origin)
    )


def data_name(node: Node) -> str:
    """`prompts 'train.parquet'`, the form in which messages name a source."""
    data = node.params.get("data")
    return f"{node.operator.name} {PurePath(data).name!r}" if isinstance(data, str) else place(node)


def counted(count: int, what: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
