"""What a drawing shows of a graph, before any form is chosen.

Owns: which facts of a node, a wire and a State are worth a newcomer's look, in words. Does not own:
how a node's call reads (node_calls.py), any layout or syntax (text.py, mermaid.py, dot.py, svg.py).

A Picture can be made of any Graph, checked or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.draw.node_calls import call_of, shorten
from dataflow.graph import Graph
from dataflow.loss_terms import row_sets
from dataflow.model import Buffer, Model, State
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
class StepShare:
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
    a batch. shares: the same by source.
    """

    name: str
    boxes: tuple[Box, ...]
    states: tuple[StateBox, ...]
    step: str
    shares: tuple[StepShare, ...] = ()

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


def merge_wires(picture: Picture, box: Box) -> list[DrawnEdge]:
    """Merge the wires into a box to data edges, one from each source."""
    wires_by_source: dict[int, list[DrawnWire]] = {}
    for wire in box.wires:
        wires_by_source.setdefault(wire.source, []).append(wire)
    edges: list[DrawnEdge] = []
    for source, wires in wires_by_source.items():
        edge = DrawnEdge(
            source=source,
            producer=picture.boxes[source].last,
            consumer=box.first,
            ports=_name_ports(wires),
        )
        edges.append(edge)
    return edges


def _name_ports(wires: Sequence[DrawnWire]) -> tuple[str, ...]:
    """The names of outputs, where there are several, else of inputs; each once."""
    names: dict[str, None] = {}
    for wire in wires:
        if wire.port:
            names[wire.port] = None
        elif len(wires) > 1 and wire.input:
            names[wire.input] = None
    return tuple(names)


def title_region(picture: Picture, region: Region) -> str:
    """A region's title; of the step region what makes a Step, where that is known."""
    if region == "step" and picture.step:
        return f"step: {picture.step}"
    return TITLES[region]


def describe_output(box: Box) -> str:
    """`Rollout on prompts x8`: what comes out of a node."""
    schemas = ", ".join(box.schemas)
    if schemas and box.rows:
        return f"{schemas} on {box.rows}"
    return schemas


def make_picture(graph: Graph) -> Picture:
    """Gather the facts that every form of drawing shows."""
    domains = Domains(graph)
    region_by_node = _find_regions(graph)
    # Stable: within a region nodes stay in the graph's order, each after all that it stands on.
    nodes = sorted(graph.nodes, key=lambda node: REGIONS.index(region_by_node[id(node)]))
    places = {id(node): place for place, node in enumerate(nodes)}
    node_regions: list[Region] = [region_by_node[id(node)] for node in nodes]
    boxes: list[Box] = []
    for node, region in zip(nodes, node_regions, strict=True):
        boxes.append(_make_box(node, places, region, domains, graph.dialect))
    states: list[StateBox] = []
    for index, state in enumerate(graph.states):
        states.append(_make_state_box(index, state, nodes, node_regions))
    name = graph.name
    if graph.dialect != "trl":
        name += f" (dialect={graph.dialect})"
    return Picture(
        name=one_line(name),
        boxes=tuple(boxes),
        states=tuple(states),
        step=_describe_step(graph, domains),
        shares=_list_shares(graph, domains),
    )


def _find_regions(graph: Graph) -> dict[int, Region]:
    """By node, as an unchecked graph may use a name twice; never above a node's inputs."""
    derived = regions(graph).of
    places: dict[int, int] = {}
    for node in graph.nodes:
        place = REGIONS.index(derived[node.name])
        for port in node.inputs.values():
            place = max(place, places[id(port.node)])
        places[id(node)] = place
    return {node: REGIONS[place] for node, place in places.items()}


# --- nodes ----------------------------------------------------------------------------------------


def _make_box(
    node: Node, places: Mapping[int, int], region: Region, domains: Domains, dialect: str
) -> Box:
    wires: list[DrawnWire] = []
    for name, port in node.inputs.items():
        output, output_name = None, ""
        if len(port.node.schemas) > 1:
            output, output_name = port.index, one_line(_name_output(port))
        wire = DrawnWire(
            source=places[id(port.node)],
            output=output,
            input=one_line(name),
            port=output_name,
        )
        wires.append(wire)
    schemas = [one_line(schema.__name__) for schema in node.schemas]
    return Box(
        index=places[id(node)],
        name=one_line(node.name),
        call=one_line(call_of(node, dialect)),
        work=node.operator.work,
        scope=node.operator.scope,
        region=region,
        schemas=tuple(schemas),
        rows=one_line(_describe_rows(node, domains)),
        wires=tuple(wires),
    )


def _name_output(port: Port) -> str:
    """What one of several outputs is called: its schema's name, with its place among those of that
    name if there are more.
    """
    names = [schema.__name__ for schema in port.node.schemas]
    name = names[port.index]
    if names.count(name) == 1:
        return name
    return f"{name} {names[: port.index].count(name) + 1}"


# --- rows -----------------------------------------------------------------------------------------


def _describe_rows(node: Node, domains: Domains) -> str:
    """A node's rows; those of each row set of a train node."""
    row_domains = [domains.of(port) for port in row_sets(node).values()]
    if not row_domains:
        row_domains = [domains.of_node(node)]
    return " + ".join(describe_domain(domain) for domain in row_domains if domain is not None)


def describe_domain(domain: Domain) -> str:
    """`prompts x8`, `prompts x8, kept by select`, `(prompts x8 + prompts x4)`: the rows without a
    message's line numbers.
    """
    if domain.parent is None:
        name = domain.node.name
        return name if domain.factor == 1 else f"{name} x{domain.factor}"
    if domain.kind == "concat":
        return f"({' + '.join(map(describe_domain, domain.parts))})"
    above = describe_domain(domain.parent)
    if domain.kind == "expand":
        return f"{above} x{domain.factor}"
    return f"{above}, kept by {domain.node.name}"


def _describe_step(graph: Graph, domains: Domains) -> str:
    """What the first train node with a known batch takes in a Step, of each of its row sets."""
    for node in graph.sinks:
        words = [_count_step_rows(domains.of(port)) for port in row_sets(node).values()]
        if words and words[0]:
            return " and ".join(dict.fromkeys(filter(None, words)))
    return ""


def _list_shares(graph: Graph, domains: Domains) -> tuple[StepShare, ...]:
    """What train nodes take of each source that a Step needs."""
    words_by_source: dict[str, str] = {}
    for node in graph.sinks:
        if node.operator.work != "train":
            continue
        for port in row_sets(node).values():
            domain = domains.of(port)
            if domain is not None:
                source = one_line(domain.source.name)
                words_by_source.setdefault(source, _count_step_rows(domain))
    return tuple(StepShare(source=source, words=words) for source, words in words_by_source.items())


def _count_step_rows(domain: Domain | None) -> str:
    """`64 prompts x8 = 512 rows`; empty where the batch is not known."""
    if domain is None:
        return ""
    batch = domain.source.params.get("batch")
    if not isinstance(batch, int):
        return ""
    prompts = f"{batch} {one_line(domain.source.name)}"
    size = domain.group_size
    if size <= 1:
        return prompts
    is_full = all(map(_keeps_count, domain.selections()))
    most = "" if is_full else "at most "
    return f"{prompts} x{size} = {most}{batch * size} rows"


def _keeps_count(selection: Domain) -> bool:
    """Whether a Step has as many of these rows as its prompts promise: after a refilled selection
    of whole groups.
    """
    return selection.keeps != "rows" and bool(selection.node.params.get("refill"))


# --- States ---------------------------------------------------------------------------------------


def _make_state_box(
    index: int, state: State, nodes: Sequence[Node], node_regions: Sequence[Region]
) -> StateBox:
    writers: list[int] = []
    readers: list[Reader] = []
    for place, node in enumerate(nodes):
        for parameter, used_state in node.states.items():
            if used_state != state:
                continue
            if parameter in node.operator.writes:
                writers.append(place)
                continue
            lag = node.params.get("max_lag")
            if node_regions[place] == "evaluation":
                lag = None  # there is one version there, and no lag
            readers.append(Reader(box=place, lag=lag))
    leader = state.follows if isinstance(state, Model) else None
    is_frozen_copy = isinstance(state, Model) and state.copies is not None
    return StateBox(
        index=index,
        name=one_line(state.name),
        kind=type(state).__name__,
        facts=one_line(_describe_state(state)),
        trained=bool(writers) or (leader is not None and not is_frozen_copy),
        leader=one_line(leader.name) if leader else "",
        writers=tuple(writers),
        readers=tuple(readers),
    )


def _describe_state(state: State) -> str:
    if isinstance(state, Buffer):
        return "rows for later draws"
    if not isinstance(state, Model):
        return f"{state.statistic.replace('_', ' ')} by row of the data"
    facts = [shorten(state.base)]
    if state.head != "lm":
        facts.append(f"{state.head} head")
    if state.copies is not None:
        facts.append(f"fixed copy of {state.copies.name} as it begins")
    elif state.follows is not None:
        facts.append(_describe_following(state, state.follows))
    elif not state.trainable:
        facts.append("fixed")
    if state.subset is not None:
        facts.append(f"trainable: {state.subset}")
    elif state.trainable:
        facts.append("trainable")
    if state.adapter is not None:
        facts.append(str(state.adapter))
    return ", ".join(facts)


def _describe_following(state: Model, leader: Model) -> str:
    """`follows policy every 4 Steps by 0.1`."""
    pace = f"every {state.every} Steps" if state.every > 1 else "every Step"
    words = f"follows {leader.name} {pace}"
    if state.rate != 1.0:
        words += f" by {state.rate:g}"
    return words
