"""Chains of nodes as one box, in drawings of many nodes.

Owns: which nodes make a chain, and the Picture in which each chain is one box. Does not own: how
such a box looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.draw.node_places import Placed
from dataflow.draw.picture import Box, Picture, StateBox

MANY = 25
"""Nodes of a drawing, above which chains are folded unasked."""
_PLAIN = ("host", "tokenise", "select", "forward")
"""Work of nodes that may be in a chain."""


def fold_chains(picture: Picture, placed: Placed | None = None) -> Picture:
    """Fold two or more nodes into one box, where each has one source and one reader and no State,
    and they are on the same Workers.
    """
    chain_by_head = {chain[0]: chain for chain in _find_chains(picture, placed)}
    inner: set[int] = set()
    for chain in chain_by_head.values():
        inner.update(chain[1:])
    remaining = [box for box in picture.boxes if box.index not in inner]
    new_indices: dict[int, int] = {}
    for new_index, box in enumerate(remaining):
        for index in chain_by_head.get(box.index, [box.index]):
            new_indices[index] = new_index
    boxes: list[Box] = []
    for box in remaining:
        whole = _fold_box(picture, box, chain_by_head.get(box.index, []))
        boxes.append(_renumber_box(whole, new_indices))
    states = [_renumber_state(state, new_indices) for state in picture.states]
    return replace(picture, boxes=tuple(boxes), states=tuple(states))


def _find_chains(picture: Picture, placed: Placed | None) -> Iterator[list[int]]:
    """The longest chains, in order."""
    plain = _find_plain_boxes(picture)
    following: dict[int, int] = {}
    for box in picture.boxes:
        source = box.wires[0].source if box.wires else -1
        if {box.index, source} <= plain and _run_together(picture, source, box, placed):
            following[source] = box.index
    for start in sorted(following.keys() - set(following.values())):
        chain = [start]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        yield chain


def _find_plain_boxes(picture: Picture) -> set[int]:
    """The boxes that may be in a chain: with one source, one reader, and no State."""
    readers: dict[int, set[int]] = {}
    for box in picture.boxes:
        for wire in box.wires:
            readers.setdefault(wire.source, set()).add(box.index)
    with_state: set[int] = set()
    for state in picture.states:
        with_state.update(state.writers)
        with_state.update(reader.box for reader in state.readers)
    plain: set[int] = set()
    for box in picture.boxes:
        sources = {wire.source for wire in box.wires}
        box_readers = readers.get(box.index, set())
        is_link = len(sources) == len(box_readers) == 1
        if is_link and box.work in _PLAIN and box.index not in with_state:
            plain.add(box.index)
    return plain


def _run_together(picture: Picture, source: int, box: Box, placed: Placed | None) -> bool:
    """Whether a box is in its source's region and on its Workers."""
    above = picture.boxes[source]
    if above.region != box.region:
        return False
    if placed is None:
        return True
    return placed.nodes.get(above.name) == placed.nodes.get(box.name)


def _fold_box(picture: Picture, head: Box, chain: Sequence[int]) -> Box:
    """The box of a whole chain; the head itself where it has none."""
    if not chain:
        return head
    members = tuple(picture.boxes[index] for index in chain)
    last = members[-1]
    return replace(
        head,
        name=", ".join(member.name for member in members),
        call=f"{len(members)} nodes in a chain",
        schemas=last.schemas,
        rows=last.rows,
        members=members,
    )


def _renumber_box(box: Box, new_indices: Mapping[int, int]) -> Box:
    wires = tuple(replace(wire, source=new_indices[wire.source]) for wire in box.wires)
    # A chain has the index of its head, which it was made of.
    return replace(box, index=new_indices[box.index], wires=wires)


def _renumber_state(state: StateBox, new_indices: Mapping[int, int]) -> StateBox:
    readers = [replace(reader, box=new_indices[reader.box]) for reader in state.readers]
    return replace(
        state,
        writers=tuple(new_indices[index] for index in state.writers),
        readers=tuple(readers),
    )
