"""What joins the boxes of a panel, and what is said of it.

Owns: which States stand beside which nodes and which go far, merged data edges, labels in words.
Does not own: places (arrange.py), the graph's facts (picture.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dataflow.draw.boxes import Drum, Line, drum_of, notes_of
from dataflow.draw.layers import Edge
from dataflow.draw.measure import cut
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import Box, Picture, StateBox, merged, out_of
from dataflow.draw.text import lag_words

_PORTS = 28
"""Letters of an edge's ports; all are in its words for those who cannot see it."""


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
    """data: merged edges with their lines; ends, carried: their nodes and ports by name. beside:
    States by the node that they stand at; holder: the reverse. alone: States at no node.
    """

    data: dict[Edge, tuple[Line, ...]] = field(default_factory=dict)
    ends: dict[Edge, tuple[str, str]] = field(default_factory=dict)
    carried: dict[Edge, tuple[str, ...]] = field(default_factory=dict)
    beside: dict[int, list[Drum]] = field(default_factory=dict)
    holder: dict[int, int] = field(default_factory=dict)
    alone: list[Drum] = field(default_factory=list)
    far: list[Far] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)


def links_of(picture: Picture, boxes: Sequence[Box], overlay: Overlay, *, apart: bool) -> Links:
    """All that joins these boxes. apart: whether they are evaluation's."""
    inside = {box.index: box for box in boxes}
    found = Links(labels={box.index: node_label(box, overlay) for box in boxes})
    for box in boxes:
        _add_wires(found, picture, box, overlay)
    states = [state for state in picture.states if _shown(state, picture, inside, apart=apart)]
    for state in states:
        _seat(found, state, inside, overlay)
    names = {state.name: state for state in states}
    for state in states:
        _add_far(found, state, inside, names, overlay)
    return found


def _add_wires(links: Links, picture: Picture, box: Box, overlay: Overlay) -> None:
    """Data edges into a box, those from one source merged."""
    for each in merged(picture, box):
        edge = (f"n{each.source}", f"n{box.index}")
        words = [("ports", cut(", ".join(each.ports), _PORTS))] if each.ports else []
        notes = notes_of(overlay, f"{each.producer}->{each.consumer}")
        links.data[edge] = (*words, *notes)
        links.ends[edge], links.carried[edge] = (each.producer, each.consumer), each.ports


def _shown(state: StateBox, picture: Picture, inside: Mapping[int, Box], *, apart: bool) -> bool:
    """Whether a panel has a State: it is used there, or followed, or used nowhere."""
    used = [*state.writers, *(reader.box for reader in state.readers)]
    if any(index in inside for index in used):
        return True
    if apart:
        return False
    led = [other for other in picture.states if other.leader == state.name]
    return not used or any(_shown(other, picture, inside, apart=apart) for other in led)


def _seat(links: Links, state: StateBox, inside: Mapping[int, Box], overlay: Overlay) -> None:
    """Put a State beside its writer, else beside its first reader there."""
    drum = drum_of(state, overlay)
    writers = [index for index in state.writers if index in inside]
    readers = [reader for reader in state.readers if reader.box in inside]
    if writers:
        at, lines = writers[0], [("ports", "writes")]
        notes = notes_of(overlay, f"{inside[at].name}->{state.name}")
    elif readers:
        at = readers[0].box
        lines = _lag(readers[0].lag, state)
        notes = notes_of(overlay, f"{state.name}->{inside[at].name}")
    else:
        links.alone.append(drum)
        return
    seated = Drum(
        state=state,
        lines=drum.lines,
        width=drum.width,
        height=drum.height,
        writes=bool(writers),
        link=(*lines, *notes),
    )
    links.beside.setdefault(at, []).append(seated)
    links.holder[state.index] = at


def _lag(lag: int | None, state: StateBox) -> list[Line]:
    words = lag_words(lag, trained=state.trained).strip(" ()")
    return [("ports", words)] if words else []


def _add_far(
    links: Links,
    state: StateBox,
    inside: Mapping[int, Box],
    names: Mapping[str, StateBox],
    overlay: Overlay,
) -> None:
    """The edges of a State to all that it does not stand beside."""
    beside, written = links.holder.get(state.index), any(w in inside for w in state.writers)
    for i, reader in enumerate(r for r in state.readers if r.box in inside):
        if reader.box == beside and not written and i == 0:
            continue
        node = inside[reader.box].name
        label = (*_lag(reader.lag, state), *notes_of(overlay, f"{state.name}->{node}"))
        target = f"n{reader.box}"
        links.far.append(
            Far(state=state.index, target=target, name=node, kind="reads", label=label)
        )
    for writer in [w for w in state.writers if w in inside][1:]:
        label = (("ports", "writes"),)
        target, node = f"n{writer}", inside[writer].name
        links.far.append(
            Far(state=state.index, target=target, name=node, kind="writes", label=label)
        )
    if state.leader in names:
        leader, label = names[state.leader].index, (("ports", "follows"),)
        target = f"s{state.index}"
        links.far.append(
            Far(state=leader, target=target, name=state.name, kind="follows", label=label)
        )


def node_label(box: Box, overlay: Overlay) -> str:
    """A node in words, for those who cannot see it."""
    if box.members:
        words = [f"{', '.join(m.name for m in box.members)}: {len(box.members)} nodes in a chain"]
    else:
        words = [f"{box.name}: {box.call}"]
    words += [f"makes {out_of(box)}"] if out_of(box) else []
    workers = overlay.workers_of(box)
    words += [overlay.place(box) or f"on {workers[0]}"] if workers else []
    return ", ".join([*words, *overlay.of_box(box)])


def state_label(state: StateBox) -> str:
    """A State in words."""
    return f"{state.name}: {state.kind} {state.facts}".strip()


def data_label(source: str, target: str, names: Sequence[str]) -> str:
    """A data edge in words."""
    carried = f": {', '.join(names)}" if names else ""
    return f"rows of {source} to {target}{carried}"
