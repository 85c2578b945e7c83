"""Who sends which rows of which piece to whom, when writer and readers are split differently.

Owns: layouts of pieces over ranks, the plan from one to another, and the order of its
messages. Does not own: sending (collective.py), tensors (there is none here), placement (plan).

A piece is split along its dimension 0, as FSDP2 does, or is whole on several ranks. Every byte that
a reader needs moves once, straight from a rank that holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from dataflow.errors import RunError
from dataflow.kernel import Piece

CUTS = 16
"""A replicated interval is cut for balance into parts of at most 1/CUTS of what a sender sends on
average.
"""

Distance = Callable[[int, int], int]
"""(source, destination) -> how far they are apart: 0 one device, 1 one host, 2 elsewhere, say."""


@dataclass(frozen=True, slots=True)
class Held:
    """Rows [low, high) of dimension 0, on one rank; a piece without dimensions has one row."""

    rank: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where one piece lies on one side of an edge. item: bytes of an element. Ranks are counted on
    that side.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    item: int
    held: tuple[Held, ...]

    @property
    def rows(self) -> int:
        """Rows of dimension 0."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.item


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rows [low, high) of piece number `piece`, from one rank of the writer to one of a reader."""

    source: int
    destination: int
    piece: int
    low: int
    high: int


def layout_of(pieces: Iterable[Piece], ranks: int, *, sharded: bool) -> tuple[Placed, ...]:
    """The layout of whole pieces on `ranks` ranks: each of them whole on every rank, or split as
    FSDP2 splits it.
    """
    return tuple(
        Placed(
            name=piece.name,
            dtype=str(piece.data.dtype).removeprefix("torch."),
            shape=tuple(piece.data.shape),
            item=piece.data.element_size(),
            held=(
                shards(tuple(piece.data.shape), ranks)
                if sharded
                else copies(tuple(piece.data.shape), ranks)
            ),
        )
        for piece in pieces
    )


def copies(shape: tuple[int, ...], ranks: int) -> tuple[Held, ...]:
    """Whole on every rank."""
    return tuple(Held(rank, 0, shape[0] if shape else 1) for rank in range(ranks))


def shards(shape: tuple[int, ...], ranks: int) -> tuple[Held, ...]:
    """Rows over ranks as torch.chunk deals them, and so FSDP2; the last ranks may have fewer, or
    none.
    """
    rows = shape[0] if shape else 1
    each = -(-rows // ranks)
    found = (
        Held(rank, min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)
    )
    return tuple(held for held in found if held.low < held.high)


def transfer_plan(
    source: Sequence[Placed], destination: Sequence[Placed], *, distance: Distance | None = None
) -> tuple[Move, ...]:
    """The moves that give every destination rank its rows, each once, in the order in which they
    are to be made.

    Of several holders the nearest is taken, then the one that sends least so far, then the lowest.
    Adjacent rows of a pair are one move. The moves come by rounds: in round r source s sends to
    destination (s + r) modulo the number of ranks, so that in each round nobody sends or receives
    twice. Deterministic. Raises RunError for a piece that one side lacks or has in another shape or
    dtype, for rows that nobody holds, or that a rank is to get twice.
    """
    _require_same(source, destination)
    atoms = [
        atom
        for n, (have, want) in enumerate(zip(source, destination, strict=True))
        for atom in _atoms(n, have, want)
    ]
    senders = len({held.rank for piece in source for held in piece.held}) or 1
    quantum = max(1, sum(atom.nbytes for atom in atoms) // (senders * CUTS))
    cut = [part for atom in atoms for part in _cut(atom, quantum)]
    moves = _coalesced(_assigned(cut, distance or (lambda s, d: 0)))
    around = 1 + max((max(m.source, m.destination) for m in moves), default=0)
    return tuple(
        sorted(moves, key=lambda m: ((m.destination - m.source) % around, m.source, m.piece, m.low))
    )


def pairs_of(moves: Iterable[Move]) -> dict[tuple[int, int], list[Move]]:
    """The moves of each (source, destination), pairs in the order of their rounds."""
    found: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        found[move.source, move.destination].append(move)
    return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Atom:
    """Rows of a piece that one rank needs and all `holders` have."""

    destination: int
    piece: int
    low: int
    high: int
    row_bytes: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (self.high - self.low) * self.row_bytes


def _require_same(source: Sequence[Placed], destination: Sequence[Placed]) -> None:
    for have, want in zip(source, destination, strict=False):
        if (have.name, have.dtype, have.shape) != (want.name, want.dtype, want.shape):
            raise RunError(
                f"weights: the writer has {have.name!r} ({have.dtype} {list(have.shape)}) where the"
                f" reader expects {want.name!r} ({want.dtype} {list(want.shape)}). Fix: writer and"
                " reader need the same base."
            )
    if len(source) != len(destination):
        longer = max(source, destination, key=len)
        raise RunError(
            f"weights: the writer has {len(source)} pieces, the reader expects {len(destination)}; "
            f"{longer[min(len(source), len(destination))].name!r} is on one side alone. "
            "Fix: writer and reader need the same base."
        )


def _atoms(number: int, have: Placed, want: Placed) -> Iterable[_Atom]:
    """What each rank needs of a piece, cut where the set of its holders changes."""
    edges = sorted({0, have.rows, *(e for h in have.held for e in (h.low, h.high))})
    for need in want.held:
        _require_once(want, need)
        first, last = bisect_right(edges, need.low), bisect_right(edges, need.high - 1)
        for low, high in pairwise([need.low, *edges[first:last], need.high]):
            if low == high:
                continue
            holders = tuple(sorted({h.rank for h in have.held if h.low <= low and high <= h.high}))
            if not holders:
                raise RunError(
                    f"weights: rank {need.rank} needs rows {low} to {high} of {want.name!r}, and no"
                    " rank of the writer has them. Fix: a layout whose ranks hold every row."
                )
            yield _Atom(
                destination=need.rank,
                piece=number,
                low=low,
                high=high,
                row_bytes=want.row_bytes,
                holders=holders,
            )


def _require_once(want: Placed, need: Held) -> None:
    other = [
        h for h in want.held if h.rank == need.rank and h.low < need.high and need.low < h.high
    ]
    if len(other) > 1 or not 0 <= need.low <= need.high <= want.rows:
        raise RunError(
            f"weights: rank {need.rank} is to get rows {need.low} to {need.high} of {want.name!r},"
            f" which has {want.rows}, and others that overlap with them. Fix: a layout that gives a"
            " rank each row once."
        )


def _cut(atom: _Atom, quantum: int) -> list[_Atom]:
    """Parts of at most `quantum` bytes, where there is a choice of holders; a row is never cut."""
    if len(atom.holders) == 1 or atom.nbytes <= quantum:
        return [atom]
    rows = max(1, quantum // atom.row_bytes)
    starts = range(atom.low, atom.high, rows)
    return [replace(atom, low=low, high=min(low + rows, atom.high)) for low in starts]


def _assigned(atoms: list[_Atom], distance: Distance) -> list[Move]:
    """A holder for each atom: those without a choice first, then the greatest first."""
    load: dict[int, int] = defaultdict(int)
    moves = []
    for atom in sorted(
        atoms, key=lambda a: (len(a.holders), -a.nbytes, a.piece, a.low, a.destination)
    ):
        chosen = min(atom.holders, key=lambda s: (distance(s, atom.destination), load[s], s))
        load[chosen] += atom.nbytes
        moves.append(
            Move(
                source=chosen,
                destination=atom.destination,
                piece=atom.piece,
                low=atom.low,
                high=atom.high,
            )
        )
    return moves


def _coalesced(moves: list[Move]) -> list[Move]:
    """Adjacent rows of one piece and pair as one move."""
    found: list[Move] = []
    for move in sorted(moves, key=lambda m: (m.source, m.destination, m.piece, m.low)):
        before = found[-1] if found else None
        if (
            before is not None
            and replace(before, low=move.low, high=move.high) == move
            and before.high == move.low
        ):
            found[-1] = replace(before, high=move.high)
        else:
            found.append(move)
    return found
