"""Who is wanted, who begins, and when one that leaves is gone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.coordinator.coordinator import Coordinator, Settings
from engine.coordinator.recovery import DEATHS
from engine.coordinator.replicas import Moves, Replicas
from engine.plan.plan import Plan
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from tests.kit.plans import plan_of, planned_node, ref


def plan(source: str = "data", **fields: Any) -> Plan:
    """Columns on a, b, c and d, of which a and b are there at the beginning."""
    nodes = (
        planned_node("prompts", work="source", relation="source", workers=(source,)),
        planned_node("score", "prompts", workers=("a", "b", "c", "d")),
    )
    return plan_of(*nodes, **{"spare": ("c", "d"), "recorder": "data"} | fields)


class ByHand:
    """Replicas whose Workers open at once. busy, keeps: those with something to do, or to keep."""

    def __init__(self, planned: Plan | None = None, **settings: Any) -> None:
        self.replicas = Replicas(planned or plan(), Settings(**{"grace": 10.0} | settings))
        self.now = 0.0
        self.busy: set[str] = set()
        self.keeps: set[str] = set()

    def moves(self, *, after: float = 0.0) -> Moves:
        """Who ends and who begins; these open."""
        self.now += after
        self.replicas.passes(self.now)
        ended, begun = self.replicas.moves(self.busy.__contains__, self.keeps.__contains__)
        for worker in begun:
            self.replicas.note_opened(worker)
        return ended, begun

    def scale(self, count: int, *, after: float = 0.0) -> Moves:
        """So many are wanted: who ends and who begins."""
        self.replicas.scale("score", count)
        return self.moves(after=after)

    def leave(self, *workers: str) -> list[str]:
        return self.replicas.leave(workers, self.now)

    @property
    def there(self) -> float:
        return self.replicas.step_ended()["replicas/score"]


NOBODY = ([], [])
"""Ends, and begins."""


def one_leaves(*, busy: str = "", keeps: str = "") -> ByHand:
    """Of three replicas `c` is to end, and has something to do, or to keep."""
    by_hand = ByHand()
    by_hand.scale(3)
    by_hand.busy, by_hand.keeps = set(busy), set(keeps)
    assert by_hand.scale(2) == NOBODY
    return by_hand


def test_as_many_as_are_asked_for_between_the_least_and_the_most() -> None:
    by_hand = ByHand()
    assert by_hand.moves() == NOBODY
    assert by_hand.scale(9) == ([], ["c", "d"])
    assert by_hand.there == 4
    assert by_hand.scale(0) == NOBODY
    assert by_hand.moves() == (["c", "d"], [])
    assert by_hand.there == 2
    by_hand.replicas.scale("another", 4)
    assert by_hand.moves() == NOBODY


def test_one_that_leaves_gets_no_chunk_and_stays_until_it_is_not_needed() -> None:
    by_hand = one_leaves(busy="c", keeps="c")
    assert not by_hand.replicas.takes("c")
    assert by_hand.replicas.moving
    assert by_hand.moves(after=5.0) == NOBODY
    by_hand.busy = set()
    assert by_hand.moves() == NOBODY
    by_hand.keeps = set()
    assert by_hand.moves() == (["c"], [])
    assert not by_hand.replicas.moving


def test_after_its_grace_it_is_ended_and_may_join_again() -> None:
    by_hand = one_leaves(busy="c")
    assert by_hand.moves(after=9.9) == NOBODY
    assert by_hand.moves(after=0.1) == (["c"], [])
    assert by_hand.scale(3) == ([], ["c"])
    assert by_hand.replicas.takes("c")


def test_one_that_is_wanted_again_stays() -> None:
    by_hand = one_leaves(busy="c")
    assert by_hand.scale(4, after=20.0) == (["c"], ["c", "d"]), "too late"
    by_hand.busy = {"d"}
    by_hand.scale(3)
    assert by_hand.scale(4, after=1.0) == NOBODY
    assert by_hand.replicas.takes("d")
    assert by_hand.moves(after=20.0) == NOBODY


def test_rows_that_a_step_is_trained_on_outlast_the_grace() -> None:
    by_hand = one_leaves(keeps="c")
    by_hand.replicas.training = True
    assert by_hand.moves(after=60.0) == NOBODY
    by_hand.leave("c")
    assert by_hand.moves() == (["c"], []), "its machine does not wait"


def test_where_a_machine_goes_another_place_is_taken_at_once() -> None:
    by_hand = ByHand()
    by_hand.busy = {"a", "b"}
    assert by_hand.leave("a", "data") == ["data"]
    assert by_hand.moves() == ([], ["c"])
    assert by_hand.there == 2
    by_hand.leave("b", "c")
    assert by_hand.moves() == (["c"], ["c", "d"])
    assert by_hand.scale(4, after=10.0) == (["a", "b"], ["a", "b"])


def test_all_machines_go_and_nothing_is_left_but_their_places() -> None:
    by_hand = ByHand(scaling="most")
    by_hand.moves()
    by_hand.busy, by_hand.keeps = {"a"}, set("abcd")
    by_hand.leave(*"abcd")
    assert by_hand.moves() == (["b"], ["b"])
    assert by_hand.moves() == NOBODY
    assert (by_hand.replicas.takes("a"), by_hand.replicas.takes("b")) == (False, True)


def test_a_death_begins_again_unless_it_was_leaving() -> None:
    by_hand = ByHand()
    assert not by_hand.replicas.note_lost("a")
    assert "a: is to join" in str(by_hand.replicas.waiting())
    by_hand.replicas.note_opened("a")
    by_hand.busy = {"b"}
    by_hand.leave("b")
    by_hand.moves()
    assert by_hand.replicas.note_lost("b")
    assert by_hand.moves() == NOBODY
    assert by_hand.there == 2


def test_of_those_that_die_again_and_again_only_the_ones_there_have_to_be_end_a_run() -> None:
    by_hand = ByHand()
    by_hand.scale(4)
    for worker, most in (("d", 3), ("a", 2), ("c", None), ("b", None)):
        assert not by_hand.replicas.note_lost(worker)
        assert by_hand.replicas.give_up(worker) == most
    assert by_hand.scale(4) == NOBODY
    for worker in ("b", "c"):
        by_hand.replicas.note_opened(worker)
    assert by_hand.there == 2
    assert by_hand.replicas.give_up("data") is None


@pytest.mark.parametrize("which", ["recorder", "source"])
def test_a_worker_of_other_nodes_or_of_the_samples_never_leaves(which: str) -> None:
    by_hand = ByHand(plan(recorder="a") if which == "recorder" else plan(source="a"))
    assert by_hand.leave("a") == ["a"]
    assert by_hand.moves() == NOBODY


def test_too_many_are_waited_for_before_those_that_are_there_leave() -> None:
    replicas = Replicas(plan(), Settings())
    replicas.scale("score", 4)
    assert replicas.moves(lambda _: False, lambda _: False) == ([], ["c", "d"])
    replicas.note_opened("c")
    replicas.scale("score", 3)
    assert replicas.moves(lambda _: False, lambda _: False) == (["d"], [])


class WithWeights:
    """A coordinator of one replica that reads no Model, answered by hand."""

    def __init__(self) -> None:
        source = plan().nodes[0]
        score = planned_node("score", "prompts", workers=("a", "b"), chunking="ready", chunks=1)
        sources = (PlannedSource(name="prompts", batch=1, max_lag=1, cohort=1),)
        planned = plan_of(source, score, sources=sources, spare=("b",), recorder="data")
        self.coordinator = Coordinator(planned, Settings(steps=9, grace=5.0))
        self.told: list[m.Instruction] = self.coordinator.start()
        self.hear(m.SourceOpened(node="prompts", rows=9))

    def hear(self, event: m.Event, now: float = 0.0) -> None:
        for each in self.coordinator.in_order(event):
            self.told += self.coordinator.handle(each, now)

    def new(self, kind: type) -> list[Any]:
        found = [i for i in self.told if isinstance(i, kind)]
        self.told = [i for i in self.told if not isinstance(i, kind)]
        return found

    def source_ends(self) -> None:
        """The source makes what it was asked for."""
        for number, chunk in enumerate(c for c in self.new(m.RunChunk) if c.node == "prompts"):
            block = ref(chunk.keys, 100 + number + chunk.id, worker="data")
            self.hear(m.Produced(id=chunk.id, node="prompts", ref=block))
            self.hear(m.ChunkDone(id=chunk.id, node="prompts"))


def test_a_chunk_given_up_is_run_by_another_and_its_late_answers_count_for_nothing() -> None:
    by_hand = WithWeights()
    by_hand.source_ends()
    first, second = by_hand.new(m.RunChunk)
    assert {first.worker, second.worker} == {"a"}
    by_hand.hear(m.LeaveRequested(workers=("a",), reason="spot"))
    assert by_hand.new(m.Respawn) == [m.Respawn(workers=("b",))]
    by_hand.hear(m.WorkerOpened(worker="b", epoch=0), 1.0)
    assert by_hand.new(m.RunChunk) == []
    assert "worker a: leaves" in "\n".join(by_hand.coordinator.waiting())
    by_hand.hear(m.TimePassed(), 4.9)
    assert by_hand.new(m.Retire) == []
    by_hand.hear(m.TimePassed(), 5.0)
    assert by_hand.new(m.Retire) == [m.Retire(workers=("a",))]
    again = by_hand.new(m.RunChunk)
    assert {chunk.worker for chunk in again} == {"b"}
    assert rows_of(again) == rows_of([first, second])
    late = m.Produced(id=first.id, node="score", ref=ref(first.keys, 7, worker="a"))
    by_hand.hear(m.From(worker="a", epoch=0, number=0, event=late))
    by_hand.hear(m.WorkerLost(worker="a", epoch=0, error="its machine is gone"))
    assert [i for i in by_hand.told if not isinstance(i, m.StepClosed)] == []


def test_a_replica_that_dies_as_it_joins_is_given_up_with_a_word() -> None:
    by_hand = WithWeights()
    by_hand.hear(m.ScaleRequested(node="score", replicas=2))
    by_hand.hear(m.TimePassed())
    for epoch in range(DEATHS):
        assert by_hand.new(m.Respawn) == [m.Respawn(workers=("b",))]
        by_hand.hear(m.WorkerLost(worker="b", epoch=epoch, error=f"signal {epoch}"))
    (warn,) = by_hand.new(m.Warn)
    assert warn.warning.rule == "replica_given_up"
    assert "worker b died 3 times without finishing anything in between" in str(warn.warning)
    assert "The first time: signal 0. It is given up" in str(warn.warning)
    by_hand.hear(m.TimePassed(), 1.0)
    assert by_hand.new(m.Respawn) == []
    assert by_hand.new(m.Finish) == []


def rows_of(chunks: list[m.RunChunk]) -> list[tuple[int, int, int]]:
    return sorted(row for chunk in chunks for row in chunk.keys.rows())


def test_wishes_are_carried_out_with_the_next_event_not_within_an_instruction() -> None:
    by_hand = WithWeights()
    by_hand.hear(m.ScaleRequested(node="score", replicas=2))
    assert by_hand.new(m.Respawn) == []
    assert by_hand.coordinator.moving
    by_hand.hear(m.TimePassed())
    assert by_hand.new(m.Respawn) == [m.Respawn(workers=("b",))]


@pytest.mark.parametrize("scaling", ["most", "fixed", "balance"])
def test_a_plan_without_spare_workers_never_moves(scaling: Any) -> None:
    replicas = Replicas(plan(spare=()), Settings(scaling=scaling))
    replicas.scale("score", 1)
    assert replicas.moves(lambda _: True, lambda _: False) == NOBODY
    assert replicas.step_ended() == {}
