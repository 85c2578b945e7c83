"""What the rules look at: a graph, and what several of them derive from it.

Owns: wires (each input with its declaration and its place in the user's file), who writes and reads
each State, what each source feeds, the columns of data files; a fault or a warning at a node, and
how messages name nodes. Does not own: any judgement, except that an unreadable data file is a fault
at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from dataflow.errors import DataError, Fault, GraphWarning, Origin
from dataflow.graph import Graph
from dataflow.loss_terms import Loss, LossTerm, input_of
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.operator import Input
from dataflow.regions import Regions, find_trained_models, regions
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

    def warning(self, rule: str, problem: str, fix: str) -> GraphWarning:
        """A warning of this input, at the user's call."""
        return GraphWarning(
            rule=rule, where=self.where, problem=problem, fix=fix, origin=self.origin
        )


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
        return tuple(state for state in self.graph.states if isinstance(state, Model))

    def dataset(self, port: Port) -> Mapping[str, pa.DataType]:
        """The dataset columns of the source that a port's rows come from."""
        domain = self.domains.of(port)
        return self.data.get(id(domain.source), {}) if domain else {}


def context_of(
    graph: Graph, columns_of: ColumnReader | None = None, carried: Iterable[str] = ()
) -> Context:
    """Derive what the rules need. columns_of: used instead of the source operators' own readers."""
    writers: dict[str, list[Node]] = {}
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for param, state in node.states.items():
            users = writers if param in node.operator.writes else readers
            users.setdefault(state.name, []).append(node)
    sources = tuple(node for node in graph.nodes if node.operator.work == "source")
    wires = {id(node): tuple(_list_wires(node)) for node in graph.nodes}
    data, faults = _read_columns(sources, columns_of)
    domains = Domains(graph)
    return Context(
        graph=graph,
        domains=domains,
        samplers=Samplers(graph, domains),
        regions=regions(graph),
        trained=frozenset(find_trained_models(graph)),
        wires=wires,
        writers={name: tuple(nodes) for name, nodes in writers.items()},
        readers={name: tuple(nodes) for name, nodes in readers.items()},
        sources=sources,
        fed=_find_fed_sinks(graph, sources),
        data=data,
        doubtful=_find_doubtful(graph, wires),
        data_faults=faults,
        carried=frozenset(carried),
    )


def _list_wires(node: Node) -> Iterator[Wire]:
    for key, port in node.inputs.items():
        declared, term = input_of(node, key)
        if term is None:
            row_set, name = next(iter(node.inputs)), key
            where, origin = f"{node.operator.name}.{key}", node.origin
        else:
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


def _find_doubtful(graph: Graph, wires: Mapping[int, tuple[Wire, ...]]) -> frozenset[int]:
    """Ids of the nodes with a wire that does not fit, and of all below them."""
    doubtful: set[int] = set()
    for node in graph.nodes:
        if any(not wire.fits or id(wire.port.node) in doubtful for wire in wires[id(node)]):
            doubtful.add(id(node))
    return frozenset(doubtful)


def _find_fed_sinks(graph: Graph, sources: tuple[Node, ...]) -> dict[int, tuple[Node, ...]]:
    """The sinks that each source feeds, by its id. One bit per source is passed down from node to
    node.
    """
    bits = {id(source): 1 << i for i, source in enumerate(sources)}
    masks: dict[int, int] = {}
    fed: dict[int, list[Node]] = {id(source): [] for source in sources}
    sinks = {id(sink) for sink in graph.sinks}
    for node in graph.nodes:
        mask = bits.get(id(node), 0)
        for parent in node.parents:
            mask |= masks[id(parent)]
        masks[id(node)] = mask
        if id(node) in sinks:
            while mask:
                lowest = mask & -mask
                source = sources[lowest.bit_length() - 1]
                fed[id(source)].append(node)
                mask ^= lowest
    return {source_id: tuple(nodes) for source_id, nodes in fed.items()}


def _read_columns(
    sources: tuple[Node, ...], columns_of: ColumnReader | None
) -> tuple[dict[int, Mapping[str, pa.DataType]], tuple[Fault, ...]]:
    columns_by_source: dict[int, Mapping[str, pa.DataType]] = {}
    faults: list[Fault] = []
    for node in sources:
        path, split = node.params.get("data"), node.params.get("split")
        if not node.operator.data_columns or not isinstance(path, str):
            continue
        read: ColumnReader = columns_of or function_at(node.operator.data_columns)
        try:
            columns_by_source[id(node)] = read(path, split)
        except DataError as error:
            faults.append(_unreadable(node, str(error)))
    return columns_by_source, tuple(faults)


def function_at(path: str) -> Any:
    """Import the function that an operator names as module:function."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _unreadable(node: Node, message: str) -> Fault:
    problem, _, fix = message.rstrip(".").partition(". Fix: ")
    fix = fix or "a file or folder of Parquet, JSONL or CSV with these columns"
    return fault_at(node, "data", problem, fix)


def node_models(node: Node) -> list[Model]:
    """The Models that a node reads or writes."""
    return [state for state in node.states.values() if isinstance(state, Model)]


def list_read_models(node: Node) -> list[Model]:
    """The Models that a node reads, as its operator declares."""
    states = [node.states.get(param) for param in node.operator.reads]
    return [state for state in states if isinstance(state, Model)]


def loss_terms(node: Node) -> tuple[LossTerm, ...]:
    """The terms of a node's loss; none if it has no loss."""
    loss = node.params.get("loss")
    return loss.terms if isinstance(loss, Loss) else ()


def fault_at(node: Node, rule: str, problem: str, fix: str) -> Fault:
    """A fault in a node, at the user's line."""
    return Fault(rule=rule, where=name_node(node), problem=problem, fix=fix, origin=node.origin)


def warning_at(node: Node, rule: str, problem: str, fix: str) -> GraphWarning:
    """A warning of a node, at the user's line."""
    where = name_node(node)
    return GraphWarning(rule=rule, where=where, problem=problem, fix=fix, origin=node.origin)


def name_node(node: Node) -> str:
    """`generate 'rollout'`, or `train_policy` if the name says it all."""
    operator = node.operator.name
    return node.name if node.name.startswith(operator) else f"{operator} {node.name!r}"


def line_of(thing: Node | Model, seen_from: Origin | None) -> str:
    """`line 9`; `ppo.py:9` if that is another file than the fault's; `another line` if unknown."""
    origin = thing.origin
    if origin is None:
        return "another line"
    if seen_from is not None and origin.file == seen_from.file:
        return f"line {origin.line}"
    return str(origin)


def data_name(node: Node) -> str:
    """`prompts 'train.parquet'`, the form in which messages name a source."""
    path = node.params.get("data")
    if isinstance(path, str):
        return f"{node.operator.name} {PurePath(path).name!r}"
    return name_node(node)


def describe_count(count: int, what: str) -> str:
    """Describe a count: `1 row`, `2 rows`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
