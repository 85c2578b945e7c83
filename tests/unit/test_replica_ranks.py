"""Chunks of a replica with several Workers: who is told what, in which order, what a death ends."""

from __future__ import annotations

import numpy as np
import pytest

from dataflow.batch import Keys
from dataflow.errors import PlanError
from dataflow.kernel import Layout
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.ranks import RankGroups
from engine.coordinator.replica_choice import Idlest
from engine.coordinator.task_ledger import Outstanding, Pending
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.run.launch.ranks import groups_by_worker
from engine.run.worker_process.task_inbox import Inbox
from tests.kit.plans import plan_of, planned_node

TWO = Layout(replicas=2, tensor=2)
KEYS = Keys.of([0, 1])


def score_node(*workers: str, layout: Layout = TWO) -> PlannedNode:
    return planned_node("score", "prompts", work="forward", workers=workers, layout=layout)


def make_chunk(number: int = 7, worker: str = "c") -> m.RunChunk:
    place = np.zeros(2, np.int32)
    gather = Gather(producer="prompts", columns=("x",), refs=(("p", 0),), block=place, row=place)
    return m.RunChunk(
        id=number, node="score", worker=worker, step=1, keys=KEYS, inputs={"prompts": (gather,)}
    )


class RanksByHand:
    """The ranks of a plan, with what the coordinator does before and after it calls them."""

    def __init__(self, plan: Plan) -> None:
        self.ledger = Outstanding()
        self.ranks = RankGroups(plan, self.ledger)

    def split(self, chunk: m.RunChunk) -> list[m.Instruction]:
        node = self.ranks.replicas.nodes["score"]
        self.ledger.ask(chunk, chunk=NodeChunk(node=node, keys=KEYS, inputs={}))
        return self.ranks.split_by_rank([chunk])

    def hear(self, event: m.Event) -> tuple[list[m.Event], Pending | None]:
        asked = self.ledger.note_answer(event)
        core_events, _ = self.ranks.merge_answers(event, asked)
        self.ranks.replicas.note_ended(event, asked)
        return core_events, asked


def test_a_chunk_becomes_one_a_rank_and_only_the_lead_fetches() -> None:
    by_hand = RanksByHand(plan_of(score_node("a", "b", "c", "d")))
    lead, other = by_hand.split(make_chunk())
    assert (lead.worker, other.worker) == ("c", "d")
    assert lead.giver == other.giver == "c"
    assert lead.id == other.id
    assert len(lead.inputs["prompts"]) == 1
    assert other.inputs == {"prompts": ()}


def test_a_chunk_has_ended_when_its_lead_says_so_and_the_others_are_awaited_alone() -> None:
    by_hand = RanksByHand(plan_of(score_node("a", "b", "c", "d")))
    by_hand.split(make_chunk())
    assert by_hand.ledger.rows["c"] == 2
    done = m.ChunkDone(id=7, node="score")
    core_events, _ = by_hand.hear(done)
    assert core_events == [done]
    assert by_hand.ledger.rows["c"] == 0
    assert (by_hand.ledger.owes("c"), by_hand.ledger.owes("d")) == (False, True)
    (left,) = by_hand.ledger.forget_worker("d")
    assert left.chunk is None, "its rows are there: a death of d does not run it again"
    by_hand.split(make_chunk(8))
    core_events, _ = by_hand.hear(m.RankDone(id=8, node="score", worker="d"))
    assert core_events == []
    assert by_hand.ledger.rows["c"] == 2
    failed = m.FetchFailed(id=8, worker="c", peer="p")
    core_events, _ = by_hand.hear(failed)
    assert core_events == [failed]
    assert not by_hand.ledger.owes("d")


def test_of_replicas_the_lead_with_fewest_rows_is_chosen() -> None:
    rows = dict.fromkeys("abcd", 0) | {"a": 3}
    idlest = Idlest([score_node("a", "b", "c", "d")], rows)
    assert idlest.choose("score", lambda worker: True) == "c"
    rows["a"], rows["c"] = 0, 5
    idlest.touch("b")  # a rank that is there again
    assert idlest.choose("score", lambda worker: True) == "a"


def test_a_chunk_of_ranks_joins_no_turn_that_others_wait_behind() -> None:
    node = score_node("a", "b", layout=Layout(tensor=2))
    plan = plan_of(node, turns=(("a", "x"),))
    ledger = Outstanding()
    turns = DeviceTurns(plan, ledger)
    ranks = RankGroups(plan, ledger)

    def tell(task: m.Task) -> list[m.Instruction]:
        ledger.ask(task)
        return turns.let_through(ranks.split_by_rank([task]))

    assert tell(m.Record(id=0, step=1, keys={}, inputs={}, worker="a")) == [m.Wake(worker="a")]
    assert tell(m.Record(id=1, step=1, keys={}, inputs={}, worker="x")) == []
    (to_other,) = tell(make_chunk(2, "a"))
    assert to_other.worker == "b"
    assert [turn.worker for turn in turns._shared[0].turns] == ["a", "x", "a"]


@pytest.mark.parametrize(
    ("item", "passes"),
    [
        (m.Go(id=1, node="learn", worker="a"), False),
        (m.Offer(id=1, model="p", writer="learn", worker="a", version=1), False),
        (m.Load(id=1, model="p", writer="learn", reader="r", version=1, worker="a"), True),
    ],
    ids=["go", "offer", "load"],
)
def test_what_ranks_do_together_stays_in_order(item: m.Task | m.Go, passes: bool) -> None:
    by_hand = RanksByHand(plan_of(score_node("c", "d", layout=Layout(tensor=2))))
    of_ranks, _ = by_hand.split(make_chunk())
    alone = make_chunk(8)
    for chunk, comes_first in ((of_ranks, passes), (alone, True)):
        inbox = Inbox()
        inbox.put(chunk)
        inbox.put(item)
        assert (inbox.take() is item) == comes_first


def test_a_replica_is_in_the_world_of_what_trains_there() -> None:
    names = ("a", "b", "c", "d")
    train = planned_node(
        "learn", "prompts", work="train", workers=names, layout=Layout(data=2, tensor=2)
    )
    plan = plan_of(score_node("c", "d", layout=Layout(tensor=2)), train)
    assert groups_by_worker(plan) == dict.fromkeys(names, names)
    assert plan.stateful == frozenset(names)
    with pytest.raises(PlanError, match="worker d is a rank of d, e and of a, b, c, d"):
        groups_by_worker(plan_of(score_node("d", "e", layout=Layout(tensor=2)), train))
