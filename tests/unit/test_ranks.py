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
from engine.coordinator.ranks import RankGroups
from engine.coordinator.tables import shares
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedModel
from engine.protocol import messages as m
from engine.protocol.refs import Gather, Ref
from tests.kit.plans import plan_of, planned_input, planned_node
from tests.kit.plans import ref as ref_of
from tests.kit.turns import example_count

BLOCKS = 3
LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=12)


class GroupsByHand(RankGroups):
    """Rank groups, with what the coordinator does before it calls them."""

    def __init__(self, plan: Plan) -> None:
        self.outstanding = Outstanding()
        super().__init__(plan, self.outstanding)

    def split_by_rank(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        instructions = list(instructions)
        for each in instructions:
            if isinstance(each, m.Task):
                self.outstanding.ask(each)
        return super().split_by_rank(instructions)

    def answers(self, event: m.Event) -> tuple[list[m.Event], list[m.Instruction]]:
        return self.merge_answers(event, self.outstanding.note_answer(event))

    def prepared(self, *workers: str, id: int = 0) -> list[m.Instruction]:
        """These have fetched their rows, of which the core hears nothing."""
        told: list[m.Instruction] = []
        for worker in workers:
            heard, more = self.answers(m.Prepared(node="learn", worker=worker, id=id))
            assert heard == []
            told += more
        return told

    def released(self, *blocks: int) -> list[int]:
        """The core needs these no more: those that are released at once."""
        return blocks_in(self.split_by_rank([m.Release(worker="gen", blocks=blocks)]))


def blocks_in(told: Iterable[m.Instruction]) -> list[int]:
    """What is released, in order."""
    return [block for each in told if isinstance(each, m.Release) for block in each.blocks]


def blocks_of(share: m.TrainStep) -> list[int]:
    """The blocks that a rank fetches."""
    return [block for gather in share.inputs["rows"] for _, block in gather.refs]


def ranks(world: int = 2, tensor: int = 1, hosts: str = "", *, shard: bool = False) -> GroupsByHand:
    """`learn` on `world` ranks, each `tensor` with the same rows, reads rollout; `lone` has 1.
    hosts: a letter for each rank.
    """
    rows = planned_input("rollout", "rollout", name="rows")
    trains = {"work": "train", "region": "step", "relation": "sink"}
    workers = tuple(f"t{rank}" for rank in range(world))
    layout = Layout(data=world // tensor, tensor=tensor, shard=shard)
    learn = planned_node("learn", rows, workers=workers, layout=layout, **trains)
    lone = planned_node("lone", rows, workers=("t0",), **trains)
    models = (
        PlannedModel(name="m", base="b", writer="learn"),
        PlannedModel(name="n", base="b", writer="lone"),
    )
    host_of = dict(zip(workers, hosts, strict=False))
    return GroupsByHand(plan_of(learn, lone, models=models, hosts=host_of))


def assignment(
    lengths: list[int], n: int = 1, id: int = 0, node: str = "learn"
) -> tuple[m.TrainStep, list[Ref]]:
    """Prompts of n rows each, row i of length lengths[i], dealt over blocks, and these."""
    keys = Keys.of(range(len(lengths) // n)).expand(n)
    block = np.arange(len(keys), dtype=np.int32) % BLOCKS
    refs: list[Ref] = []
    for number in range(min(BLOCKS, len(keys))):
        rows = np.flatnonzero(block == number)
        whole = ref_of(keys.take(rows), 10 + number, worker="gen")
        refs.append(replace(whole, lengths=np.array(lengths)[rows]))
    gather = Gather(
        producer="rollout",
        columns=("x",),
        refs=tuple((r.worker, r.block) for r in refs),
        block=block,
        row=(np.arange(len(keys)) // BLOCKS).astype(np.int32),
    )
    inputs = {"rows": (gather,)}
    return (m.TrainStep(id=id, node=node, worker="t0", step=1, keys=keys, inputs=inputs), refs)


def shares_of(groups: GroupsByHand, message: m.TrainStep, refs: list[Ref]) -> list[m.TrainStep]:
    for ref in refs:
        produced = m.Produced(id=0, node="rollout", ref=ref)
        assert groups.answers(produced) == ([produced], [])
    out = groups.split_by_rank([message])
    assert all(isinstance(each, m.TrainStep) for each in out)
    return [each for each in out if isinstance(each, m.TrainStep)]


def places(gather: Gather) -> list[tuple[tuple[str, int], int]]:
    """Where each row lies: its block, and its row there."""
    refs = [gather.refs[number] for number in gather.block]
    return list(zip(refs, gather.row.tolist(), strict=True))


@given(lengths=LENGTHS, n=st.integers(1, 3), world=st.integers(2, 4))
def test_a_share_has_whole_prompts_and_about_as_many_tokens_as_the_others(
    lengths: list[int], n: int, world: int
) -> None:
    position = np.repeat(np.arange(len(lengths)), n)
    share = shares(position, np.repeat(lengths, n), world)
    tokens = [0] * world
    for prompt, length in enumerate(lengths):
        (only,) = set(share[position == prompt].tolist())
        tokens[only] += n * (length + 1)
    assert max(tokens) - min(tokens) <= n * (max(lengths) + 1)


@settings(max_examples=example_count(100), deadline=None)
@given(
    data=st.data(),
    lengths=LENGTHS,
    n=st.integers(1, 3),
    layout=st.sampled_from([(2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (3, 2)]),
)
def test_a_rank_is_told_the_rows_of_its_share_which_the_first_of_these_fetches_and_gives(
    data: st.DataObject, lengths: list[int], n: int, layout: tuple[int, int]
) -> None:
    """Rows in any blocks, of which nobody may have weighed some."""
    count, tensor = layout
    message, refs = assignment(np.repeat(lengths, n).tolist(), n)
    weighed = [ref for ref in refs if data.draw(st.booleans())]
    (whole,) = message.inputs["rows"]
    tokens = np.zeros(len(message.keys), dtype=np.int64)
    for ref in weighed:
        tokens[whole.block == ref.block - 10] = ref.lengths
    expected = shares(message.keys.position, tokens, count)
    for rank, each in enumerate(shares_of(ranks(count * tensor, tensor), message, weighed)):
        share, part = divmod(rank, tensor)
        mine = np.flatnonzero(expected == share)
        assert each.mine.tolist() == mine.tolist()
        assert (each.worker, each.id, each.step) == (f"t{rank}", message.id, message.step)
        assert each.total == len(message.keys)
        assert each.keys.rows() == message.keys.take(mine).rows()
        assert each.giver == (f"t{rank - part}" if tensor > 1 else "")
        assert len(each.inputs["rows"]) == (part == 0)
        for gather in each.inputs["rows"]:
            assert places(gather) == [places(whole)[row] for row in mine]
            assert set(gather.block.tolist()) == set(range(len(gather.refs)))


@settings(max_examples=example_count(100), deadline=None)
@given(data=st.data())
def test_a_block_is_released_with_the_last_that_may_fetch_it(data: st.DataObject) -> None:
    """Any assignments, answers and releases; the naive rule looks at all fetches each time."""
    groups, fetching = ranks(3), {}
    kept = {10 + block for block in range(BLOCKS)}
    released, freed = set(), set()
    for id in range(data.draw(st.integers(1, 3))):
        message, refs = assignment([5] * data.draw(st.integers(1, 7)), id=id)
        if freed.isdisjoint(ref.block for ref in refs):
            for each in shares_of(groups, message, refs):
                fetching[id, each.worker] = set(blocks_of(each))
        for _ in range(data.draw(st.integers(0, 4))):
            now: list[int] = []
            if fetching and data.draw(st.booleans()):
                task, worker = data.draw(st.sampled_from(sorted(fetching)))
                del fetching[task, worker]
                if data.draw(st.booleans()):
                    answer = m.Prepared(node="learn", id=task, worker=worker)
                else:
                    answer = m.FetchFailed(id=task, worker=worker, peer="gen2")
                now = blocks_in(groups.answers(answer)[1])
            elif left := sorted(kept - freed):
                block = data.draw(st.sampled_from(left))
                freed.add(block)
                now = groups.released(block)
            assert released.isdisjoint(now)
            released |= set(now)
            assert released == freed - set().union(*fetching.values())


def test_ranks_that_are_given_rows_hold_no_block_back_and_begin_with_all() -> None:
    groups = ranks(4, tensor=2)
    shares_of(groups, *assignment([5] * 6))
    assert groups.prepared("t1", "t3", "t2") == []
    begun = groups.prepared("t0")
    assert begun == [m.Go(node="learn", worker=f"t{rank}", id=0) for rank in range(4)]
    first, *_ = shares_of(groups, *assignment([5] * 6, id=1))
    groups.answers(m.FetchFailed(worker="t2", peer="gen", id=1))
    awaited = blocks_of(first)
    assert not set(groups.released(10, 11, 12)) & set(awaited)
    assert blocks_in(groups.prepared("t0", id=1)) == awaited, "t1 and t3 fetch nothing"


def test_all_begin_when_the_last_one_is_prepared_and_the_core_hears_of_one_end() -> None:
    groups = ranks(3)
    shares_of(groups, *assignment([5] * 6))
    assert groups.prepared("t2", "t0", "t0") == []
    assert groups.waiting() == ["learn: ranks t1 have not fetched their rows yet"]
    begun = groups.prepared("t1")
    assert begun == [m.Go(node="learn", worker=f"t{rank}", id=0) for rank in range(3)]
    stepped = m.Stepped(id=0, node="learn", step=1, worker="t0")
    for worker in ("t1", "t1", "t2"):
        assert groups.answers(replace(stepped, worker=worker)) == ([], [])
    assert groups.answers(stepped) == ([stepped], [])
    assert groups.waiting() == []


def test_no_rank_begins_where_one_cannot_fetch_and_the_next_assignment_starts_afresh() -> None:
    groups = ranks()
    message, refs = assignment([5] * 6)
    shares_of(groups, message, refs)
    gone = m.FetchFailed(worker="t1", peer="gen", id=0)
    assert groups.answers(gone) == ([gone], [])
    assert groups.answers(gone) == ([], [])
    assert groups.prepared("t0", "t1") == []
    shares_of(groups, assignment([5] * 6, id=1)[0], refs)
    assert groups.prepared("t0") == []  # late
    assert groups.prepared("t1", id=1) == []
    assert len(groups.prepared("t0", id=1)) == 2


def test_a_block_that_waits_for_a_rank_s_answer_is_not_released_once_it_is_lost() -> None:
    groups = ranks()
    shares = shares_of(groups, *assignment([5, 5, 5]))
    gone = m.FetchFailed(worker="t0", peer="gen", id=0)
    groups.answers(gone)
    assert groups.released(*blocks_of(shares[1])) == []
    groups.answers(m.WorkerLost(worker="gen", epoch=0, error="killed"))
    assert groups.answers(replace(gone, worker="t1")) == ([], [])


def test_every_rank_is_asked_for_the_weights_and_the_first_one_s_count() -> None:
    groups = ranks()
    for task in (7, 8):
        offer = m.Offer(id=task, model="m", writer="learn", worker="t0", version=4)
        assert groups.split_by_rank([offer]) == [offer, replace(offer, worker="t1")]
    first = m.Offered(id=7, worker="t0", block=3, digest="d")
    assert groups.answers(first) == ([first], [])
    assert groups.answers(replace(first, id=8, worker="t1", block=-1)) == ([], [])


@pytest.mark.parametrize(("shape", "keepers"), [
    ({"hosts": "aabb"}, ["t2"]),
    ({"hosts": "abca"}, ["t1", "t2"]),
    ({"hosts": "aaaa"}, []),
    ({"hosts": "aabb", "shard": True}, []),
    ({"hosts": "aabb", "tensor": 2}, []),
])  # fmt: skip
def test_on_each_further_host_a_rank_with_all_weights_keeps_them(
    shape: dict[str, Any], keepers: list[str]
) -> None:
    groups = ranks(4, **shape)
    offer = m.Offer(id=7, model="m", writer="learn", worker="t0", version=4)
    told = groups.split_by_rank([offer])
    assert [each.worker for each in told if isinstance(each, m.Offer) and each.keeps] == keepers
    for keeper in keepers:
        event = m.Offered(id=7, worker=keeper, block=8, digest="d")
        assert groups.answers(event) == ([event], []), "the core may have readers load from it"


def test_nodes_of_one_rank_and_plans_without_a_group_pass_as_they_are() -> None:
    groups = ranks()
    others = [
        assignment([1, 2], node="lone")[0],
        m.Offer(id=7, model="n", writer="lone", worker="t0", version=1),
        m.Load(id=8, model="m", writer="learn", reader="r", version=1, worker="gen"),
    ]
    assert groups.split_by_rank(others) == others
    stepped = m.Stepped(id=0, node="lone", step=1, worker="t0")
    assert groups.answers(stepped) == ([stepped], [])
    message, _ = assignment([1, 2])
    assert ranks(1).split_by_rank([message]) == [message]


@pytest.mark.parametrize("how", ["released", "lost"])
def test_lengths_are_forgotten_with_their_blocks(how: str) -> None:
    groups = ranks()
    shares_of(groups, *assignment([5] * 6))
    assert len(groups._lengths) == BLOCKS
    if how == "released":
        groups.released(10, 11, 12)
    else:
        groups.answers(m.WorkerLost(worker="gen", epoch=0, error="killed"))
    assert not groups._lengths


def test_a_part_is_owed_until_each_rank_has_said_that_it_is_trained() -> None:
    outstanding = Outstanding()
    part = m.TrainPart(
        id=3, node="learn", worker="t0", step=1, part=0, keys=Keys.of(range(2)), inputs={}
    )
    outstanding.ask(part)
    outstanding.ask_all(part, ("t0", "t1"))
    for worker in ("t1", "t0"):
        assert outstanding.tasks(m.TrainPart) == [part]
        assert outstanding.owes(worker)
        answer = m.PartTrained(id=3, node="learn", step=1, worker=worker)
        assert outstanding.note_answer(answer) is not None
        assert not outstanding.owes(worker)
    assert outstanding.tasks(m.TrainPart) == []
