"""Chains of nodes as one box, in drawings of many nodes.

Owns: which nodes make a chain, and the Picture in which each chain is one box. Does not own: how
such a box looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dataflow.draw.node_places import Placed
from dataflow.draw.picture import Box, Picture, StateBox

MANY = 25
"""Nodes of a drawing, above which chains are folded unasked."""
_PLAIN = ("host", "tokenise", "select", "forward")


def folded(picture: Picture, placed: Placed | None = None) -> Picture:
    """Two or more nodes, each with one source and one reader and without a State, become one box
    where they are on the same Workers.
    """
    chains = list(_chains(picture, placed))
    inner = {index for chain in chains for index in chain[1:]}
    heads = {chain[0]: chain for chain in chains}
    kept = [box for box in picture.boxes if box.index not in inner]
    at: dict[int, int] = {}
    for place, box in enumerate(kept):
        for index in heads.get(box.index, [box.index]):
            at[index] = place
    boxes = [_box(picture, box, heads.get(box.index, [])) for box in kept]
    return replace(
        picture,
        boxes=tuple(_moved(box, at) for box in boxes),
        states=tuple(_state(state, at) for state in picture.states),
    )


def _chains(picture: Picture, placed: Placed | None) -> Iterable[list[int]]:
    """The longest chains, in order."""
    users: dict[int, set[int]] = {}
    for box in picture.boxes:
        for wire in box.wires:
            users.setdefault(wire.source, set()).add(box.index)
    used = {r.box for s in picture.states for r in s.readers}
    used |= {index for s in picture.states for index in s.writers}
    plain = {
        box.index
        for box in picture.boxes
        if box.work in _PLAIN
        and box.index not in used
        and len({wire.source for wire in box.wires}) == 1
        and len(users.get(box.index, ())) == 1
    }
    after: dict[int, int] = {}
    for box in picture.boxes:
        source = box.wires[0].source if box.wires else -1
        if {box.index, source} <= plain and _together(picture, source, box, placed):
            after[source] = box.index
    for start in sorted(after.keys() - set(after.values())):
        chain = [start]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        yield chain


def _together(picture: Picture, source: int, box: Box, placed: Placed | None) -> bool:
    above = picture.boxes[source]
    if above.region != box.region:
        return False
    return placed is None or placed.nodes.get(above.name) == placed.nodes.get(box.name)


def _box(picture: Picture, first: Box, chain: list[int]) -> Box:
    if not chain:
        return first
    members = tuple(picture.boxes[index] for index in chain)
    return replace(
        first,
        name=", ".join(member.name for member in members),
        call=f"{len(members)} nodes in a chain",
        schemas=members[-1].schemas,
        rows=members[-1].rows,
        members=members,
    )


def _moved(box: Box, at: Mapping[int, int]) -> Box:
    wires = tuple(replace(wire, source=at[wire.source]) for wire in box.wires)
    return replace(box, index=at[box.members[0].index if box.members else box.index], wires=wires)


def _state(state: StateBox, at: Mapping[int, int]) -> StateBox:
    return replace(
        state,
        writers=tuple(at[index] for index in state.writers),
        readers=tuple(replace(reader, box=at[reader.box]) for reader in state.readers),
    )
