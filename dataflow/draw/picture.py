"""What a drawing shows of a graph, before any form is chosen.

Owns: which facts of a node, a wire and a State are worth a newcomer's look, in words. Does
not own: any layout or syntax (text.py, mermaid.py, dot.py, svg.py).

A Picture can be made of any Graph, checked or not.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dataflow.dialect import PARAMETER
from dataflow.graph import Graph
from dataflow.json_values import own
from dataflow.loss import Loss, LossTerm
from dataflow.loss_terms import ROWS, row_sets
from dataflow.model import Buffer, Model, Schedule, State
from dataflow.node import Node, Port
from dataflow.operator import Scope, Work
from dataflow.regions import Region, regions
from dataflow.rows import Domain, Domains
from dataflow.safe_text import one_line

REGIONS: tuple[Region, ...] = ("stream", "step", "evaluation")
TITLES: Mapping[Region, str] = {
    "stream": "stream: any time, as rows arrive",
    "step": "step: exactly the rows of one Step",
    "evaluation": "evaluation: apart, at one version",
}
_LONGEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnWire:
    """A data edge into a box. `output` numbers the output if the source has several, else None;
    `port` names it.
    """

    source: int
    output: int | None
    input: str
    port: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One node. `call` is how its use reads in code; `schemas`: of its outputs; rows like `prompts
    x8`. members: the nodes of a chain that is folded into this box.
    """

    index: int
    name: str
    call: str
    work: Work
    scope: Scope
    region: Region
    schemas: tuple[str, ...]
    rows: str
    wires: tuple[DrawnWire, ...]
    members: tuple[Box, ...] = ()

    @property
    def first(self) -> str:
        """The name of the node that takes its rows."""
        return self.members[0].name if self.members else self.name

    @property
    def last(self) -> str:
        """The name of the node that makes its rows."""
        return self.members[-1].name if self.members else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a Step takes of one source, in words like `64 prompts x8 = 512 rows`; empty where the
    batch is not known.
    """

    source: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A weight edge, or any other read of a State. `lag` is None if a reader has no bound of its
    own.
    """

    box: int
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBox:
    """One State: who writes it, who reads it. `leader`: the State that it follows, or empty."""

    index: int
    name: str
    kind: str
    facts: str
    trained: bool
    leader: str
    writers: tuple[int, ...]
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A graph to draw. Boxes come region by region, each after all that it stands on; `index` is
    the place there.

    name: the graph's, with its dialect unless that is trl; a call then shows only a dialect of its
    own. step: what makes a Step, `64 prompts x8 = 512 rows`; empty where no source of training has
    a batch. taken: the same by source.
    """

    name: str
    boxes: tuple[Box, ...]
    states: tuple[StateBox, ...]
    step: str
    taken: tuple[Taken, ...] = ()

    def within(self, region: Region) -> tuple[Box, ...]:
        """The boxes of one region."""
        return tuple(box for box in self.boxes if box.region == region)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEdge:
    """All wires from one box to another. ports: the names of the outputs where the source has
    several, else of the inputs where there are several.
    """

    source: int
    producer: str
    consumer: str
    ports: tuple[str, ...]


def merged(picture: Picture, box: Box) -> list[DrawnEdge]:
    """The data edges into a box, one from each source."""
    wires: dict[int, list[DrawnWire]] = {}
    for wire in box.wires:
        wires.setdefault(wire.source, []).append(wire)
    return [
        DrawnEdge(
            source=source,
            producer=picture.boxes[source].last,
            consumer=box.first,
            ports=tuple(
                dict.fromkeys(p for w in group if (p := w.port or w.input * (len(group) > 1)))
            ),
        )
        for source, group in wires.items()
    ]


def out_of(box: Box) -> str:
    """`Rollout on prompts x8`: what comes out of a node."""
    return (
        f"{', '.join(box.schemas)} on {box.rows}"
        if box.schemas and box.rows
        else ", ".join(box.schemas)
    )


def picture(graph: Graph) -> Picture:
    """The facts that every form of drawing shows."""
    domains = Domains(graph)
    region = _regions(graph)
    nodes = sorted(graph.nodes, key=lambda n: REGIONS.index(region[id(n)]))
    at = {id(node): i for i, node in enumerate(nodes)}
    boxes = tuple(_box(node, at, region[id(node)], domains, graph.dialect) for node in nodes)
    where: list[Region] = [region[id(node)] for node in nodes]
    states = tuple(_state(i, state, nodes, where) for i, state in enumerate(graph.states))
    return Picture(
        name=one_line(graph.name + _of_dialect(graph)),
        boxes=boxes,
        states=states,
        step=_step(graph, domains),
        taken=_taken(graph, domains),
    )


def _of_dialect(graph: Graph) -> str:
    return "" if graph.dialect == "trl" else f" (dialect={graph.dialect})"


def _regions(graph: Graph) -> dict[int, Region]:
    """By node, as an unchecked graph may use a name twice; never above a node's inputs."""
    derived = regions(graph).of
    found: dict[int, Region] = {}
    for node in graph.nodes:
        above = [REGIONS.index(found[id(port.node)]) for port in node.inputs.values()]
        found[id(node)] = REGIONS[max([REGIONS.index(derived[node.name]), *above])]
    return found


def _box(node: Node, at: Mapping[int, int], region: Region, domains: Domains, dialect: str) -> Box:
    wires = tuple(
        DrawnWire(
            source=at[id(p.node)],
            output=p.index if len(p.node.schemas) > 1 else None,
            input=one_line(key),
            port=one_line(_port(p)),
        )
        for key, p in node.inputs.items()
    )
    sets = [domains.of(port) for port in row_sets(node).values()] or [domains.of_node(node)]
    rows = " + ".join(rows_of(domain) for domain in sets if domain is not None)
    return Box(
        index=at[id(node)],
        name=one_line(node.name),
        call=one_line(call_of(node, dialect)),
        work=node.operator.work,
        scope=node.operator.scope,
        region=region,
        schemas=tuple(one_line(s.__name__) for s in node.schemas),
        rows=one_line(rows),
        wires=wires,
    )


def _port(port: Port) -> str:
    """What an output is called where its node has several: its schema's name, with its place among
    those of that name if there are more.
    """
    names = [schema.__name__ for schema in port.node.schemas]
    if len(names) < 2:
        return ""
    name = names[port.index]
    return f"{name} {names[: port.index].count(name) + 1}" if names.count(name) > 1 else name


def rows_of(domain: Domain) -> str:
    """`prompts x8`, `prompts x8, kept by select`, `(prompts x8 + prompts x4)`: the rows without a
    message's line numbers.
    """
    if domain.parent is None:
        return domain.node.name if domain.factor == 1 else f"{domain.node.name} x{domain.factor}"
    if domain.kind == "concat":
        return f"({' + '.join(map(rows_of, domain.parts))})"
    above = rows_of(domain.parent)
    return (
        f"{above} x{domain.factor}"
        if domain.kind == "expand"
        else f"{above}, kept by {domain.node.name}"
    )


def _step(graph: Graph, domains: Domains) -> str:
    """What the first train node with a known batch takes in a Step, of each of its row sets."""
    for node in graph.sinks:
        sets = [_rows_a_step(domains.of(port)) for port in row_sets(node).values()]
        if sets and sets[0]:
            return " and ".join(dict.fromkeys(rows for rows in sets if rows))
    return ""


def _taken(graph: Graph, domains: Domains) -> tuple[Taken, ...]:
    """What train nodes take of each source that a Step needs."""
    found: dict[str, str] = {}
    for node in graph.sinks:
        for port in row_sets(node).values() if node.operator.work == "train" else ():
            domain = domains.of(port)
            if domain is not None:
                found.setdefault(one_line(domain.source.name), _rows_a_step(domain))
    return tuple(Taken(source=source, words=words) for source, words in found.items())


def _rows_a_step(domain: Domain | None) -> str:
    """`64 prompts x8 = 512 rows`; empty where the batch is not known."""
    batch = domain.source.params.get("batch") if domain else None
    if domain is None or not isinstance(batch, int):
        return ""
    size = domain.group_size
    most = "" if all(map(_full, domain.selections())) else "at most "
    of = f"{batch} {one_line(domain.source.name)}"
    return of + (f" x{size} = {most}{batch * size} rows" if size > 1 else "")


def _full(domain: Domain) -> bool:
    """Whether a Step has as many of these rows as its prompts promise: after a refilled selection
    of whole groups.
    """
    return domain.keeps != "rows" and bool(domain.node.params.get("refill"))


def _state(index: int, state: State, nodes: Sequence[Node], where: Sequence[Region]) -> StateBox:
    writers, readers = [], []
    for i, node in enumerate(nodes):
        for parameter, used in node.states.items():
            if used != state:
                continue
            if parameter in node.operator.writes:
                writers.append(i)
            else:
                apart = where[i] == "evaluation"  # there is one version there, and no lag
                readers.append(Reader(box=i, lag=None if apart else node.params.get("max_lag")))
    follows = state.follows if isinstance(state, Model) else None
    return StateBox(
        index=index,
        name=one_line(state.name),
        kind=type(state).__name__,
        facts=one_line(_facts(state)),
        trained=bool(writers) or (follows is not None and not _stays(state)),
        leader=one_line(follows.name) if follows else "",
        writers=tuple(writers),
        readers=tuple(readers),
    )


def _stays(state: State) -> bool:
    """Whether it is a frozen copy of its leader."""
    return isinstance(state, Model) and state.copies is not None


def _facts(state: State) -> str:
    if isinstance(state, Buffer):
        return "rows for later draws"
    if not isinstance(state, Model):
        return f"by {state.key}"
    facts = [shorten(state.base), *([f"{state.head} head"] if state.head != "lm" else [])]
    if state.copies is not None:
        facts.append(f"fixed copy of {state.copies.name} as it begins")
    elif state.follows is not None:
        pace = f"every {state.every} Steps" if state.every > 1 else "every Step"
        facts.append(
            f"follows {state.follows.name} {pace}"
            + (f" by {state.rate:g}" if state.rate != 1.0 else "")
        )
    elif not state.trainable:
        facts.append("fixed")
    return ", ".join([*facts, *(["trainable"] if state.trainable else [])])


def call_of(node: Node, dialect: str) -> str:
    """The node's call in code: its States, then every parameter that differs from its default, or
    from its graph's dialect where it follows that.
    """
    defaults = declared_defaults(node.operator.path, node.operator.name, node.operator.function)
    shown = [s.name for s in node.states.values() if not isinstance(s, Buffer)]
    own = {name: port.label for name, port in row_sets(node).items() if name != ROWS}
    for key, value in node.params.items():
        if isinstance(value, Loss):
            shown.append(" + ".join(_term(term, dialect, own) for term in value.terms))
        else:
            shown += _setting(key, value, defaults, dialect)
    return f"{node.operator.name}({', '.join(shown)})"


def _setting(key: str, value: Any, defaults: Mapping[str, Any] | None, dialect: str) -> list[str]:
    if _functions(value):
        return [shown_value(value)]
    if defaults is not None and (key not in defaults or _equal(defaults[key], value)):
        return []
    if key == PARAMETER and value == dialect and defaults is not None and defaults[key] is None:
        return []
    return [shown_value(value) if key == "data" else f"{key}={shown_value(value)}"]


def _functions(value: Any) -> bool:
    return callable(value) or (
        isinstance(value, tuple) and value != () and all(map(callable, value))
    )


def _term(term: LossTerm, dialect: str, own: Mapping[str, str]) -> str:
    """own: the rows that terms have of their own, by input."""
    defaults = declared_defaults(term.function.path, term.function.name, term.function.fn)
    given = [part for key, value in term.params for part in _setting(key, value, defaults, dialect)]
    settings = ", ".join([*given, *([f"rows={own[term.on]}"] if term.on in own else [])])
    weight = "" if _equal(term.weight, 1.0) else f"{shown_value(term.weight)} * "
    return f"{weight}{term.function.name}" + (f"({settings})" if settings else "")


def _equal(a: Any, b: Any) -> bool:
    return type(a) in (type(b), int) and a == b


@functools.cache
def declared_defaults(
    path: str, name: str, function: Callable[..., Any] | None
) -> Mapping[str, Any] | None:
    """The parameters of the function that users call, with their defaults (Parameter.empty if there
    is none).

    This project's functions are next to the declaration, under the operator's name; a user's is the
    declared function itself, so that nothing is imported to draw a graph. None if it is not found:
    then every parameter is shown.
    """
    if own(path.partition(":")[0]):
        function = getattr(importlib.import_module(path.partition(":")[0]), name, None)
    if not callable(function):
        return None
    parameters = inspect.signature(function).parameters.values()
    if (
        any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
        and len(parameters) <= 2
    ):
        return None
    return {p.name: p.default for p in parameters}


def shown_value(value: Any) -> str:
    """A parameter's value in a few characters."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e+")
    if isinstance(value, str):
        return f'"{shorten(value)}"' if any(mark.isspace() for mark in value) else shorten(value)
    if isinstance(value, Schedule):
        return _schedule(value)
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    return _function(value) if callable(value) else str(value)


def _sequence(values: list[Any] | tuple[Any, ...]) -> str:
    shown = ", ".join(map(shown_value, values))
    bare = isinstance(values, list) or (len(values) == 1 and callable(values[0]))
    return shown if bare else f"({shown})"


def _schedule(value: Schedule) -> str:
    start, stop = shown_value(value.start), shown_value(value.stop)
    body = start if value.kind == "constant" else f"{value.kind} {start}..{stop} in {value.steps}"
    return f"{body} after {value.warmup} warm-up" if value.warmup else body


def _function(value: Callable[..., Any]) -> str:
    name = getattr(value, "__name__", type(value).__name__)
    return "lambda" if name == "<lambda>" else name


def shorten(text: str) -> str:
    """The end of a long path or text."""
    if len(text) <= _LONGEST:
        return text
    last = PurePath(text).name
    return f".../{last}" if "/" in text and len(last) < _LONGEST else f"...{text[-_LONGEST + 3 :]}"
