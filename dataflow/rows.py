"""The rows of a port, and who wrote the tokens in them.

Owns: domains, the sets of rows that relations derive from one another; the port that has a port's
columns; the generations that wrote a port's tokens. Does not own: the rules that compare them
(rules/lineage.py), the coordinator's tables of arrived rows.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        # Derived from the parent's, so that a long line is neither recursive nor quadratic.
        pairs, loose = (self.kind == "subset" and self.keeps == k for k in ("pairs", "rows"))
        above = self.parent
        size = 2 if pairs else self.factor * (above.group_size if above else 1)
        ragged = self.node if loose else above.ragged if above and not pairs else None
        if self.kind == "concat":
            size = sum(part.group_size for part in self.parts)
            ragged = next((part.ragged for part in self.parts if part.ragged is not None), None)
        object.__setattr__(self, "source", above.source if above else self.node)
        object.__setattr__(self, "group_size", size)
        object.__setattr__(self, "ragged", ragged)
        object.__setattr__(self, "width", self.factor * (above.width if above else 1))
        made = above is None and self.node.operator.keeps == "pairs"
        stay = self.kind == "subset" and self.keeps == "groups" and above and above.paired
        object.__setattr__(self, "paired", bool(made or pairs or stay))

    def ancestors(self) -> Iterator[Domain]:
        """This domain, then its parent, and so on to the source."""
        at: Domain | None = self
        while at is not None:
            yield at
            at = at.parent

    def descends_from(self, other: Domain) -> bool:
        """Whether each row here has one ancestor there."""
        return any(d is other for d in self.ancestors())

    def selections(self) -> Iterator[Domain]:
        """Every selection that took rows from these, or from a part of them."""
        for at in self.ancestors():
            if at.kind == "subset":
                yield at
            for part in at.parts:
                yield from part.selections()

    @property
    def unselected(self) -> Domain:
        """These rows before any selection: as a source, a generation or `concat` made them."""
        return next(d for d in self.ancestors() if d.kind != "subset")

    def describe(self) -> str:
        """`prompts x16, kept by 'select' (line 9)`, the form used in messages."""
        steps: list[str] = []
        for at in self.ancestors():
            steps.append(at._step())
            if at.kind == "concat":  # its parts say where they come from
                break
        return "".join(reversed(steps))

    def _step(self) -> str:
        if self.kind == "concat":
            return f"({' + '.join(part._as_part() for part in self.parts)})"
        if self.parent is None:
            return self.node.name
        if self.kind == "expand":
            return f" x{self.factor}"
        line = f" (line {self.node.origin.line})" if self.node.origin else ""
        return f", kept by {self.node.name!r}{line}"

    def _as_part(self) -> str:
        """`prompts x4 of 'rollout'`: parts of a concat may differ in who made them alone."""
        made = self.unselected
        by = f" of {made.node.name!r}" if made.kind == "expand" else ""
        return f"{self.describe()}{by}"


class Domains:
    """The domain of every port of a graph; a port whose relation cannot be derived has none (a rule
    reports it).
    """

    def __init__(self, graph: Graph) -> None:
        self._of: dict[int, Domain] = {}
        self._concats: dict[tuple[int, ...], Domain] = {}
        """By the parts: the same parts in the same order are the same rows."""
        for node in graph.nodes:
            made = self._derive(node)
            if made is not None:
                self._of[id(node)] = made

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
            return self._concat(node)
        parent = self._of_input(node, rows.of)
        if parent is None or isinstance(rows, Same):
            return parent
        if isinstance(rows, Subset):
            return Domain(node=node, kind="subset", parent=parent, keeps=_kept(node, rows, parent))
        assert isinstance(rows, Expand)
        return Domain(node=node, kind="expand", parent=parent, factor=_samples(node, rows))

    def _concat(self, node: Node) -> Domain | None:
        """None where the inputs come from several sources, or from one without a row a position."""
        found = [self.of(port) for port in node.inputs.values()]
        known = [domain for domain in found if domain is not None]
        if not known or len(known) < len(found):
            return None
        # concat(concat(a, b), c) has the rows of concat(a, b, c).
        parts = tuple(p for d in known for p in (d.parts if d.kind == "concat" else (d,)))
        key = tuple(map(id, parts))
        if key not in self._concats:
            above = _above_all(parts)
            if above is None:
                return None
            width = sum(part.width for part in parts)
            made = Domain(node=node, kind="concat", parent=above, factor=width, parts=parts)
            self._concats[key] = made
        return self._concats[key]

    def _of_input(self, node: Node, name: str) -> Domain | None:
        port = node.inputs.get(name)
        return self.of(port) if port is not None else None


def _kept(node: Node, rows: Subset, parent: Domain) -> Keeps:
    """What a selection leaves of a group of `parent`."""
    keeps = node.inputs[rows.of].node.operator.keeps or "rows"
    # A group of one row, such as a prompt before its answers, stays whole or goes.
    return "groups" if keeps == "rows" and parent.group_size == 1 else keeps


def _above_all(parts: tuple[Domain, ...]) -> Domain | None:
    """The nearest ancestor of all parts with one row a prompt: only these keep their samples."""
    single = (d for d in parts[0].ancestors() if d.width == 1)
    return next((d for d in single if all(p.descends_from(d) for p in parts)), None)


def _samples(node: Node, rows: Expand) -> int:
    """How many rows each becomes; 1 if the parameter is no such number (a rule reports it)."""
    n = node.params.get(rows.n, 1)
    return n if isinstance(n, int) and n > 1 else 1


def physical(port: Port[Any]) -> Port[Any]:
    """The port that has the columns: a select moves no rows."""
    while not port.node.operator.traits.moves_rows:
        port = port.node.inputs[f"port{port.index}"]
    return port


def makers(port: Port[Any]) -> Iterator[Node]:
    """The nodes that computed a port's columns: through selections, and each part of a `concat`."""
    left = [port]
    while left:
        node = physical(left.pop()).node
        if isinstance(node.operator.rows, Concat):
            left += reversed(node.inputs.values())
        else:
            yield node


def generations(port: Port[Any]) -> tuple[Node, ...]:
    """The generations that wrote a port's tokens, in the inputs' order; none if a source did."""
    return tuple(node for node in writers(port) if node.operator.traits.generates)


def writers(port: Port[Any]) -> tuple[Node, ...]:
    """The generations and sources that wrote a port's tokens, in the order of its operators'
    inputs. An operator that makes token ids makes them from its inputs that have some.
    """
    found: dict[int, Node] = {}
    seen: set[int] = set()
    left = [port]
    while left:
        node = physical(left.pop()).node
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.operator.traits.writes_tokens:
            found[id(node)] = node
        else:
            left += reversed([p for p in node.inputs.values() if p.schema.vocabulary])
    return tuple(found.values())


def reader_of(graph: Graph, maker: Node) -> Node | None:
    """The first node with a Model that reads the token ids of a node that tokenises, so that they
    are that Model's; None if none does.
    """
    for node in graph.nodes:
        if node.operator.work not in ("forward", "train") or node.operator.reads_text:
            continue
        read = (port for port in node.inputs.values() if port.schema.vocabulary)
        if any(writer is maker for port in read for writer in writers(port)):
            return node
    return None


def row_line(port: Port[Any], domains: Domains) -> Iterator[Port[Any]]:
    """The port, the one that its rows are of or come from, and so on to the source; no selects. The
    rows of a concat come from the nearest port above all of its inputs.
    """
    at: Port[Any] | None = port
    while at is not None:
        if at.node.operator.traits.moves_rows:
            yield at
        at = _above(at, domains)


def _above(port: Port[Any], domains: Domains) -> Port[Any] | None:
    node = port.node
    if not node.operator.traits.moves_rows:
        return node.inputs[f"port{port.index}"]
    rows = node.operator.rows
    if isinstance(rows, Reduce):
        return node.inputs.get(rows.to)
    if isinstance(rows, Concat):
        return _above_inputs(port, domains)
    return node.inputs.get(rows.of) if isinstance(rows, (Same, Expand)) else None


def _above_inputs(port: Port[Any], domains: Domains) -> Port[Any] | None:
    lines = [list(row_line(part, domains)) for part in port.node.inputs.values()]
    mine = domains.of(port)
    for above in lines[0]:
        domain = domains.of(above)
        known = mine is not None and domain is not None and mine.descends_from(domain)
        if known and all(above in line for line in lines[1:]):
            return above
    return None


def nearest_prompt(port: Port[Any], domains: Domains) -> Node | None:
    """The node with the prompts of a port's rows: the nearest, as a judge's are not its task's."""
    return next((p.node for p in row_line(port, domains) if issubclass(p.schema, Prompt)), None)
