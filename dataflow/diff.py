"""What changed between two graphs: nodes, States, parameters, wires.

Owns: the comparison by name and its text. Does not own: the comparison of two runs (engine),
drawings (draw/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dataflow.dialect import with_dialects
from dataflow.draw.node_calls import shown_value
from dataflow.draw.picture import Box, Picture, StateBox, make_picture
from dataflow.graph import Graph
from dataflow.loss import Loss, LossTerm
from dataflow.model import Buffer, State
from dataflow.node import Node, Port, content
from dataflow.safe_text import one_line

Kind = Literal["appears", "vanishes", "changes"]
_MARKS: Mapping[Kind, str] = {"appears": "+", "vanishes": "-", "changes": "~"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference in a node or a State: `what` was `before` and is `after` (empty: absent)."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        if not self.before:
            return f"{self.what}: now {self.after}"
        if not self.after:
            return f"{self.what}: no longer {self.before}"
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A node or State. `summary` says what it is; `changes` is empty if it appears or vanishes.

    rewired: changed data edges, which `changes` does not have.
    """

    kind: Kind
    name: str
    summary: str
    changes: tuple[Change, ...] = ()
    rewired: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two graphs compared. Where all is empty but the names, they differ at most in those."""

    before: str
    after: str
    states: tuple[Entry, ...]
    nodes: tuple[Entry, ...]
    order: tuple[Change, ...]
    """The order of the common sinks, if it changed: train nodes of one Step run in it."""
    dialect: tuple[Change, ...] = ()
    """The graph's dialect, if it changed; the nodes that follow it change, too."""

    def __bool__(self) -> bool:
        return bool(self.states or self.nodes or self.order or self.dialect)

    def __str__(self) -> str:
        """The text that `dataflow diff` prints, ending in a newline."""
        title = self.before
        if self.after != self.before:
            title += f" -> {self.after}"
        lines = [title, *map(str, self.dialect)]
        for heading, entries in (("States", self.states), ("Nodes", self.nodes)):
            if entries:
                lines += ["", heading, *_entry_lines(entries)]
        if self.order:
            lines += ["", *(one_line(str(change)) for change in self.order)]
        lines += ["", self._counts() if self else "no difference"]
        return "\n".join(lines) + "\n"

    def _counts(self) -> str:
        kinds = [entry.kind for entry in (*self.states, *self.nodes)]
        parts: list[str] = []
        for kind, word in _WORDS.items():
            if kind in kinds:
                parts.append(f"{word} {kinds.count(kind)}")
        rewired_count = sum(len(entry.rewired) for entry in self.nodes)
        if rewired_count:
            parts.append(f"edges rewired {rewired_count}")
        return ", ".join(parts)


_WORDS: Mapping[Kind, str] = {"appears": "new", "vanishes": "gone", "changes": "changed"}


def diff(old: Graph, new: Graph) -> Difference:
    """Compare two graphs: what turns the old one into the new one.

    Nodes and States are identified by name; of two with one name the last counts. A node or term
    that follows its graph's dialect is compared with that dialect.
    """
    dialects = old.dialect, new.dialect
    old, new = with_dialects(old), with_dialects(new)
    old_picture, new_picture = make_picture(old), make_picture(new)
    return Difference(
        before=one_line(old.name),
        after=one_line(new.name),
        states=tuple(_compare_states(old, new, old_picture, new_picture)),
        nodes=tuple(_compare_nodes(old, new, old_picture, new_picture)),
        order=tuple(_compare_order(old, new)),
        dialect=tuple(_compare("dialect", *dialects)),
    )


def _entry_lines(entries: Sequence[Entry]) -> Iterator[str]:
    width = max(len(entry.name) for entry in entries) + 2
    for entry in entries:
        changes = [one_line(str(change)) for change in (*entry.changes, *entry.rewired)]
        first, *rest = changes if entry.kind == "changes" else [entry.summary]
        yield f"  {_MARKS[entry.kind]} {entry.name.ljust(width)}{first}"
        for line in rest:
            yield f"    {' ' * width}{line}"


def _pair(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each name with what is there before and after, None if nothing is. Names that only the
    old one has come first, then the new one's, in their order.
    """
    for name in (*(n for n in old if n not in new), *new):
        yield name, old.get(name), new.get(name)


def _compare_states(
    old: Graph, new: Graph, old_picture: Picture, new_picture: Picture
) -> Iterator[Entry]:
    old_boxes = {box.name: box for box in old_picture.states}
    new_boxes = {box.name: box for box in new_picture.states}
    old_states = {one_line(state.name): state for state in old.states}
    new_states = {one_line(state.name): state for state in new.states}
    for name, before, after in _pair(old_states, new_states):
        if before is None:
            summary = _summarise_state(new_picture, new_boxes[name])
            yield Entry(kind="appears", name=name, summary=summary)
            continue
        if after is None:
            summary = _summarise_state(old_picture, old_boxes[name])
            yield Entry(kind="vanishes", name=name, summary=summary)
            continue
        uses = _compare_uses(old_picture, new_picture, old_boxes[name], new_boxes[name])
        changes = (*_compare_fields(before, after), *uses)
        if changes:
            summary = _summarise_state(new_picture, new_boxes[name])
            yield Entry(kind="changes", name=name, summary=summary, changes=changes)


def _summarise_state(drawn: Picture, state: StateBox) -> str:
    parts = [f"{state.kind} {state.facts}"]
    if writers := _join_writers(drawn, state):
        parts.append(f"written by {writers}")
    if readers := _join_readers(drawn, state):
        parts.append(f"read by {readers}")
    return "; ".join(parts)


def _join_writers(drawn: Picture, state: StateBox) -> str:
    return ", ".join(drawn.boxes[index].name for index in state.writers)


def _join_readers(drawn: Picture, state: StateBox) -> str:
    return ", ".join(drawn.boxes[reader.box].name for reader in state.readers)


def _compare_uses(
    old_picture: Picture, new_picture: Picture, old: StateBox, new: StateBox
) -> Iterator[Change]:
    """Weight edges: who writes and who reads."""
    for what, join_names in (("written by", _join_writers), ("read by", _join_readers)):
        before, after = join_names(old_picture, old), join_names(new_picture, new)
        if before != after:
            yield Change(what=what, before=before, after=after)


def _compare_fields(old: State, new: State) -> Iterator[Change]:
    if type(old) is not type(new):
        yield Change(what="kind", before=type(old).__name__, after=type(new).__name__)
        return
    if isinstance(old, Buffer):
        return  # its only field besides its name is its writer, which is a use
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.compare and before != after:
            yield Change(what=field.name, before=_describe(before), after=_describe(after))


def _describe(content: Any) -> str:
    """A State, such as the leader that another one follows, by its name."""
    return content.name if hasattr(content, "name") else shown_value(content)


def _compare_nodes(
    old: Graph, new: Graph, old_picture: Picture, new_picture: Picture
) -> Iterator[Entry]:
    old_boxes = {box.name: box for box in old_picture.boxes}
    new_boxes = {box.name: box for box in new_picture.boxes}
    old_nodes = {one_line(node.name): node for node in old.nodes}
    new_nodes = {one_line(node.name): node for node in new.nodes}
    for name, before, after in _pair(old_nodes, new_nodes):
        if before is None:
            summary = _summarise_node(new_picture, new_boxes[name])
            yield Entry(kind="appears", name=name, summary=summary)
            continue
        if after is None:
            summary = _summarise_node(old_picture, old_boxes[name])
            yield Entry(kind="vanishes", name=name, summary=summary)
            continue
        changes = (*_compare_operators(before, after), *_compare_parameters(before, after))
        rewired = tuple(_compare_wires(before, after))
        if changes or rewired:
            yield Entry(
                kind="changes",
                name=name,
                summary=_summarise_node(new_picture, new_boxes[name]),
                changes=changes,
                rewired=rewired,
            )


def _summarise_node(drawn: Picture, box: Box) -> str:
    sources = ", ".join(dict.fromkeys(drawn.boxes[wire.source].name for wire in box.wires))
    return f"{box.call}  on {sources}" if sources else box.call


def _compare_operators(old: Node, new: Node) -> Iterator[Change]:
    """What a node calls, what it returns, and which States it uses."""
    if old.operator.path != new.operator.path:
        before, after = old.operator.name, new.operator.name
        if before == after:  # of one name: then their paths tell them apart
            before, after = old.operator.path, new.operator.path
        yield Change(what="operator", before=before, after=after)
    before = ", ".join(schema.__name__ for schema in old.schemas)
    after = ", ".join(schema.__name__ for schema in new.schemas)
    if before != after:
        yield Change(what="output", before=before, after=after)
    for parameter, old_state, new_state in _pair(old.states, new.states):
        before, after = _state_name(old_state), _state_name(new_state)
        if before != after:
            yield Change(what=parameter, before=before, after=after)


def _state_name(state: State | None) -> str:
    return state.name if state else ""


def _compare_parameters(old: Node, new: Node) -> Iterator[Change]:
    for name, before, after in _pair(old.params, new.params):
        if isinstance(before, Loss) and isinstance(after, Loss):
            yield from _compare_losses(before, after)
        else:
            is_present = name in old.params, name in new.params
            yield from _compare(name, before, after, is_present=is_present)


def _compare_losses(old: Loss, new: Loss) -> Iterator[Change]:
    """Term by term, by the label that a train node gives each."""
    old_terms = {term.label: term for term in old.terms}
    new_terms = {term.label: term for term in new.terms}
    for label, before, after in _pair(old_terms, new_terms):
        if before is None:
            yield Change(what="loss", before="", after=label)
        elif after is None:
            yield Change(what="loss", before=label, after="")
        else:
            yield from _compare_terms(label, before, after)


def _compare_terms(label: str, old: LossTerm, new: LossTerm) -> Iterator[Change]:
    yield from _compare(f"{label}.weight", old.weight, new.weight)
    if content(old.function) != content(new.function):
        yield Change(what=f"{label} is", before=old.function.path, after=new.function.path)
    yield from _compare(f"{label} trains", old.on, new.on)
    old_params, new_params = dict(old.params), dict(new.params)
    for name, before, after in _pair(old_params, new_params):
        is_present = name in old_params, name in new_params
        yield from _compare(f"{label}.{name}", before, after, is_present=is_present)


def _compare(
    what: str, before: Any, after: Any, *, is_present: tuple[bool, bool] = (True, True)
) -> Iterator[Change]:
    """Yield the change, if any. is_present: whether there is such a parameter before and after; one
    that is absent is not the same as None.
    """
    was_present, remains = is_present
    if content(before) == content(after) and was_present == remains:
        return
    show: Callable[[Any], str] = shown_value
    if shown_value(before) == shown_value(after):
        show = repr  # the short form hides what differs
    yield Change(
        what=what,
        before=show(before) if was_present else "",
        after=show(after) if remains else "",
    )


def _compare_wires(old: Node, new: Node) -> Iterator[Change]:
    for name, old_port, new_port in _pair(old.inputs, new.inputs):
        before, after = _port_label(old_port), _port_label(new_port)
        if before != after:
            yield Change(what=name, before=before, after=after)


def _port_label(port: Port[Any] | None) -> str:
    return port.label if port else ""


def _compare_order(old: Graph, new: Graph) -> Iterator[Change]:
    old_names = [sink.name for sink in old.sinks]
    new_names = [sink.name for sink in new.sinks]
    before = [name for name in old_names if name in new_names]
    after = [name for name in new_names if name in old_names]
    if before != after:
        yield Change(what="order of the sinks", before=", ".join(before), after=", ".join(after))
