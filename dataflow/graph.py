"""Graphs: the nodes reachable from their sinks, rewrites of them, and how long one runs.

Owns: reachability, order, look-up by name, the two rewrites `replace` and `extend`, which return
the same object for what did not change, and a phase: a graph with its end. Does not own: any rule
about valid graphs (check.py), several phases (program.py); a Graph may be wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dataflow.calls import call_site, constructs, refused, require
from dataflow.carried_weights import Carried
from dataflow.convention import DIALECT_LIMIT, Dialect
from dataflow.display import Displayed
from dataflow.errors import Fault, GraphError, Origin, nearest
from dataflow.limits import number, text, whole
from dataflow.model import Buffer, State
from dataflow.node import Node, Port
from dataflow.schema import Schema

S = TypeVar("S", bound=Schema)
Inputs = Mapping[str, Port[Any]]
States = Mapping[str, State]
_STEPS = whole(1, like=1000, optional=True)
_BOUND = number(like=0.5, optional=True)
_METRIC = text(like="eval/exact_match")


class Graph(Displayed):
    """An algorithm. `nodes` are in the order in which they can run, inputs before users.

    dialect: the peer whose conventions all operators and losses follow that have some and name no
    other (`dialect=` of theirs is None). It changes no algorithm: neither clip nor baseline.
    """

    __slots__ = ("_named", "dialect", "digest", "name", "nodes", "origin", "sinks")
    _page = "dataflow.draw.pages:graph_page"

    def __init__(
        self, name: str, *sinks: Node, dialect: Dialect = "trl", origin: Origin | None = None
    ) -> None:
        self.name = name
        self.origin = origin or call_site()
        self.sinks = sinks
        require(
            "Graph",
            "name",
            name,
            fits=isinstance(name, str),
            expected="text",
            fix='Graph("grpo", train(...))',
        )
        _require_dialect(self, dialect)
        self.dialect: Dialect = dialect
        for sink in sinks:
            _require_sink(self, sink)
        self.nodes: tuple[Node, ...] = tuple(_reach(sinks))
        # The first of a name; a name that is no text is what the check refuses.
        self._named = {n.name: n for n in reversed(self.nodes) if isinstance(n.name, str)}
        self.digest = _digest(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes)"

    def node(self, name: str) -> Node:
        """The node of that name. Raises GraphError that lists the names."""
        found = self._named.get(name) if isinstance(name, str) else None
        if found is None:
            raise GraphError(self._unknown("node", name))
        return found

    def port(self, name: str, schema: type[S], index: int = 0) -> Port[S]:
        """The output of a node, checked against the schema that the caller expects."""
        node = self.node(name)
        if not node.schemas:
            problem, fix = f"{node.operator.name} has no output", "name a node that is no sink"
            raise GraphError(
                Fault(
                    rule="port",
                    where=f"port {name!r}",
                    problem=problem,
                    fix=fix,
                    origin=call_site(),
                )
            )
        fits = isinstance(schema, type) and issubclass(schema, Schema)
        require(
            f"port {name!r}",
            "schema",
            schema,
            fits=fits,
            expected="a Schema",
            fix=f"g.port({name!r}, Rollout)",
        )
        if not issubclass(node.schemas[index], schema):
            problem = f"expected {schema.__name__}, found {node.schemas[index].__name__}"
            fix = f"g.port({name!r}, {node.schemas[index].__name__})"
            raise GraphError(
                Fault(
                    rule="port",
                    where=f"port {name!r}",
                    problem=problem,
                    fix=fix,
                    origin=call_site(),
                )
            )
        return Port(node, index)

    @property
    def states(self) -> tuple[State, ...]:
        """Every State that a node reads or writes, and those that they follow, in order of use."""
        found: dict[State, None] = {}
        for node in self.nodes:
            for state in node.states.values():
                line = [state]
                while (leader := getattr(line[-1], "follows", None)) is not None:
                    line.append(leader)
                for known in reversed(line):
                    found.setdefault(known)
        return tuple(found)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """A graph alone is a Program of one phase, which has no number and no end of its own."""
        return (Phase(self, origin=self.origin),)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its phases: 0, as its one phase has none."""
        return (0,)

    @property
    def begins(self) -> tuple[Mapping[str, Carried], ...]:
        """For its one phase, the Models that do not begin with their base: none."""
        return ({},)

    def with_graphs(self, graphs: Sequence[Graph]) -> Graph:
        """The one graph in the place of its own, as `Program.with_graphs`."""
        (graph,) = graphs
        return graph

    def users(self, node: Node) -> tuple[Node, ...]:
        """The nodes with an input from this one."""
        return tuple(n for n in self.nodes if any(p.node is node for p in n.inputs.values()))

    def replace(self, **ports: Port[Any] | tuple[Port[Any], ...]) -> Graph:
        """Everything that read node `name` reads the given port instead; the same Graph if nothing
        changed.

        A node with several outputs takes a tuple of ports. The new ports may use nodes of this
        graph, even the replaced one: what they use is left unchanged. Raises GraphError for an
        unknown node.
        """
        given: dict[str, tuple[Port[Any], ...]] = {}
        for name, value in ports.items():
            if not any(n.name == name for n in self.nodes):
                raise GraphError(self._unknown("replace", name))
            given[name] = value if isinstance(value, tuple) else (value,)
            _require_outputs(self.node(name), given[name])
        return self._rewritten(given)

    def extend(self, *sinks: Node) -> Graph:
        """The graph with further sinks, run after its own; the same Graph if none are given."""
        return self._like(self.name, (*self.sinks, *sinks)) if sinks else self

    def renamed(self, name: str) -> Graph:
        """The same graph under another name."""
        return self if name == self.name else self._like(name, self.sinks)

    def in_dialect(self, dialect: Dialect) -> Graph:
        """The same graph with another peer's conventions, except where a node names its own."""
        if dialect == self.dialect:
            return self
        return Graph(self.name, *self.sinks, dialect=dialect, origin=self.origin)

    def _like(self, name: str, sinks: tuple[Node, ...]) -> Graph:
        return Graph(name, *sinks, dialect=self.dialect, origin=self.origin)

    def map(self, change: Callable[[Node], Node]) -> Graph:
        """Every node as `change` returns it, on its inputs' new versions; the same Graph if nothing
        changed.
        """
        new: dict[int, Node] = {}

        def port(old: Port[Any]) -> Port[Any]:
            node = new[id(old.node)]
            return old if node is old.node else Port(node, old.index)

        for node in self.nodes:
            states = {k: _moved(s, new) for k, s in node.states.items()}
            changed = change(node)
            inputs = {k: port(p) for k, p in changed.inputs.items()}
            new[id(node)] = changed.rebuilt(inputs, states if changed is node else None)
        return self._with_sinks(new)

    def remade(self, make: Callable[[Node, Inputs, States], Node]) -> Graph:
        """Every node as `make` returns it for the new versions of its inputs and States; the same
        Graph if nothing changed. Unlike in `map`, what is above a node is known when it is made.
        """
        new: dict[int, Node] = {}
        for node in self.nodes:
            states = {k: _moved(s, new) for k, s in node.states.items()}
            inputs = {k: Port(new[id(p.node)], p.index) for k, p in node.inputs.items()}
            new[id(node)] = make(node, inputs, states)
        return self._with_sinks(new)

    def _rewritten(self, given: Mapping[str, tuple[Port[Any], ...]]) -> Graph:
        kept = {id(n) for n in _reach([p.node for new in given.values() for p in new])}
        new: dict[int, Node] = {}

        def port(old: Port[Any]) -> Port[Any]:
            if old.node.name in given:
                return given[old.node.name][old.index]
            node = new.get(id(old.node), old.node)
            return old if node is old.node else Port(node, old.index)

        for node in self.nodes:
            if id(node) in kept:
                continue
            states = {k: _moved(s, new) for k, s in node.states.items()}
            new[id(node)] = node.rebuilt({k: port(p) for k, p in node.inputs.items()}, states)
        return self._with_sinks(new)

    def _with_sinks(self, new: Mapping[int, Node]) -> Graph:
        """The graph of the sinks' new versions; this one if they did not change."""
        sinks = tuple(new.get(id(s), s) for s in self.sinks)
        same = all(a is b for a, b in zip(sinks, self.sinks, strict=True))
        return self if same else self._like(self.name, sinks)

    def _unknown(self, what: str, name: str) -> Fault:
        known = sorted(n.name for n in self.nodes)
        near = nearest(str(name), known)
        fix = f"{near!r}" if near else "one of these names"
        where = f"{what} {name!r}" if what == "node" else what
        problem = f"no node {name!r}; nodes: {', '.join(known)}"
        return Fault(rule="name", where=where, problem=problem, fix=fix, origin=call_site())


@constructs
@dataclass(frozen=True, slots=True)
class Threshold:
    """Ends a phase at the end of the first Step whose `metric` is at least, or at most, a value."""

    metric: str
    at_least: float | None = field(default=None, kw_only=True)
    at_most: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where, fix = "Threshold", 'Threshold("eval/exact_match", at_least=0.5)'
        fits = _METRIC.accepts(self.metric) and bool(self.metric)
        require(where, "metric", self.metric, fits=fits, expected="a metric's name", fix=fix)
        for name, value in (("at_least", self.at_least), ("at_most", self.at_most)):
            fits = _BOUND.accepts(value)
            require(where, name, value, fits=fits, expected=_BOUND.expected(value), fix=fix)
        if (self.at_least is None) == (self.at_most is None):
            raise refused(where, "expected one of at_least and at_most", fix)

    def __str__(self) -> str:
        low = self.at_least is not None
        return f"{self.metric} {'>=' if low else '<='} {self.at_least if low else self.at_most}"

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether a Step's metrics meet it; not where the metric is absent or not a number."""
        latest = metrics.get(self.metric)
        if latest is None:
            return False
        if self.at_least is not None:
            return latest >= self.at_least
        return self.at_most is not None and latest <= self.at_most


@constructs
@dataclass(frozen=True, slots=True)
class Phase:
    """One graph of a Program, and how long it runs.

    steps: of this phase, by which its schedules, start= and every= count; None: one pass over its
    data. until: ends it earlier. optimizers: names of Models whose optimizer goes on where their
    last training in an earlier phase ended; all others begin anew, since moments of another loss
    are seldom wanted.
    """

    graph: Graph
    steps: int | None = None
    until: Threshold | None = field(default=None, kw_only=True)
    optimizers: tuple[str, ...] = field(default=(), kw_only=True)
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)
    """Where it was made; by default the line of the call."""

    def __post_init__(self) -> None:
        if self.origin is None:
            object.__setattr__(self, "origin", call_site())
        where, graph, until = "Phase", self.graph, self.until
        fits = isinstance(graph, Graph)
        require(where, "graph", graph, fits=fits, expected="a Graph", fix="Phase(sft(...), 200)")
        fits, expected = _STEPS.accepts(self.steps), _STEPS.expected()
        require(where, "steps", self.steps, fits=fits, expected=expected, fix="steps=1000")
        fits, fix = (
            until is None or isinstance(until, Threshold),
            'until=Threshold("eval/x", at_least=0.5)',
        )
        require(where, "until", until, fits=fits, expected="a Threshold or None", fix=fix)
        named = self.optimizers
        fits = isinstance(named, tuple | list) and all(isinstance(n, str) and n for n in named)
        expected, fix = "names of Models", 'optimizers=("policy",)'
        require(where, "optimizers", named, fits=fits, expected=expected, fix=fix)
        object.__setattr__(self, "optimizers", tuple(named))

    @property
    def length(self) -> str:
        """`200 Steps, or until eval/exact_match >= 0.5`."""
        steps = "1 Step" if self.steps == 1 else f"{self.steps:,} Steps" if self.steps else ""
        return (steps or "one pass over its data") + (f", or until {self.until}" * bool(self.until))


def _moved(state: State, new: Mapping[int, Node]) -> State:
    """A Buffer on the new version of its writer, if that was rebuilt."""
    if (
        isinstance(state, Buffer)
        and id(state.writer) in new
        and new[id(state.writer)] is not state.writer
    ):
        return Buffer(state.name, writer=new[id(state.writer)])
    return state


def _reach(roots: Any) -> Iterator[Node]:
    """The nodes reachable from the roots, each after its inputs; iterative, for any depth."""
    done: set[int] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if id(root) in done:
            continue
        done.add(id(root))
        stack.append((root, iter(root.parents)))
        while stack:
            node, parents = stack[-1]
            parent = next((p for p in parents if id(p) not in done), None)
            if parent is None:
                stack.pop()
                yield node
            else:
                done.add(id(parent))
                stack.append((parent, iter(parent.parents)))


def _require_sink(graph: Graph, sink: object) -> None:
    if isinstance(sink, Node):
        return
    found = (
        f"a Port of {sink.node.name!r}"
        if isinstance(sink, Port)
        else f"{type(sink).__name__} {sink!r:.60}"
    )
    fix = (
        "give what train(...), evaluate(...) or record(...) returned; what sinks do not reach is"
        " not in the graph"
    )
    problem = f"expected sinks, found {found}"
    raise GraphError(
        Fault(
            rule="call",
            where=f"Graph {graph.name!r}",
            problem=problem,
            fix=fix,
            origin=graph.origin,
        )
    )


def _require_dialect(graph: Graph, dialect: object) -> None:
    """Raises GraphError for a name that is none of the peers'."""
    require(
        f"Graph {graph.name!r}",
        "dialect",
        dialect,
        fits=DIALECT_LIMIT.accepts(dialect),
        expected=DIALECT_LIMIT.expected(),
        fix=f"dialect={DIALECT_LIMIT.suggestion(dialect)!r}",
    )


def _require_outputs(node: Node, ports: tuple[Port[Any], ...]) -> None:
    for port in ports:
        if not isinstance(port, Port):
            problem = (
                f"expected the output of an operator, found {type(port).__name__} {port!r:.60}"
            )
            fault = Fault(
                rule="call",
                where=f"replace {node.name!r}",
                problem=problem,
                fix="pass a Port",
                origin=call_site(),
            )
            raise GraphError(fault)
    if len(ports) != len(node.schemas):
        problem = f"it has {len(node.schemas)} outputs, found {len(ports)} in their place"
        fix = (
            "replace a node by as many ports as it has outputs (sinks cannot be replaced: build the"
            " Graph anew)"
        )
        raise GraphError(
            Fault(
                rule="call",
                where=f"replace {node.name!r}",
                problem=problem,
                fix=fix,
                origin=call_site(),
            )
        )


def _digest(graph: Graph) -> str:
    h = hashlib.blake2b(graph.name.encode(errors="surrogatepass"), digest_size=16)
    h.update(f"|{graph.dialect}|".encode())
    for sink in graph.sinks:
        h.update(sink.digest.encode())
    return h.hexdigest()
