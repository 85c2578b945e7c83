"""Rows are bound late: what waits goes to the replica with the most room, in order, by credit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.kernel import Layout
from engine.coordinator.blocks import Blocks
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.late_binding import ahead_rows, credit_rows
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import ModelUse, Plan, PlannedSource
from engine.protocol import messages as m
from engine.protocol.refs import Ref
from tests.kit.plans import plan_of, planned_input, planned_node, ref

POLICY = ModelUse(param="model", model="policy", access="read", trained=True)


class LateRun:
    """prompts -> rollout (n samples) on these Workers, all of which are able."""

    def __init__(
        self,
        workers: str = "ab",
        *,
        samples: int = 1,
        slots: int = 8,
        spread: int = 1,
        waits: bool = False,
    ) -> None:
        weight = planned_input("prompts", name="weight")
        prompts = planned_node("prompts", work="source", relation="source", weight="x")
        rollout = planned_node(
            "rollout", "prompts", weight, work="decode", relation="expand", rows=samples,
            chunking="ready", workers=tuple(workers), models=(POLICY,), waits=waits,
            layout=Layout(slots=slots, spread=spread, replicas=len(workers)),
        )  # fmt: skip
        source = PlannedSource(name="prompts", batch=1 << 20, max_lag=1)
        self.plan: Plan = plan_of(prompts, rollout, sources=(source,))
        self.node = self.plan.node("rollout")
        self.blocks, self.ledger = Blocks(), Outstanding()
        self.table = PromptTable("prompts", self.plan.nodes, ("rollout",), self.blocks)
        self.dispatch = Dispatch(self.plan, self.blocks, self.ledger, self.table.pools)
        self.able = set(workers)
        self._block = 0

    def admit(self, positions: range, weights: list[float] | None = None) -> list[m.RunChunk]:
        """Prompts come as one cohort; what is told then."""
        self.table.admit(positions, [0] * len(positions), 0)
        rows = self._ref(Keys.of(positions))
        weight = np.array(weights or np.zeros(len(positions)), np.float32)
        given = Ref(
            worker="w", block=rows.block, keys=rows.keys, lengths=rows.lengths,
            version=rows.version, weight=weight,
        )  # fmt: skip
        self.table.add_rows("prompts", given)
        return self.tell()

    def tell(self) -> list[m.RunChunk]:
        assert not self.table.pump()
        return self.dispatch.tell(lambda node, worker: worker in self.able)

    def come(self, task: m.RunChunk, rows: int) -> list[m.RunChunk]:
        """The first rows of a chunk come."""
        asked = next(each for each in self.ledger.of(m.RunChunk) if each.task.id == task.id)
        keys = task.keys.expand_spans(self.node.rows, task.spans)
        self.table.add_rows("rollout", self._ref(keys.take(np.arange(rows))))
        self.dispatch.late.note_rows(asked, rows)
        return self.tell()

    def lose(self, task: m.RunChunk) -> list[m.RunChunk]:
        """Its Worker is gone, and another is there at once."""
        owed = self.ledger.forget_worker(task.worker)
        for chunk in self.dispatch.lose(task.worker, owed, frozenset()):
            self.table.unissue(chunk)
        self.dispatch.consider(task.worker)
        return self.tell()

    def _ref(self, keys: Keys) -> Ref:
        self._block += 1
        return ref(keys, block=self._block)


def rows_of(run: LateRun, tasks: list[m.RunChunk]) -> dict[str, int]:
    return {t.worker: len(t.keys.expand_spans(run.node.rows, t.spans)) for t in tasks}


def test_few_rows_go_to_all_replicas_in_equal_shares_and_one_message_each() -> None:
    run = LateRun("abcd", slots=256)
    assert rows_of(run, run.admit(range(40))) == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_a_replica_has_its_slots_full_and_an_eighth_ahead() -> None:
    run = LateRun("ab", slots=64)
    first = run.admit(range(1000))
    assert rows_of(run, first) == {"a": 72, "b": 72}
    (a, b) = first
    assert run.come(a, 7) == [], "a message brings an eighth of the slots, not a row"
    assert rows_of(run, run.come(a, 1)) == {"a": 8}
    assert rows_of(run, run.come(b, 20)) == {"b": 16}


def test_the_last_rows_go_where_room_is_in_smaller_and_smaller_shares() -> None:
    run = LateRun("ab", slots=8)
    a, b = run.admit(range(21))
    assert rows_of(run, [a, b]) == {"a": 9, "b": 9}
    assert rows_of(run, run.come(b, 1)) == {"b": 1}
    assert rows_of(run, run.come(a, 2)) == {"a": 2}
    assert run.come(a, 1) == []


def test_units_that_come_where_no_replica_has_room_are_not_looked_at_until_one_has() -> None:
    run = LateRun("ab", slots=4)
    late = run.dispatch.late
    a, b = run.admit(range(12))
    assert rows_of(run, [a, b]) == {"a": 5, "b": 5}
    assert not late.has_changed, "two rows wait, and nobody has room"
    assert run.admit(range(12, 13)) == []
    assert not late.has_changed
    assert rows_of(run, run.come(a, 5)) == {"a": 3}
    assert rows_of(run, run.admit(range(13, 14))) == {"a": 1}, "room that was left is seen at once"


def test_heavy_rows_come_first_but_older_cohorts_before_them() -> None:
    run = LateRun("a", slots=2)
    run.able = set()
    run.admit(range(3), [1.0, 5.0, 2.0])
    run.admit(range(3, 5), [9.0, 8.0])
    run.able = {"a"}
    run.dispatch.consider("a")
    (first,) = run.tell()
    assert first.keys.position.tolist() == [1, 2, 0]
    (second,) = run.come(first, 3)
    assert second.keys.position.tolist() == [3, 4]


@pytest.mark.parametrize(("samples", "slots", "spread", "ahead"), [
    (1, 64, 1, 8), (16, 64, 1, 16), (16, 64, 4, 8), (16, 8, 1, 16), (1, 1, 1, 1),
])  # fmt: skip
def test_a_replica_has_at_least_one_unit_ahead(
    samples: int, slots: int, spread: int, ahead: int
) -> None:
    run = LateRun("a", samples=samples, slots=slots, spread=spread)
    assert (ahead_rows(run.node), credit_rows(run.node)) == (ahead, slots + ahead)
    given = rows_of(run, run.admit(range(100)))["a"]
    assert slots <= given <= slots + ahead


def test_where_rows_wait_outside_of_their_slots_a_replica_has_as_many_more() -> None:
    run = LateRun("a", slots=64, waits=True)
    (first,) = run.admit(range(1000))
    assert rows_of(run, [first]) == {"a": 64 + 64 + 8}
    assert run.come(first, 7) == []
    assert rows_of(run, run.come(first, 1)) == {"a": 8}


def test_rows_of_a_lost_replica_wait_once_more() -> None:
    run = LateRun("ab", samples=2, slots=4)
    a, b = run.admit(range(20))
    run.come(a, 3)
    (again,) = [task for task in run.lose(a) if task.worker == "a"]
    made = a.keys.expand(2).take(np.arange(3)).rows()
    rows = again.keys.expand(2).rows()
    assert made[2] in rows, "its unit is made once more, whole"
    assert set(made[:2]).isdisjoint(rows)
    assert set(rows).isdisjoint(b.keys.expand(2).rows())


def test_units_of_a_prompt_that_is_gone_are_given_to_nobody() -> None:
    run = LateRun("a", slots=2)
    run.able = set()
    run.admit(range(3))
    run.table.again(run.table.prompts.find(Keys.of([1])))
    run.able = {"a"}
    run.dispatch.consider("a")
    (task,) = run.tell()
    assert task.keys.position.tolist() == [0, 2]


def test_a_prompt_in_the_place_of_one_that_is_gone_is_decoded_once() -> None:
    run = LateRun("a")
    run.able = set()
    run.admit(range(3))
    run.table.again(run.table.prompts.find(Keys.of([1])))
    run.admit(range(3, 4))
    run.able = {"a"}
    run.dispatch.consider("a")
    (task,) = run.tell()
    assert task.keys.position.tolist() == [0, 2, 3]


def test_a_group_that_failed_meanwhile_is_not_decoded() -> None:
    run = LateRun("a", slots=2)
    run.able = set()
    run.admit(range(2))
    run.table.drop("prompts", 0, 0)
    run.tell()
    run.able = {"a"}
    run.dispatch.consider("a")
    (task,) = run.tell()
    assert task.keys.position.tolist() == [1]
    assert run.table.prompts.find(Keys.of([0])).tolist() == [-1], "nothing of it is to come"


@given(
    samples=st.integers(1, 5),
    spread=st.integers(1, 3),
    slots=st.integers(1, 9),
    moves=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=40),
)
def test_every_row_is_given_once_within_credit_and_no_room_stays_beside_rows(
    samples: int, spread: int, slots: int, moves: list[tuple[int, int]]
) -> None:
    run = LateRun("abc", samples=samples, slots=slots, spread=spread)
    tasks = run.admit(range(30))
    left = {task.id: len(task.keys.expand_spans(samples, task.spans)) for task in tasks}
    for which, rows in moves:
        under_way = [task for task in tasks if left[task.id]]
        if not under_way:
            break
        task = under_way[which % len(under_way)]
        rows = min(rows, left[task.id])
        left[task.id] -= rows
        (asked,) = [each for each in run.ledger.of(m.RunChunk) if each.task.id == task.id]
        run.dispatch.late.note_rows(asked, rows)
        for more in run.tell():
            tasks.append(more)
            left[more.id] = len(more.keys.expand_spans(samples, more.spans))
        for worker in "abc":
            busy = sum(left[task.id] for task in tasks if task.worker == worker)
            assert busy <= credit_rows(run.node)
            assert busy >= slots or not run.table.pools[0].rows
    given_rows = [
        row for task in tasks for row in task.keys.expand_spans(samples, task.spans).rows()
    ]
    assert len(given_rows) == len(set(given_rows))


def test_a_prompt_that_waits_begins_with_the_newest_version_unlike_one_that_was_given() -> None:
    run = LateRun("a", slots=1)
    (task,) = run.admit(range(5))
    prompts = run.table.prompts
    assert run.table.begin_with(3)
    assert prompts.begun[prompts.find(Keys.of(range(5)))].tolist() == [0, 0, 3, 3, 3]
    assert len(task.keys) == 2
    assert not run.table.begin_with(3), "known"


def test_units_whose_rows_are_lost_while_they_wait_wait_for_these_to_be_made_again() -> None:
    run = LateRun("a", slots=2)
    run.able = set()
    run.admit(range(3))
    harmed, (source,) = run.table.lose(frozenset({0}), trained=frozenset({"rollout"}))
    assert (len(harmed), len(source.keys)) == (0, 3)
    run.able = {"a"}
    run.dispatch.consider("a")
    assert run.tell() == []
    run.table.add_rows("prompts", ref(Keys.of([2]), block=9))
    (task,) = run.tell()
    assert task.keys.position.tolist() == [2]
