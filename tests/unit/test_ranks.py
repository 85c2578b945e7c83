"""Rank groups: an assignment becomes one per rank, and all begin together or none does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.kernel import Layout
from engine.coordinator import messages as m
from engine.coordinator.outstanding import Outstanding
from engine.coordinator.ranks import RankGroups
from engine.coordinator.refs import Gather, Ref
from engine.coordinator.tables import shares
from engine.launch.wire import encode
from engine.plan.plan import Fetch, Plan, PlannedInput, PlannedModel, PlannedNode

BLOCKS = 3


class GroupsByHand(RankGroups):
    """Rank groups, with what the coordinator does before it calls them."""

    def __init__(self, plan: Plan) -> None:
        self.outstanding = Outstanding()
        super().__init__(plan, self.outstanding)

    def told(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        instructions = list(instructions)
        for each in instructions:
            if isinstance(each, m.Task):
                self.outstanding.ask(each)
        return super().told(instructions)

    def answers(self, event: m.Event) -> tuple[list[m.Event], list[m.Instruction]]:
        return self.heard(event, self.outstanding.heard(event))


def ranks(world: int = 2, tensor: int = 1) -> GroupsByHand:
    """`learn` on `world` ranks, each `tensor` with the same rows, reads rollout; `lone` has 1."""
    fetches = (Fetch(producer="rollout", columns=("x",)),)
    rows = PlannedInput(name="rows", gate="rollout", fetches=fetches)
    fields: dict[str, Any] = {
        "operator": "train",
        "work": "train",
        "scope": "batch",
        "region": "step",
        "relation": "sink",
    }
    workers = tuple(f"t{rank}" for rank in range(world))
    learn = PlannedNode(
        name="learn",
        inputs=(rows,),
        workers=workers,
        layout=Layout(data=world // tensor, tensor=tensor),
        **fields,
    )
    lone = PlannedNode(name="lone", inputs=(rows,), workers=("t0",), **fields)
    models = (
        PlannedModel(name="m", base="b", writer="learn"),
        PlannedModel(name="n", base="b", writer="lone"),
    )
    nodes = (learn, lone)
    return GroupsByHand(Plan(graph="g", digest="", seed=0, nodes=nodes, sources=(), models=models))


def assignment(
    lengths: list[int], n: int = 1, id: int = 0, node: str = "learn"
) -> tuple[m.TrainStep, list[Ref]]:
    """Prompts of n rows each, row i of length lengths[i], dealt over blocks, and these."""
    keys = Keys.of(range(len(lengths) // n)).expand(n)
    block = np.arange(len(keys), dtype=np.int32) % BLOCKS
    row = (np.arange(len(keys)) // BLOCKS).astype(np.int32)
    held = [np.flatnonzero(block == b) for b in range(BLOCKS) if (block == b).any()]
    refs = [
        Ref(
            worker="gen",
            block=10 + b,
            keys=keys.take(rows),
            lengths=np.array(lengths)[rows],
            version=rows * 0,
        )
        for b, rows in enumerate(held)
    ]
    gather = Gather(
        producer="rollout",
        columns=("x",),
        refs=tuple((r.worker, r.block) for r in refs),
        block=block,
        row=row,
    )
    inputs = {"rows": (gather,)}
    return (m.TrainStep(id=id, node=node, worker="t0", step=1, keys=keys, inputs=inputs), refs)


def shares_of(groups: GroupsByHand, message: m.TrainStep, refs: list[Ref]) -> list[m.TrainStep]:
    for ref in refs:
        produced = m.Produced(id=0, node="rollout", ref=ref)
        assert groups.answers(produced) == ([produced], [])
    out = groups.told([message])
    assert all(isinstance(each, m.TrainStep) for each in out)
    return [each for each in out if isinstance(each, m.TrainStep)]


def keys_of(ref_of: dict[tuple[str, int], Ref], gather: Gather) -> list[tuple[int, int, int]]:
    return [
        ref_of[gather.refs[b]].keys.rows()[r] for b, r in zip(gather.block, gather.row, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    n=st.integers(1, 3),
    world=st.integers(2, 4),
)
def test_each_row_is_with_one_rank_prompts_whole_tokens_even(
    lengths: list[int], n: int, world: int
) -> None:
    message, refs = assignment([length for length in lengths for _ in range(n)], n)
    shares = shares_of(ranks(world), message, refs)
    ref_of = {(r.worker, r.block): r for r in refs}
    assert [each.worker for each in shares] == [f"t{rank}" for rank in range(world)]
    every = np.concatenate([each.mine for each in shares if each.mine is not None])
    assert np.array_equal(np.sort(every), np.arange(len(message.keys)))
    prompts: list[set[int]] = []
    for each in shares:
        assert each.mine is not None
        assert (np.diff(each.mine) > 0).all()
        assert (each.id, each.step, each.total) == (message.id, message.step, len(message.keys))
        assert each.keys.rows() == message.keys.take(each.mine).rows()
        [gather] = each.inputs["rows"]
        assert keys_of(ref_of, gather) == message.keys.take(each.mine).rows()
        assert sorted(set(gather.block.tolist())) == list(range(len(gather.refs)))
        prompts.append(set(message.keys.position[each.mine].tolist()))
    assert sum(map(len, prompts)) == len(lengths)
    weights = [sum(n * (lengths[p] + 1) for p in some) for some in prompts]
    assert max(weights) - min(weights) <= n * (max(lengths) + 1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    data=st.integers(1, 3),
    tensor=st.integers(2, 3),
)
def test_the_first_rank_of_a_share_fetches_its_rows_and_gives_them(
    lengths: list[int], data: int, tensor: int
) -> None:
    message, refs = assignment(lengths)
    by_share = shares_of(ranks(data), *assignment(lengths)) if data > 1 else [message]
    shares = shares_of(ranks(data * tensor, tensor), message, refs)
    assert [each.worker for each in shares] == [f"t{rank}" for rank in range(data * tensor)]
    for rank, each in enumerate(shares):
        share, part = divmod(rank, tensor)
        wanted = by_share[share]
        assert each.giver == f"t{share * tensor}"
        assert each.mine is not None
        assert each.mine.tolist() == (
            list(range(len(lengths))) if wanted.mine is None else wanted.mine.tolist()
        )
        assert each.inputs.keys() == wanted.inputs.keys()
        (given,) = each.inputs["rows"] if part == 0 else (None,)
        assert part == 0 or each.inputs["rows"] == ()
        if given is not None:
            (own,) = wanted.inputs["rows"]
            assert (given.refs, given.row.tolist()) == (own.refs, own.row.tolist())


def grpo_step(prompts: int, n: int, together: int) -> tuple[m.TrainStep, list[Ref]]:
    """An assignment with the inputs of GRPO, and blocks of so many rows from 512 Workers."""
    keys = Keys.of(range(1_000_000, 1_000_000 + prompts)).expand(n)
    lengths = np.random.default_rng(0).lognormal(6, 1, len(keys)).astype(np.int64)
    refs = [
        Ref(
            worker=f"rollout-{number * 37 % 512}",
            block=number * 7919 % 1_000_003,
            keys=keys.take(rows := np.arange(number * together, (number + 1) * together)),
            lengths=lengths[rows],
            version=np.zeros(together, dtype=np.int32),
        )
        for number in range(len(keys) // together)
    ]
    gather = Gather(
        producer="rollout",
        columns=("prompt_ids", "completion_ids", "completion_mask", "sampler_logprobs", "version"),
        refs=tuple((r.worker, r.block) for r in refs),
        block=np.repeat(np.arange(len(refs), dtype=np.int32), together),
        row=np.tile(np.arange(together, dtype=np.int32), len(refs)),
    )
    own = replace(gather, producer="advantage", columns=("advantage",))
    inputs = {"rows": (gather,), "clipped_policy_loss.advantage": (own,)}
    told = m.TrainStep(id=12345, node="learn", worker="t0", step=500, keys=keys, inputs=inputs)
    return told, refs


@pytest.mark.parametrize(
    ("world", "prompts", "n", "together"),
    [(1024, 4096, 16, 16), (1024, 4096, 16, 1), (64, 512, 16, 1), (16, 64, 8, 8), (2, 8, 1, 1)],
)
def test_what_one_rank_is_told_has_at_most_40_bytes_a_row_of_its_share(
    world: int, prompts: int, n: int, together: int
) -> None:
    message, refs = grpo_step(prompts, n, together)
    groups = ranks(world)
    groups.kept(refs)
    groups.outstanding.ask(message)
    rows = 0
    for each in groups.told([message]):
        assert isinstance(each, m.TrainStep)
        assert len(encode(each)) <= 256 + 40 * len(each.keys)
        rows += len(each.keys)
    assert rows == len(message.keys)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world=st.integers(2, 4))
def test_shares_are_those_of_a_pass_for_each_block_and_share(
    data: st.DataObject, world: int
) -> None:
    """Rows in any blocks, of which nobody may have weighed some."""
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=15))
    message, refs = assignment(lengths)
    weighed = [ref for ref in refs if data.draw(st.booleans())]
    tokens = np.zeros(len(lengths), dtype=np.int64)
    (gather,) = message.inputs["rows"]
    for ref in weighed:
        mine = gather.block == gather.refs.index((ref.worker, ref.block))
        tokens[mine] = ref.lengths[gather.row[mine]]
    wanted = shares(message.keys.position, tokens, world)
    for share, each in enumerate(shares_of(ranks(world), message, weighed)):
        rows = np.flatnonzero(wanted == share)
        assert each.mine is not None
        assert np.array_equal(each.mine, rows)
        (own,) = each.inputs["rows"]
        assert [(own.refs[b], r) for b, r in zip(own.block, own.row, strict=True)] == [
            (gather.refs[b], r) for b, r in zip(gather.block[rows], gather.row[rows], strict=True)
        ]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_block_is_released_with_the_last_that_may_fetch_it(data: st.DataObject) -> None:
    """Any assignments, answers and releases; the naive rule looks at all fetches each time."""
    groups, fetching = ranks(3), dict[tuple[int, str], set[tuple[str, int]]]()
    kept = {("gen", 10 + block) for block in range(BLOCKS)}
    released = set[tuple[str, int]]()
    freed = set[tuple[str, int]]()
    for id in range(data.draw(st.integers(1, 3))):
        message, refs = assignment([5] * data.draw(st.integers(1, 7)), id=id)
        if kept - freed >= {(ref.worker, ref.block) for ref in refs}:
            for each in shares_of(groups, message, refs):
                gathers = each.inputs["rows"]
                fetching[id, each.worker] = {ref for gather in gathers for ref in gather.refs}
        for _ in range(data.draw(st.integers(0, 4))):
            said: list[m.Instruction] = []
            if fetching and data.draw(st.booleans()):
                task, worker = data.draw(st.sampled_from(sorted(fetching)))
                del fetching[task, worker]
                gone = m.FetchFailed(id=task, worker=worker, peer="gen2")
                said = groups.answers(gone)[1]
            elif left := sorted(kept - freed):
                block = data.draw(st.sampled_from(left))
                freed.add(block)
                said = groups.told([m.Release(worker=block[0], blocks=(block[1],))])
            awaited = set[tuple[str, int]]().union(*fetching.values())
            now = {(r.worker, b) for r in said if isinstance(r, m.Release) for b in r.blocks}
            assert not now & released
            released |= now
            assert released == freed - awaited


def test_ranks_that_are_given_rows_hold_no_block_back_and_begin_with_all() -> None:
    groups = ranks(4, tensor=2)
    first, second, third, fourth = shares_of(groups, *assignment([5] * 6))
    assert {second.giver, fourth.giver} == {first.worker, third.worker}
    for worker in ("t1", "t3", "t2"):
        assert groups.answers(m.Prepared(node="learn", worker=worker, id=0)) == ([], [])
    _, begun = groups.answers(m.Prepared(node="learn", worker="t0", id=0))
    assert begun == [m.Go(node="learn", worker=f"t{rank}", id=0) for rank in range(4)]
    first, *_ = shares_of(groups, *assignment([5] * 6, id=1))
    gone = m.FetchFailed(worker="t2", peer="gen", id=1)
    assert groups.answers(gone) == ([gone], [])
    awaited = tuple(block for _, block in first.inputs["rows"][0].refs)
    left = tuple(block for block in (10, 11, 12) if block not in awaited)
    assert groups.told([m.Release(worker="gen", blocks=(10, 11, 12))]) == (
        [m.Release(worker="gen", blocks=left)] if left else []
    )
    _, free = groups.answers(m.Prepared(node="learn", worker="t0", id=1))
    assert free == [m.Release(worker="gen", blocks=(block,)) for block in awaited], (
        "t1 and t3 fetch nothing"
    )


def test_all_begin_when_the_last_one_is_prepared_and_the_core_hears_of_one_end() -> None:
    groups = ranks(3)
    shares_of(groups, *assignment([5] * 6))
    begun: list[m.Instruction] = []
    for worker in ("t2", "t0", "t0"):
        assert groups.answers(m.Prepared(node="learn", worker=worker, id=0)) == ([], [])
    assert groups.waiting() == ["learn: ranks t1 have not fetched their rows yet"]
    _, begun = groups.answers(m.Prepared(node="learn", worker="t1", id=0))
    assert begun == [m.Go(node="learn", worker=f"t{rank}", id=0) for rank in range(3)]
    heard: list[m.Event] = []
    for worker in ("t1", "t1", "t2", "t0"):
        assert heard == []
        heard, none = groups.answers(m.Stepped(id=0, node="learn", step=1, worker=worker))
        assert none == []
    assert heard == [m.Stepped(id=0, node="learn", step=1, worker="t0")]
    assert groups.waiting() == []


def test_no_rank_begins_where_one_cannot_fetch_and_the_next_assignment_starts_afresh() -> None:
    groups = ranks(2)
    message, refs = assignment([5] * 6)
    shares_of(groups, message, refs)
    gone = m.FetchFailed(worker="t1", peer="gen", id=0)
    assert groups.answers(gone) == ([gone], [])
    assert groups.answers(gone) == ([], [])
    assert groups.answers(m.Prepared(node="learn", worker="t0", id=0)) == ([], [])
    assert groups.answers(m.Prepared(node="learn", worker="t1", id=0)) == ([], [])
    shares_of(groups, assignment([5] * 6, id=1)[0], refs)
    assert groups.answers(m.Prepared(node="learn", worker="t0", id=0)) == ([], [])  # late
    assert groups.answers(m.Prepared(node="learn", worker="t1", id=1)) == ([], [])
    assert len(groups.answers(m.Prepared(node="learn", worker="t0", id=1))[1]) == 2


@pytest.mark.parametrize("last", ["prepared", "unfetched"])
def test_blocks_of_a_dropped_assignment_are_released_when_ranks_have_answered(last: str) -> None:
    groups = ranks(3)
    shares = shares_of(groups, *assignment([5, 5, 5]))
    (mine,) = shares[2].inputs["rows"][0].refs
    gone = m.FetchFailed(worker="t0", peer="gen2", id=0)
    assert groups.answers(gone) == ([gone], [])
    assert groups.answers(m.Prepared(node="learn", worker="t1", id=0)) == ([], [])
    others = tuple(block for block in (10, 11, 12) if block != mine[1])
    expected = [m.Release(worker="gen", blocks=others)]
    assert groups.told([m.Release(worker="gen", blocks=(10, 11, 12))]) == expected
    shares_of(groups, *assignment([5, 5, 5], id=1))
    kinds: dict[str, m.Event] = {
        "prepared": m.Prepared(node="learn", worker="t2", id=0),
        "unfetched": m.FetchFailed(worker="t2", peer="gen2", id=0),
    }
    assert groups.answers(kinds[last]) == ([], [])  # the same blocks are read once more
    answers = [
        groups.answers(m.Prepared(node="learn", worker=worker, id=1))[1]
        for worker in ("t0", "t1", "t2")
    ]
    assert answers[:2] == [[], []]
    assert answers[2][0] == m.Release(worker="gen", blocks=(mine[1],))


def test_a_block_that_waits_for_a_rank_s_answer_is_not_released_once_it_is_lost() -> None:
    groups = ranks(2)
    shares = shares_of(groups, *assignment([5, 5, 5]))
    gone = m.FetchFailed(worker="t0", peer="gen", id=0)
    assert groups.answers(gone) == ([gone], [])
    blocks = tuple(block for _, block in shares[1].inputs["rows"][0].refs)
    assert groups.told([m.Release(worker="gen", blocks=blocks)]) == []
    groups.answers(m.WorkerLost(worker="gen", epoch=0, error="killed"))
    assert groups.answers(replace(gone, worker="t1")) == ([], [])


def test_every_rank_is_asked_for_the_weights_and_the_first_one_s_count() -> None:
    groups = ranks(2)
    for task in (7, 8):
        offer = m.Offer(id=task, model="m", writer="learn", worker="t0", version=4)
        offers = groups.told([offer])
        assert [each.worker for each in offers if isinstance(each, m.Offer)] == ["t0", "t1"]
    first, second, none = (
        m.Offered(id=task, worker=worker, block=block, digest="d")
        for task, worker, block in ((7, "t0", 3), (7, "t1", 8), (8, "t1", -1))
    )
    assert groups.answers(first) == ([first], [])
    assert groups.answers(second) == ([], [m.Release(worker="t1", blocks=(8,))])
    assert groups.answers(none) == ([], [])


def test_nodes_of_one_rank_and_plans_without_a_group_pass_as_they_are() -> None:
    groups = ranks(2)
    message, _ = assignment([1, 2], node="lone")
    others = [
        message,
        m.Offer(id=7, model="n", writer="lone", worker="t0", version=1),
        m.Load(id=8, model="m", writer="learn", reader="r", version=1, worker="gen"),
    ]
    assert groups.told(others) == others
    stepped = m.Stepped(id=0, node="lone", step=1, worker="t0")
    assert groups.answers(stepped) == ([stepped], [])
    alone = ranks(1)
    message, _ = assignment([1, 2])
    assert alone.told([message]) == [message]


@pytest.mark.parametrize("how", ["released", "lost"])
def test_lengths_are_forgotten_with_their_blocks(how: str) -> None:
    groups = ranks(2)
    shares_of(groups, *assignment([5] * 6))
    assert len(groups._lengths) == BLOCKS
    if how == "released":
        groups.told(
            [m.Release(worker="gen", blocks=(10, 11)), m.Release(worker="gen", blocks=(12,))]
        )
    else:
        groups.answers(m.WorkerLost(worker="gen", epoch=0, error="killed"))
    assert not groups._lengths
