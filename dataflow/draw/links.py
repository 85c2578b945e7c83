"""What joins the boxes of a panel, and what is said of it.

Owns: which States stand beside which nodes, which of their edges go far, data edges, labels in
words. Does not own: places (arrange.py), the graph's facts (picture.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dataflow.draw.boxes import Drum, Line, drum_of, notes_of
from dataflow.draw.layer_draft import Edge
from dataflow.draw.measure import truncate
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import Box, Picture, StateBox, describe_output, merge_wires
from dataflow.draw.text import lag_words

_PORTS = 28
"""Letters of an edge's ports; all are in its words for those who cannot see it."""
_WRITES: Line = ("ports", "writes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """A weight edge between a State and something that it does not stand beside, by id: `n3` or, of
    a follower, `s1`. name: of that node or State.
    """

    state: int
    target: str
    name: str
    kind: Literal["reads", "writes", "follows"]
    label: tuple[Line, ...]


@dataclass(slots=True, kw_only=True)
class Links:
    """edges: merged data edges with their lines; ends, carried: their nodes and ports by name.
    beside: States by the node that they stand at; holder: the reverse. alone: States at no node.
    labels: of nodes, in words.
    """

    edges: dict[Edge, tuple[Line, ...]] = field(default_factory=dict)
    ends: dict[Edge, tuple[str, str]] = field(default_factory=dict)
    carried: dict[Edge, tuple[str, ...]] = field(default_factory=dict)
    beside: dict[int, list[Drum]] = field(default_factory=dict)
    holder: dict[int, int] = field(default_factory=dict)
    alone: list[Drum] = field(default_factory=list)
    far: list[Far] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)


def link_boxes(picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool) -> Links:
    """Gather all that joins these boxes. apart: whether they are evaluation's."""
    boxes_by_index = {box.index: box for box in boxes}
    links = Links(labels={box.index: node_label(box, overlay) for box in boxes})
    for box in boxes:
        _add_wires(links, picture, box, overlay)
    states: list[StateBox] = []
    for state in picture.states:
        if _is_shown(state, picture, boxes_by_index, apart=apart):
            states.append(state)
    for state in states:
        _seat(links, state, boxes_by_index, overlay)
    # Only now: what a State stands beside needs no far edge.
    states_by_name = {state.name: state for state in states}
    for state in states:
        _add_far_edges(links, state, boxes_by_index, overlay)
        _add_following(links, state, states_by_name)
    return links


def _add_wires(links: Links, picture: Picture, box: Box, overlay: Overlay) -> None:
    """Add the data edges into a box, those from one source merged."""
    for each in merge_wires(picture, box):
        edge = (f"n{each.source}", f"n{box.index}")
        lines = notes_of(overlay, f"{each.producer}->{each.consumer}")
        if each.ports:
            lines = [("ports", truncate(", ".join(each.ports), _PORTS)), *lines]
        links.edges[edge] = tuple(lines)
        links.ends[edge] = (each.producer, each.consumer)
        links.carried[edge] = each.ports


def _is_shown(state: StateBox, picture: Picture, boxes: Mapping[int, Box], *, apart: bool) -> bool:
    """Whether a panel has a State: it is used there, or followed, or used nowhere."""
    users = [*state.writers, *(reader.box for reader in state.readers)]
    if any(index in boxes for index in users):
        return True
    if apart:
        return False
    if not users:
        return True
    followers = [other for other in picture.states if other.leader == state.name]
    return any(_is_shown(follower, picture, boxes, apart=apart) for follower in followers)


def _seat(links: Links, state: StateBox, boxes: Mapping[int, Box], overlay: Overlay) -> None:
    """Put a State beside its writer, else beside its first reader there."""
    drum = drum_of(state, overlay)
    writers = [index for index in state.writers if index in boxes]
    readers = [reader for reader in state.readers if reader.box in boxes]
    if writers:
        node, lines = writers[0], [_WRITES]
        notes = notes_of(overlay, f"{boxes[node].name}->{state.name}")
    elif readers:
        node, lines = readers[0].box, _describe_lag(readers[0].lag, state)
        notes = notes_of(overlay, f"{state.name}->{boxes[node].name}")
    else:
        links.alone.append(drum)
        return
    seated = replace(drum, writes=bool(writers), link=(*lines, *notes))
    links.beside.setdefault(node, []).append(seated)
    links.holder[state.index] = node


def _describe_lag(lag: int | None, state: StateBox) -> list[Line]:
    words = lag_words(lag, trained=state.trained).strip(" ()")
    return [("ports", words)] if words else []


def _add_far_edges(
    links: Links, state: StateBox, boxes: Mapping[int, Box], overlay: Overlay
) -> None:
    """Add the edges of a State to readers and writers that it does not stand beside."""
    readers = [reader for reader in state.readers if reader.box in boxes]
    writers = [index for index in state.writers if index in boxes]
    # It stands beside the first writer, else beside the first reader.
    if writers:
        writers = writers[1:]
    else:
        readers = readers[1:]
    for reader in readers:
        name = boxes[reader.box].name
        notes = notes_of(overlay, f"{state.name}->{name}")
        edge = Far(
            state=state.index,
            target=f"n{reader.box}",
            name=name,
            kind="reads",
            label=(*_describe_lag(reader.lag, state), *notes),
        )
        links.far.append(edge)
    for index in writers:
        name = boxes[index].name
        edge = Far(
            state=state.index, target=f"n{index}", name=name, kind="writes", label=(_WRITES,)
        )
        links.far.append(edge)


def _add_following(links: Links, state: StateBox, states: Mapping[str, StateBox]) -> None:
    """Add the edge of a follower from its leader."""
    if state.leader not in states:
        return
    edge = Far(
        state=states[state.leader].index,
        target=f"s{state.index}",
        name=state.name,
        kind="follows",
        label=(("ports", "follows"),),
    )
    links.far.append(edge)


def node_label(box: Box, overlay: Overlay) -> str:
    """A node in words, for those who cannot see it."""
    if box.members:
        names = ", ".join(member.name for member in box.members)
        words = [f"{names}: {len(box.members)} nodes in a chain"]
    else:
        words = [f"{box.name}: {box.call}"]
    output = describe_output(box)
    if output:
        words.append(f"makes {output}")
    workers = overlay.workers_of(box)
    if workers:
        words.append(overlay.describe_place(box) or f"on {workers[0]}")
    return ", ".join([*words, *overlay.notes_about_box(box)])


def state_label(state: StateBox) -> str:
    """A State in words."""
    return f"{state.name}: {state.kind} {state.facts}".strip()


def data_label(source: str, target: str, names: Sequence[str]) -> str:
    """A data edge in words."""
    words = f"rows of {source} to {target}"
    if names:
        words += f": {', '.join(names)}"
    return words


def weight_label(state: str, node: str, lines: Sequence[Line], *, writes: bool) -> str:
    """An edge of a State in words. lines: what is written on it."""
    if writes:
        return f"{node} writes {state}"
    words = [f"weights of {state} to {node}"]
    words += [text for _, text in lines]
    return ", ".join(words)
