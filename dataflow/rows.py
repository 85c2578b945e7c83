"""The rows of a port, and who wrote the tokens in them.

Owns: domains, the sets of rows that relations derive from one another; the port that has a port's
columns; the generations that wrote a port's tokens. Does not own: the rules that compare them
(rules/lineage.py), the coordinator's tables of arrived rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dataflow.graph import Graph
from dataflow.node import Node, Port
from dataflow.operator import Concat, Expand, Fresh, Keeps, Nothing, Reduce, Same, Subset
from dataflow.schema import Prompt


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Domain:
    """A set of rows. Two ports have the same rows exactly if they have the same Domain object.

    kind: `source` (fresh rows), `expand` (`factor` rows for each of the parent's), `subset` (some
    of the parent's), `concat` (`factor` rows for each of the parent's: those of the `parts`, one
    after another). keeps: for a subset, whether whole groups stay (`groups`), any rows (`rows`) or
    two of each group (`pairs`); where each group is one row, any rows are whole groups.
    """

    node: Node
    kind: Literal["source", "expand", "subset", "concat"]
    parent: Domain | None = None
    factor: int = 1
    keeps: Keeps = "rows"
    parts: tuple[Domain, ...] = ()
    source: Node = field(init=False)
    """The node that made the first of these rows' ancestors."""
    group_size: int = field(init=False)
    """Rows of one prompt as long as no selection took some away (then: at most)."""
    ragged: Node | None = field(init=False)
    """The selection that may have taken rows from a group; None if groups are whole."""
    paired: bool = field(init=False)
    """Whether each group is one chosen and one rejected row."""
    width: int = field(init=False)
    """Rows for each prompt before selections; their samples are below this number."""

    def __post_init__(self) -> None:
        # All are derived from the parent's, so that a long line is neither recursive nor quadratic.
        source, width = self.node, self.factor
        if self.parent is not None:
            source, width = self.parent.source, self.factor * self.parent.width
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "group_size", self._derive_group_size())
        object.__setattr__(self, "ragged", self._derive_ragged())
        object.__setattr__(self, "paired", self._derive_paired())

    def _derive_group_size(self) -> int:
        if self.kind == "concat":
            return sum(part.group_size for part in self.parts)
        if self.kind == "subset" and self.keeps == "pairs":
            return 2
        if self.parent is None:
            return self.factor
        return self.factor * self.parent.group_size

    def _derive_ragged(self) -> Node | None:
        if self.kind == "concat":
            ragged_parts = (part.ragged for part in self.parts)
            return next((ragged for ragged in ragged_parts if ragged is not None), None)
        if self.kind == "subset" and self.keeps == "rows":
            return self.node
        if self.kind == "subset" and self.keeps == "pairs":
            return None  # two rows of each group are whole groups again
        return self.parent.ragged if self.parent else None

    def _derive_paired(self) -> bool:
        if self.parent is None:
            return self.node.operator.keeps == "pairs"
        if self.kind != "subset":
            return False
        return self.keeps == "pairs" or (self.keeps == "groups" and self.parent.paired)

    def ancestors(self) -> Iterator[Domain]:
        """This domain, then its parent, and so on to the source."""
        domain: Domain | None = self
        while domain is not None:
            yield domain
            domain = domain.parent

    def descends_from(self, other: Domain) -> bool:
        """Whether each row here has one ancestor there."""
        return any(domain is other for domain in self.ancestors())

    def selections(self) -> Iterator[Domain]:
        """Every selection that took rows from these, or from a part of them."""
        for domain in self.ancestors():
            if domain.kind == "subset":
                yield domain
            for part in domain.parts:
                yield from part.selections()

    @property
    def rows_before_selection(self) -> Domain:
        """These rows before any selection: as a source, a generation or `concat` made them."""
        return next(domain for domain in self.ancestors() if domain.kind != "subset")

    def describe(self) -> str:
        """`prompts x16, kept by 'select' (line 9)`, the form used in messages."""
        steps: list[str] = []
        for domain in self.ancestors():
            steps.append(domain._describe_step())
            if domain.kind == "concat":  # its parts say where they come from
                break
        return "".join(reversed(steps))

    def _describe_step(self) -> str:
        """What this domain adds to the description of its parent."""
        if self.kind == "concat":
            parts = [part._describe_as_part() for part in self.parts]
            return f"({' + '.join(parts)})"
        if self.parent is None:
            return self.node.name
        if self.kind == "expand":
            return f" x{self.factor}"
        line = f" (line {self.node.origin.line})" if self.node.origin else ""
        return f", kept by {self.node.name!r}{line}"

    def _describe_as_part(self) -> str:
        """`prompts x4 of 'rollout'`: parts of a concat may differ in who made them alone."""
        origin = self.rows_before_selection
        maker = f" of {origin.node.name!r}" if origin.kind == "expand" else ""
        return f"{self.describe()}{maker}"


class Domains:
    """The domain of every port of a graph; a port whose relation cannot be derived has none (a rule
    reports it).
    """

    def __init__(self, graph: Graph) -> None:
        self._of: dict[int, Domain] = {}
        self._concats: dict[tuple[int, ...], Domain] = {}
        """By the parts: the same parts in the same order are the same rows."""
        for node in graph.nodes:
            domain = self._derive(node)
            if domain is not None:
                self._of[id(node)] = domain

    def of(self, port: Port) -> Domain | None:
        """The rows of a port."""
        return self._of.get(id(port.node))

    def of_node(self, node: Node) -> Domain | None:
        """The rows of a node's outputs; for a sink, those of its first input."""
        return self._of.get(id(node))

    def _derive(self, node: Node) -> Domain | None:
        rows = node.operator.rows
        if isinstance(rows, Fresh):
            return Domain(node=node, kind="source", factor=rows.per)
        if isinstance(rows, Reduce):
            return self._of_input(node, rows.to)
        if isinstance(rows, Nothing):
            return self._of_input(node, next(iter(node.inputs), ""))
        if isinstance(rows, Concat):
            return self._derive_concat(node)
        parent = self._of_input(node, rows.of)
        if parent is None or isinstance(rows, Same):
            return parent
        if isinstance(rows, Subset):
            keeps = _derive_keeps(node, rows, parent)
            return Domain(node=node, kind="subset", parent=parent, keeps=keeps)
        assert isinstance(rows, Expand)
        return Domain(node=node, kind="expand", parent=parent, factor=_samples(node, rows))

    def _derive_concat(self, node: Node) -> Domain | None:
        """None where the inputs come from several sources, or from one without a row a position."""
        parts: list[Domain] = []
        for port in node.inputs.values():
            domain = self.of(port)
            if domain is None:
                return None
            if domain.kind == "concat":
                parts += domain.parts  # concat(concat(a, b), c) has the rows of concat(a, b, c)
            else:
                parts.append(domain)
        if not parts:
            return None
        key = tuple(map(id, parts))
        if key not in self._concats:
            parent = _find_single_ancestor(parts)
            if parent is None:
                return None
            width = sum(part.width for part in parts)
            self._concats[key] = Domain(
                node=node, kind="concat", parent=parent, factor=width, parts=tuple(parts)
            )
        return self._concats[key]

    def _of_input(self, node: Node, name: str) -> Domain | None:
        port = node.inputs.get(name)
        return self.of(port) if port is not None else None


def _derive_keeps(node: Node, rows: Subset, parent: Domain) -> Keeps:
    """What a selection leaves of a group of `parent`."""
    keeps = node.inputs[rows.of].node.operator.keeps or "rows"
    if keeps == "rows" and parent.group_size == 1:
        return "groups"  # one row, such as a prompt before its answers, stays whole or goes
    return keeps


def _find_single_ancestor(parts: Sequence[Domain]) -> Domain | None:
    """The nearest ancestor of all parts with one row a prompt: only these keep their samples."""
    for domain in parts[0].ancestors():
        if domain.width == 1 and all(part.descends_from(domain) for part in parts):
            return domain
    return None


def _samples(node: Node, rows: Expand) -> int:
    """How many rows each becomes."""
    if rows.times:
        return _count(node, rows.n) * _count(node, rows.times)
    return _count(node, rows.n)


def _count(node: Node, parameter: str) -> int:
    """A parameter; 1 if it is no number of rows (a rule reports it)."""
    count = node.params.get(parameter, 1)
    if isinstance(count, int) and count > 1:
        return count
    return 1


def physical_port(port: Port[Any]) -> Port[Any]:
    """The port that has the columns: a select moves no rows."""
    while not port.node.operator.traits.moves_rows:
        port = port.node.inputs[f"port{port.index}"]
    return port


def makers(port: Port[Any]) -> Iterator[Node]:
    """The nodes that computed a port's columns: through selections, and each part of a `concat`."""
    stack = [port]
    while stack:
        node = physical_port(stack.pop()).node
        if isinstance(node.operator.rows, Concat):
            stack += reversed(node.inputs.values())  # the first one is popped first
        else:
            yield node


def generations(port: Port[Any]) -> tuple[Node, ...]:
    """The generations that wrote a port's tokens, in the inputs' order; none if a source did."""
    return tuple(node for node in writers(port) if node.operator.traits.generates)


def writers(port: Port[Any]) -> tuple[Node, ...]:
    """The generations and sources that wrote a port's tokens, in the order of its operators'
    inputs. An operator that makes token ids makes them from its inputs that have some.
    """
    nodes: list[Node] = []
    visited: set[int] = set()
    stack = [port]
    while stack:
        node = physical_port(stack.pop()).node
        if id(node) in visited:
            continue
        visited.add(id(node))
        if node.operator.traits.writes_tokens:
            nodes.append(node)
        else:
            token_inputs = [p for p in node.inputs.values() if p.schema.vocabulary]
            stack += reversed(token_inputs)  # the first one is popped first
    return tuple(nodes)


def reader_of(graph: Graph, maker: Node) -> Node | None:
    """The first node with a Model that reads the token ids of a node that tokenises, so that they
    are that Model's; None if none does.
    """
    for node in graph.nodes:
        if node.operator.work not in ("forward", "train") or node.operator.reads_text:
            continue
        for port in node.inputs.values():
            if port.schema.vocabulary and any(writer is maker for writer in writers(port)):
                return node
    return None


def row_line(port: Port[Any], domains: Domains) -> Iterator[Port[Any]]:
    """The port, the one that its rows are of or come from, and so on to the source; no selects. The
    rows of a concat come from the nearest port above all of its inputs.
    """
    current: Port[Any] | None = port
    while current is not None:
        if current.node.operator.traits.moves_rows:
            yield current
        current = _port_above(current, domains)


def _port_above(port: Port[Any], domains: Domains) -> Port[Any] | None:
    """The port that a port's rows are of or come from; None for a source's."""
    node = port.node
    if not node.operator.traits.moves_rows:
        return node.inputs[f"port{port.index}"]
    rows = node.operator.rows
    if isinstance(rows, Reduce):
        return node.inputs.get(rows.to)
    if isinstance(rows, Concat):
        return _port_above_inputs(port, domains)
    if isinstance(rows, (Same, Expand)):
        return node.inputs.get(rows.of)
    return None


def _port_above_inputs(port: Port[Any], domains: Domains) -> Port[Any] | None:
    """The nearest port above all inputs of a concat from whose rows all of its rows come."""
    own_domain = domains.of(port)
    if own_domain is None:
        return None
    lines = [list(row_line(part, domains)) for part in port.node.inputs.values()]
    for above in lines[0]:
        domain = domains.of(above)
        is_ancestor = domain is not None and own_domain.descends_from(domain)
        if is_ancestor and all(above in line for line in lines[1:]):
            return above
    return None


def nearest_prompt(port: Port[Any], domains: Domains) -> Node | None:
    """The node with the prompts of a port's rows: the nearest, as a judge's are not its task's."""
    for above in row_line(port, domains):
        if issubclass(above.schema, Prompt):
            return above.node
    return None
