"""Plans of weight transfers: every byte that is needed moves once, from who has it, in balance."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import RunError
from engine.weights.transfer import Held, Move, Placed, copies, pairs_of, shards, transfer_plan

SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (16, 3), (5, 2, 2), (0, 4), (33, 1)]), max_size=6
)


def placed(
    shapes: list[tuple[int, ...]], ranks: int, sharded: bool, item: int = 4
) -> tuple[Placed, ...]:
    deal = shards if sharded else copies
    return tuple(
        Placed(name=f"p{i}", dtype="float32", shape=shape, item=item, held=deal(shape, ranks))
        for i, shape in enumerate(shapes)
    )


def sent(moves: tuple[Move, ...], layout: tuple[Placed, ...]) -> dict[int, int]:
    """Bytes by sender."""
    found: dict[int, int] = defaultdict(int)
    for move in moves:
        found[move.source] += (move.high - move.low) * layout[move.piece].row_bytes
    return found


def needed(layout: tuple[Placed, ...]) -> int:
    return sum((h.high - h.low) * piece.row_bytes for piece in layout for h in piece.held)


@given(SHAPES, st.integers(1, 5), st.booleans(), st.integers(1, 5), st.booleans())
def test_every_row_comes_once_from_a_rank_that_has_it(
    shapes: list[tuple[int, ...]], writers: int, split: bool, readers: int, wanted_split: bool
) -> None:
    source, destination = placed(shapes, writers, split), placed(shapes, readers, wanted_split)
    moves = transfer_plan(source, destination)
    got: dict[tuple[int, int], list[int]] = defaultdict(list)
    for move in moves:
        assert any(
            h.rank == move.source and h.low <= move.low and move.high <= h.high
            for h in source[move.piece].held
        )
        got[move.destination, move.piece] += range(move.low, move.high)
    for number, piece in enumerate(destination):
        for held in piece.held:
            assert sorted(got.pop((held.rank, number), [])) == list(range(held.low, held.high))
    assert not got
    assert sum(sent(moves, source).values()) == needed(destination)
    assert transfer_plan(source, destination) == moves


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 20), st.booleans())
def test_no_holder_sends_much_more_than_the_mean(
    writers: int, readers: int, pieces: int, split: bool
) -> None:
    shapes = [(600, 4)] * pieces
    source = placed(shapes, writers, False)
    load = sent(transfer_plan(source, placed(shapes, readers, split)), source)
    assert max(load.values()) <= 1.2 * sum(load.values()) / writers
    sharded = placed(shapes, writers, True)
    load = sent(transfer_plan(sharded, placed(shapes, readers, split)), sharded)
    assert max(load.values()) <= 1.2 * sum(load.values()) / writers


def test_one_great_piece_is_shared_by_its_holders() -> None:
    source = placed([(4, 4), (100_000, 8), (4,)], 4, False)
    load = sent(transfer_plan(source, placed([(4, 4), (100_000, 8), (4,)], 1, False)), source)
    assert len(load) == 4
    assert max(load.values()) <= 1.2 * sum(load.values()) / 4


@given(SHAPES, st.integers(1, 5), st.booleans(), st.integers(1, 5), st.booleans())
def test_in_a_round_nobody_sends_or_receives_twice(
    shapes: list[tuple[int, ...]], writers: int, split: bool, readers: int, wanted_split: bool
) -> None:
    moves = transfer_plan(placed(shapes, writers, split), placed(shapes, readers, wanted_split))
    around = max(1, 1 + max((max(m.source, m.destination) for m in moves), default=0))
    rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs_of(moves):
        rounds[(pair[1] - pair[0]) % around].append(pair)
    assert list(rounds) == sorted(rounds)
    for pairs in rounds.values():
        assert len({s for s, _ in pairs}) == len(pairs) == len({d for _, d in pairs})


@given(SHAPES, st.integers(1, 4), st.integers(1, 4))
def test_blocking_messages_in_this_order_end(
    shapes: list[tuple[int, ...]], writers: int, readers: int
) -> None:
    """Every rank goes through its pairs in order, and one moves only when both ends are at it."""
    pairs = list(
        pairs_of(transfer_plan(placed(shapes, writers, True), placed(shapes, readers, True)))
    )
    senders = {s: [p for p in pairs if p[0] == s] for s in range(writers)}
    receivers = {d: [p for p in pairs if p[1] == d] for d in range(readers)}
    left = len(pairs)
    while left:
        ready = [q[0] for q in senders.values() if q and receivers[q[0][1]][0] == q[0]]
        assert ready, "everybody waits"
        for pair in ready:
            senders[pair[0]].pop(0)
            receivers[pair[1]].pop(0)
        left -= len(ready)


def test_adjacent_rows_of_a_pair_are_one_move() -> None:
    shapes = [(12, 2), (8,)]
    assert len(transfer_plan(placed(shapes, 1, False), placed(shapes, 1, False))) == 2
    same = transfer_plan(placed(shapes, 4, True), placed(shapes, 4, True))
    assert [(m.source, m.destination) for m in same] == [(r, r) for r in range(4) for _ in shapes]


def test_the_nearest_holder_sends() -> None:
    shapes = [(64, 4)] * 3
    far = transfer_plan(
        placed(shapes, 2, False), placed(shapes, 2, False), distance=lambda s, d: int(s == d)
    )
    assert {(m.source, m.destination) for m in far} == {(0, 1), (1, 0)}


def test_shards_are_those_of_torch_chunk() -> None:
    assert shards((10, 3), 4) == (Held(0, 0, 3), Held(1, 3, 6), Held(2, 6, 9), Held(3, 9, 10))
    assert shards((2,), 4) == (Held(0, 0, 1), Held(1, 1, 2))
    assert shards((), 2) == (Held(0, 0, 1),)
    assert shards((0, 3), 2) == ()


def test_layouts_that_do_not_go_together_are_named() -> None:
    one = placed([(4,), (6, 2)], 2, False)
    with pytest.raises(RunError, match=r"'p1' \(float32 \[6, 2\]\).*'p1' \(float32 \[6, 3\]\)"):
        transfer_plan(one, (one[0], replace(one[1], shape=(6, 3))))
    with pytest.raises(RunError, match="2 pieces, the reader expects 1; 'p1'"):
        transfer_plan(one, one[:1])
    with pytest.raises(RunError, match="rows 2 to 4 of 'p0', and no rank"):
        transfer_plan((replace(one[0], held=(Held(0, 0, 2),)), one[1]), one)
    with pytest.raises(RunError, match=r"'p0'.*overlap"):
        transfer_plan(one, (replace(one[0], held=(Held(0, 0, 3), Held(0, 2, 4))), one[1]))
    with pytest.raises(RunError, match="rows 2 to 9 of 'p0'"):
        transfer_plan(one, (replace(one[0], held=(Held(0, 2, 9),)), one[1]))
