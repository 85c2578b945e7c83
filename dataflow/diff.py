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
from dataflow.node import Node, content
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
        return (
            f"{self.what}: {self.before} -> {self.after}"
            if self.after
            else f"{self.what}: no longer {self.before}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A node or State. `summary` says what it is; `changes` is empty if it appears or vanishes.

    rewired: the changes that are data edges, listed separately.
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
        lines = [self.before if self.before == self.after else f"{self.before} -> {self.after}"]
        lines += map(str, self.dialect)
        for title, entries in (("States", self.states), ("Nodes", self.nodes)):
            lines += ["", title, *_lines(entries)] if entries else []
        lines += ["", *(one_line(str(change)) for change in self.order)] if self.order else []
        return (
            "\n".join([*lines, "", self._count()] if self else [*lines, "", "no difference"]) + "\n"
        )

    def _count(self) -> str:
        kinds = [entry.kind for entry in (*self.states, *self.nodes)]
        rewired = sum(len(entry.rewired) for entry in self.nodes)
        parts = [f"{word} {kinds.count(kind)}" for kind, word in _WORDS.items() if kind in kinds]
        return ", ".join([*parts, *([f"edges rewired {rewired}"] if rewired else [])])


_WORDS: Mapping[Kind, str] = {"appears": "new", "vanishes": "gone", "changes": "changed"}


def diff(a: Graph, b: Graph) -> Difference:
    """What turns a into b. Nodes and States are identified by name; of two with one name the last
    counts. A node or term that follows its graph's dialect is compared with that dialect.
    """
    dialects = a.dialect, b.dialect
    a, b = with_dialects(a), with_dialects(b)
    before, after = make_picture(a), make_picture(b)
    return Difference(
        before=one_line(a.name),
        after=one_line(b.name),
        states=tuple(_states(a, b, before, after)),
        nodes=tuple(_nodes(a, b, before, after)),
        order=tuple(_order(a, b)),
        dialect=tuple(_change("dialect", *dialects)),
    )


def _lines(entries: Sequence[Entry]) -> Iterator[str]:
    wide = max(len(entry.name) for entry in entries) + 2
    for entry in entries:
        changes = [one_line(str(change)) for change in (*entry.changes, *entry.rewired)]
        first, *more = [entry.summary] if entry.kind != "changes" else changes
        yield f"  {_MARKS[entry.kind]} {entry.name.ljust(wide)}{first}"
        for line in more:
            yield f"    {' ' * wide}{line}"


def _paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names in the order of b; those that only a has come first."""
    for name in (*(n for n in a if n not in b), *b):
        yield name, a.get(name), b.get(name)


def _states(a: Graph, b: Graph, before: Picture, after: Picture) -> Iterator[Entry]:
    boxes = {s.name: s for s in before.states}, {s.name: s for s in after.states}
    for name, old, new in _paired(
        {one_line(s.name): s for s in a.states}, {one_line(s.name): s for s in b.states}
    ):
        if old is None:
            yield Entry(kind="appears", name=name, summary=_state_summary(after, boxes[1][name]))
        elif new is None:
            yield Entry(kind="vanishes", name=name, summary=_state_summary(before, boxes[0][name]))
        else:
            changes = (*_fields(old, new), *_uses(before, after, boxes[0][name], boxes[1][name]))
            if changes:
                summary = _state_summary(after, boxes[1][name])
                yield Entry(kind="changes", name=name, summary=summary, changes=changes)


def _state_summary(drawn: Picture, state: StateBox) -> str:
    writers, readers = _writers(drawn, state), _readers(drawn, state)
    uses = [
        *([f"written by {writers}"] if writers else []),
        *([f"read by {readers}"] if readers else []),
    ]
    return "; ".join([f"{state.kind} {state.facts}", *uses])


def _writers(drawn: Picture, state: StateBox) -> str:
    return ", ".join(drawn.boxes[i].name for i in state.writers)


def _readers(drawn: Picture, state: StateBox) -> str:
    return ", ".join(drawn.boxes[r.box].name for r in state.readers)


def _uses(before: Picture, after: Picture, old: StateBox, new: StateBox) -> Iterator[Change]:
    """Weight edges: who writes and who reads."""
    for what, names in (("written by", _writers), ("read by", _readers)):
        was, now = names(before, old), names(after, new)
        if was != now:
            yield Change(what=what, before=was, after=now)


def _fields(old: State, new: State) -> Iterator[Change]:
    if type(old) is not type(new):
        yield Change(what="kind", before=type(old).__name__, after=type(new).__name__)
        return
    if isinstance(old, Buffer):
        return
    for field in fields(old):
        was, now = getattr(old, field.name), getattr(new, field.name)
        if field.compare and was != now:
            yield Change(what=field.name, before=_named(was), after=_named(now))


def _named(value: Any) -> str:
    return value.name if hasattr(value, "name") else shown_value(value)


def _nodes(a: Graph, b: Graph, before: Picture, after: Picture) -> Iterator[Entry]:
    boxes = {box.name: box for box in before.boxes}, {box.name: box for box in after.boxes}
    for name, old, new in _paired(
        {one_line(n.name): n for n in a.nodes}, {one_line(n.name): n for n in b.nodes}
    ):
        if old is None:
            yield Entry(kind="appears", name=name, summary=_node_summary(after, boxes[1][name]))
        elif new is None:
            yield Entry(kind="vanishes", name=name, summary=_node_summary(before, boxes[0][name]))
        else:
            changes = (*_operator(old, new), *_parameters(old, new))
            rewired = tuple(_wires(old, new))
            if changes or rewired:
                summary = _node_summary(after, boxes[1][name])
                yield Entry(
                    kind="changes", name=name, summary=summary, changes=changes, rewired=rewired
                )


def _node_summary(drawn: Picture, box: Box) -> str:
    sources = ", ".join(dict.fromkeys(drawn.boxes[wire.source].name for wire in box.wires))
    return box.call + (f"  on {sources}" if sources else "")


def _operator(old: Node, new: Node) -> Iterator[Change]:
    if old.operator.path != new.operator.path:
        names = old.operator.name, new.operator.name
        was, now = names if names[0] != names[1] else (old.operator.path, new.operator.path)
        yield Change(what="operator", before=was, after=now)
    was, now = (", ".join(s.__name__ for s in node.schemas) for node in (old, new))
    if was != now:
        yield Change(what="output", before=was, after=now)
    for parameter, a, b in _paired(old.states, new.states):
        was, now = a.name if a else "", b.name if b else ""
        if was != now:
            yield Change(what=parameter, before=was, after=now)


def _parameters(old: Node, new: Node) -> Iterator[Change]:
    for key, was, now in _paired(old.params, new.params):
        if isinstance(was, Loss) and isinstance(now, Loss):
            yield from _losses(was, now)
        else:
            yield from _change(key, was, now, there=(key in old.params, key in new.params))


def _losses(old: Loss, new: Loss) -> Iterator[Change]:
    """Term by term, by the label that a train node gives each."""
    terms = {t.label: t for t in old.terms}, {t.label: t for t in new.terms}
    for label, was, now in _paired(*terms):
        if was is None or now is None:
            yield Change(what="loss", before=label if was else "", after=label if now else "")
            continue
        yield from _term(label, was, now)


def _term(label: str, old: LossTerm, new: LossTerm) -> Iterator[Change]:
    yield from _change(f"{label}.weight", old.weight, new.weight)
    if content(old.function) != content(new.function):
        yield Change(what=f"{label} is", before=old.function.path, after=new.function.path)
    yield from _change(f"{label} trains", old.on, new.on)
    params = dict(old.params), dict(new.params)
    for key, was, now in _paired(*params):
        yield from _change(f"{label}.{key}", was, now, there=(key in params[0], key in params[1]))


def _change(
    what: str, was: Any, now: Any, *, there: tuple[bool, bool] = (True, True)
) -> Iterator[Change]:
    if content(was) == content(now) and there[0] == there[1]:
        return
    shown: Callable[[Any], str] = shown_value if shown_value(was) != shown_value(now) else repr
    yield Change(
        what=what, before=shown(was) if there[0] else "", after=shown(now) if there[1] else ""
    )


def _wires(old: Node, new: Node) -> Iterator[Change]:
    for key, was, now in _paired(old.inputs, new.inputs):
        before, after = was.label if was else "", now.label if now else ""
        if before != after:
            yield Change(what=key, before=before, after=after)


def _order(a: Graph, b: Graph) -> Iterator[Change]:
    names = [s.name for s in a.sinks], [s.name for s in b.sinks]
    was, now = [n for n in names[0] if n in names[1]], [n for n in names[1] if n in names[0]]
    if was != now:
        yield Change(what="order of the sinks", before=", ".join(was), after=", ".join(now))
