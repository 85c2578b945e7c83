"""Graphs: the nodes reachable from their sinks, rewrites of them, and how long one runs.

Owns: reachability, order, look-up by name, the rewrites, which return the same object for what did
not change, and a phase: a graph with its end. Does not own: any rule about valid graphs (check.py),
several phases (program.py); a Graph may be wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dataflow.calls import call_error, call_site, constructs, require
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

    dialect: the peer whose conventions are followed by every operator and loss that has some and
    names no other dialect (its own `dialect=` is None). It changes no algorithm: neither clip nor
    baseline.
    """

    __slots__ = ("_nodes_by_name", "dialect", "digest", "name", "nodes", "origin", "sinks")
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
        # Reversed, so that the first node of a name wins; the check refuses the others.
        self._nodes_by_name = {n.name: n for n in reversed(self.nodes) if isinstance(n.name, str)}
        self.digest = _digest(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes)"

    def node(self, name: str) -> Node:
        """Return the node of that name. Raises GraphError that lists the names."""
        # Something else than text may not be hashable, and would fail in the look-up.
        node = self._nodes_by_name.get(name) if isinstance(name, str) else None
        if node is None:
            raise GraphError(self._unknown(f"node {name!r}", name))
        return node

    def port(self, name: str, schema: type[S], index: int = 0) -> Port[S]:
        """Return an output of a node. Raises GraphError if it has another schema than the caller
        expects.
        """
        node = self.node(name)
        where = f"port {name!r}"
        if not node.schemas:
            problem = f"{node.operator.name} has no output"
            raise _port_error(where, problem, "name a node that is no sink")
        require(
            where,
            "schema",
            schema,
            fits=isinstance(schema, type) and issubclass(schema, Schema),
            expected="a Schema",
            fix=f"g.port({name!r}, Rollout)",
        )
        actual_schema = node.schemas[index]
        if not issubclass(actual_schema, schema):
            problem = f"expected {schema.__name__}, found {actual_schema.__name__}"
            raise _port_error(where, problem, f"g.port({name!r}, {actual_schema.__name__})")
        return Port(node, index)

    @property
    def states(self) -> tuple[State, ...]:
        """Every State that a node reads or writes, and those that they follow, in order of use."""
        states: dict[State, None] = {}
        for node in self.nodes:
            for state in node.states.values():
                # A leader comes before its follower.
                for leader in reversed(_list_leaders(state)):
                    states.setdefault(leader)
        return tuple(states)

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
        """Return the one graph given, as `Program.with_graphs` replaces each of its own."""
        (graph,) = graphs
        return graph

    def users(self, node: Node) -> tuple[Node, ...]:
        """The nodes with an input from this one."""
        return tuple(user for user in self.nodes if _reads(user, node))

    def replace(self, **ports: Port[Any] | tuple[Port[Any], ...]) -> Graph:
        """Let everything that read node `name` read the port given for it instead. Returns the same
        Graph if nothing changed.

        A node with several outputs takes a tuple of ports. The new ports may use nodes of this
        graph, even the replaced one: what they use is left unchanged. Raises GraphError for an
        unknown node.
        """
        ports_by_node: dict[str, tuple[Port[Any], ...]] = {}
        for name, port_or_ports in ports.items():
            if not any(n.name == name for n in self.nodes):
                raise GraphError(self._unknown("replace", name))
            if isinstance(port_or_ports, tuple):
                ports_by_node[name] = port_or_ports
            else:
                ports_by_node[name] = (port_or_ports,)
            _require_outputs(self.node(name), ports_by_node[name])
        return self._replace_ports(ports_by_node)

    def extend(self, *sinks: Node) -> Graph:
        """Return the graph with further sinks, run after its own; without any, the same Graph."""
        if not sinks:
            return self
        return self._with_name_and_sinks(self.name, (*self.sinks, *sinks))

    def renamed(self, name: str) -> Graph:
        """Return the same graph under another name."""
        if name == self.name:
            return self
        return self._with_name_and_sinks(name, self.sinks)

    def in_dialect(self, dialect: Dialect) -> Graph:
        """Return the same graph with another peer's conventions; a node's own dialect stays."""
        if dialect == self.dialect:
            return self
        return Graph(self.name, *self.sinks, dialect=dialect, origin=self.origin)

    def _with_name_and_sinks(self, name: str, sinks: tuple[Node, ...]) -> Graph:
        return Graph(name, *sinks, dialect=self.dialect, origin=self.origin)

    def map(self, change: Callable[[Node], Node]) -> Graph:
        """Rebuild every node as `change` returns it, on its inputs' new versions. Returns the same
        Graph if nothing changed.
        """
        new_nodes: dict[int, Node] = {}
        for node in self.nodes:
            states = _update_states(node, new_nodes)
            changed = change(node)
            inputs = {name: _update_port(p, new_nodes) for name, p in changed.inputs.items()}
            # A node that `change` has made anew has the States that it was given there.
            new_states = states if changed is node else None
            new_nodes[id(node)] = changed.rebuilt(inputs, new_states)
        return self._with_new_sinks(new_nodes)

    def remade(self, make: Callable[[Node, Inputs, States], Node]) -> Graph:
        """Make every node anew: `make` gets it with the new versions of its inputs and States.
        Returns the same Graph if nothing changed. Unlike in `map`, what is above a node is known
        when it is made.
        """
        new_nodes: dict[int, Node] = {}
        for node in self.nodes:
            states = _update_states(node, new_nodes)
            inputs = {k: Port(new_nodes[id(p.node)], p.index) for k, p in node.inputs.items()}
            new_nodes[id(node)] = make(node, inputs, states)
        return self._with_new_sinks(new_nodes)

    def _replace_ports(self, ports_by_node: Mapping[str, tuple[Port[Any], ...]]) -> Graph:
        roots: list[Node] = []
        for ports in ports_by_node.values():
            roots += [port.node for port in ports]
        # What the new ports use stays as it is, even where it reads a node that is replaced.
        new_nodes = {id(node): node for node in _reach(roots)}

        def update(old: Port[Any]) -> Port[Any]:
            if old.node.name in ports_by_node:
                return ports_by_node[old.node.name][old.index]
            return _update_port(old, new_nodes)

        for node in self.nodes:
            if id(node) in new_nodes:
                continue
            states = _update_states(node, new_nodes)
            inputs = {name: update(port) for name, port in node.inputs.items()}
            new_nodes[id(node)] = node.rebuilt(inputs, states)
        return self._with_new_sinks(new_nodes)

    def _with_new_sinks(self, new_nodes: Mapping[int, Node]) -> Graph:
        """Return the graph of the sinks' new versions; this one if they did not change."""
        sinks = tuple(new_nodes.get(id(s), s) for s in self.sinks)
        if all(new is old for new, old in zip(sinks, self.sinks, strict=True)):
            return self
        return self._with_name_and_sinks(self.name, sinks)

    def _unknown(self, where: str, name: str) -> Fault:
        names = sorted(node.name for node in self.nodes)
        near = nearest(str(name), names)
        return Fault(
            rule="name",
            where=where,
            problem=f"no node {name!r}; nodes: {', '.join(names)}",
            fix=f"{near!r}" if near else "one of these names",
            origin=call_site(),
        )


@constructs
@dataclass(frozen=True, slots=True)
class Threshold:
    """Ends a phase at the end of the first Step whose `metric` is at least, or at most, a value."""

    metric: str
    at_least: float | None = field(default=None, kw_only=True)
    at_most: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where = "Threshold"
        fix = 'Threshold("eval/exact_match", at_least=0.5)'
        fits = _METRIC.accepts(self.metric) and bool(self.metric)
        require(where, "metric", self.metric, fits=fits, expected="a metric's name", fix=fix)
        for name, bound in (("at_least", self.at_least), ("at_most", self.at_most)):
            fits = _BOUND.accepts(bound)
            require(where, name, bound, fits=fits, expected=_BOUND.describe(bound), fix=fix)
        if (self.at_least is None) == (self.at_most is None):
            raise call_error(where, "expected one of at_least and at_most", fix)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"{self.metric} >= {self.at_least}"
        return f"{self.metric} <= {self.at_most}"

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether a Step's metrics meet it; not where the metric is absent or not a number."""
        latest = metrics.get(self.metric)
        if latest is None:
            return False
        # Every comparison with NaN is False, so that NaN reaches nothing.
        if self.at_least is not None:
            return latest >= self.at_least
        return self.at_most is not None and latest <= self.at_most


@constructs
@dataclass(frozen=True, slots=True)
class Phase:
    """One graph of a Program, and how long it runs.

    steps: of this phase; its schedules, start= and every= count by them. None: one pass over its
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
        where = "Phase"
        graph = self.graph
        fits = isinstance(graph, Graph)
        require(where, "graph", graph, fits=fits, expected="a Graph", fix="Phase(sft(...), 200)")
        steps = self.steps
        fits = _STEPS.accepts(steps)
        require(where, "steps", steps, fits=fits, expected=_STEPS.describe(), fix="steps=1000")
        until = self.until
        fits = until is None or isinstance(until, Threshold)
        fix = 'until=Threshold("eval/x", at_least=0.5)'
        require(where, "until", until, fits=fits, expected="a Threshold or None", fix=fix)
        names = self.optimizers
        fits = isinstance(names, tuple | list) and all(isinstance(n, str) and n for n in names)
        fix = 'optimizers=("policy",)'
        require(where, "optimizers", names, fits=fits, expected="names of Models", fix=fix)
        object.__setattr__(self, "optimizers", tuple(names))

    @property
    def length(self) -> str:
        """`200 Steps, or until eval/exact_match >= 0.5`."""
        if self.until:
            return f"{self._steps_in_words}, or until {self.until}"
        return self._steps_in_words

    @property
    def _steps_in_words(self) -> str:
        if not self.steps:
            return "one pass over its data"
        return "1 Step" if self.steps == 1 else f"{self.steps:,} Steps"


def _reads(user: Node, node: Node) -> bool:
    return any(port.node is node for port in user.inputs.values())


def _port_error(where: str, problem: str, fix: str) -> GraphError:
    fault = Fault(rule="port", where=where, problem=problem, fix=fix, origin=call_site())
    return GraphError(fault)


def _list_leaders(state: State) -> list[State]:
    """The State, the one that it follows, the one that this follows, and so on."""
    states = [state]
    while (leader := getattr(states[-1], "follows", None)) is not None:
        states.append(leader)
    return states


def _update_port(old: Port[Any], new_nodes: Mapping[int, Node]) -> Port[Any]:
    """The port on the new version of its node; the same Port if that did not change."""
    node = new_nodes[id(old.node)]  # inputs come before their users, so that it is there
    if node is old.node:
        return old
    return Port(node, old.index)


def _update_states(node: Node, new_nodes: Mapping[int, Node]) -> dict[str, State]:
    return {name: _update_buffer(state, new_nodes) for name, state in node.states.items()}


def _update_buffer(state: State, new_nodes: Mapping[int, Node]) -> State:
    """A Buffer on the new version of its writer, if that was rebuilt; other States as they are."""
    if not isinstance(state, Buffer):
        return state
    writer = new_nodes.get(id(state.writer), state.writer)
    if writer is state.writer:
        return state
    return Buffer(state.name, writer=writer)


def _reach(roots: Any) -> Iterator[Node]:
    """Yield the nodes reachable from the roots, each after its inputs."""
    # A stack of our own: a long chain of nodes would be too deep for Python's.
    visited: set[int] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if id(root) in visited:
            continue
        visited.add(id(root))
        stack.append((root, iter(root.parents)))
        while stack:
            node, parents = stack[-1]
            parent = next((p for p in parents if id(p) not in visited), None)
            if parent is None:
                stack.pop()
                yield node
            else:
                visited.add(id(parent))
                stack.append((parent, iter(parent.parents)))


def _require_sink(graph: Graph, sink: object) -> None:
    if isinstance(sink, Node):
        return
    if isinstance(sink, Port):
        description = f"a Port of {sink.node.name!r}"
    else:
        description = f"{type(sink).__name__} {sink!r:.60}"
    fault = Fault(
        rule="call",
        where=f"Graph {graph.name!r}",
        problem=f"expected sinks, found {description}",
        fix=(
            "give what train(...), evaluate(...) or record(...) returned; what sinks do not reach"
            " is not in the graph"
        ),
        origin=graph.origin,
    )
    raise GraphError(fault)


def _require_dialect(graph: Graph, dialect: object) -> None:
    """Raises GraphError for a name that is none of the peers'."""
    require(
        f"Graph {graph.name!r}",
        "dialect",
        dialect,
        fits=DIALECT_LIMIT.accepts(dialect),
        expected=DIALECT_LIMIT.describe(),
        fix=f"dialect={DIALECT_LIMIT.suggestion(dialect)!r}",
    )


def _require_outputs(node: Node, ports: tuple[Port[Any], ...]) -> None:
    where = f"replace {node.name!r}"
    for port in ports:
        if not isinstance(port, Port):
            port_type = type(port).__name__
            problem = f"expected the output of an operator, found {port_type} {port!r:.60}"
            raise call_error(where, problem, "pass a Port")
    if len(ports) != len(node.schemas):
        problem = f"it has {len(node.schemas)} outputs, found {len(ports)} in their place"
        fix = (
            "replace a node by as many ports as it has outputs (sinks cannot be replaced: build the"
            " Graph anew)"
        )
        raise call_error(where, problem, fix)


def _digest(graph: Graph) -> str:
    # surrogatepass: UTF-8 alone refuses a name with a lone surrogate.
    digest = hashlib.blake2b(graph.name.encode(errors="surrogatepass"), digest_size=16)
    digest.update(f"|{graph.dialect}|".encode())
    for sink in graph.sinks:
        digest.update(sink.digest.encode())
    return digest.hexdigest()
