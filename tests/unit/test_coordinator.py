"""The coordinator's parts: intake, blocks, tables, the states of a prompt, the ends of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator import intake
from engine.coordinator.blocks import Blocks, _count_numbers, _index_numbers
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.coordinator import Coordinator, Settings
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import DROPPED, FINISHED, REJECTED, RUNNING
from engine.coordinator.tables import StepRows, split_by_prompt
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from engine.protocol.refs import SourceCut
from engine.protocol.staleness import NO_VERSION
from engine.run.simulated_workers.behaviour import Outcomes
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.plans import plan_of, planned_node, ref
from tests.kit.simulations import simulation
from tests.kit.turns import example_count

VERSION = 7
AGES = st.lists(st.integers(0, VERSION), max_size=12)


def ages(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@settings(max_examples=example_count(200))
@given(begun=AGES, running=AGES, batch=st.integers(1, 4), max_lag=st.integers(0, 4))
def test_exact_is_the_rule_as_it_is_written(
    begun: list[int], running: list[int], batch: int, max_lag: int
) -> None:
    bounds = {"batch": batch, "max_lag": max_lag, "version": VERSION}
    chosen = intake.choose_exact(ages(begun), ages(running), **bounds, last=False)
    oldest = sorted(range(len(begun)), key=lambda i: (begun[i], i))[:batch]
    left = [begun[i] for i in range(len(begun)) if i not in oldest] + running
    fits = all(
        sum(age <= s for age in left) <= max(0, batch * (s + max_lag - VERSION))
        for s in range(-1, VERSION + 1)
    )
    expected = sorted(oldest) if len(begun) >= batch and fits else []
    assert chosen.tolist() == expected


@pytest.mark.parametrize(("last", "taken"), [(False, []), (True, [0, 1])])
def test_a_short_batch_is_taken_only_at_the_end(last: bool, taken: list[int]) -> None:
    begun = ages([3, 3])
    exact = intake.choose_exact(begun, ages([]), batch=4, max_lag=0, version=3, last=last)
    assert exact.tolist() == taken
    assert intake.choose_oldest(begun, batch=4, last=last).tolist() == taken


def test_too_old_counts_from_the_version_that_the_step_starts_from() -> None:
    too_old = intake.find_too_old(ages([2, 3, 5]), max_lag=2, version=5)
    assert too_old.tolist() == [True, False, False]


@given(st.lists(st.integers(0, 40) | st.integers(0, 4000), max_size=30))
def test_counting_and_indexing_are_those_of_unique(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    numbers, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    assert _count_numbers(array) == (numbers.tolist(), counts.tolist())
    distinct, places = _index_numbers(array)
    assert (distinct, places.tolist()) == (numbers.tolist(), index.tolist())


def test_a_block_goes_when_no_row_is_wanted_and_no_chunk_reads_it() -> None:
    blocks = Blocks()
    number = blocks.add(ref([0, 1], block=9), 2)
    blocks.hold([number])
    blocks.drop(np.array([number, number]))
    assert blocks.drain() == {}
    blocks.let_go([number])
    assert blocks.drain() == {"w": (9,)}
    assert len(blocks) == 0
    blocks.add(ref([0], block=3), 0)
    assert blocks.drain() == {"w": (3,)}, "nothing of it is wanted"


def test_step_rows_find_an_ancestor_by_its_ratio() -> None:
    rows = StepRows(
        Keys.of([4, 4, 6], [0, 1, 0]), np.array([7, 8, 9]), np.arange(3, dtype=np.int32)
    )
    block, row = rows.find(Keys.of([4, 6, 4], [3, 1, 0]), 2)
    assert (block.tolist(), row.tolist()) == ([8, 9, 7], [1, 2, 0])
    assert rows.having(Keys.of([4, 5, 6], [3, 0, 2]), 2).rows() == [(4, 3, 0)]


TOKENS = st.sampled_from([st.integers(0, 50), st.just(0)]).flatmap(
    lambda each: st.lists(st.lists(each, min_size=1, max_size=3), min_size=1, max_size=9)
)
"""Of each row of some prompts; where no lengths are known, of all 0."""


@given(tokens=TOKENS, parts=st.integers(1, 4))
def test_chunks_are_whole_prompts_of_balanced_tokens(tokens: list[list[int]], parts: int) -> None:
    positions = np.repeat(np.arange(len(tokens)), [len(rows) for rows in tokens])
    each = np.concatenate(tokens).astype(np.int64)
    chunks = split_by_prompt(positions, each, parts)
    rows = np.concatenate(chunks).tolist()
    assert sorted(rows) == list(range(len(positions)))
    assert all((np.diff(chunk) > 0).all() for chunk in chunks)
    assert sum(len(set(positions[chunk].tolist())) for chunk in chunks) == len(tokens)
    assert len(chunks) <= parts
    if each.any():
        weights = [sum(prompt) + len(prompt) for prompt in tokens]
        heaviest = max(int((each[chunk] + 1).sum()) for chunk in chunks)
        assert heaviest <= -(-sum(weights) // parts) + max(weights)
    else:  # runs of prompts, as many of them as there can be
        assert rows == sorted(rows)
        assert len(chunks) == min(parts, len(tokens))


def test_tokens_are_those_of_the_longest_input() -> None:
    blocks, rows, inputs = Blocks(weigh=True), np.array([2, 0, 1], dtype=np.int32), {}
    for name, lengths in (("rollout", [5, 0, 7]), ("reward", [0, 0, 0]), ("ref", [2, 9, 1])):
        number = blocks.add(replace(ref(range(3)), lengths=np.array(lengths)), 3)
        inputs[name] = (blocks.reading(name, (), np.full(3, number), rows),)
    assert blocks.tokens(inputs, 3).tolist() == [7, 5, 9]
    assert Blocks().tokens(inputs, 3).tolist() == [0, 0, 0]


def test_a_long_prompt_has_a_chunk_to_itself() -> None:
    table, _ = with_prompts(3, node("logprobs", "rollout", chunks=2))
    lengths = np.array([1, 1, 50, 50, 2, 2])
    table.add_rows("rollout", replace(ref(both(0, 1, 2)), lengths=lengths))
    first, second = table.pump()
    assert first.keys.position.tolist() == [0, 0, 2, 2]
    assert second.keys.position.tolist() == [1, 1]


def node(name: str, *gates: str, **fields: object) -> PlannedNode:
    """Of the two rows of each prompt."""
    return planned_node(name, *gates, **{"rows": 2, "inner": 2} | fields)


PROMPTS = node("prompts", relation="source", rows=1, inner=1, work="source")
ROLLOUT = node("rollout", "prompts", relation="expand", inner=1, work="decode")


def lane(*more: PlannedNode, cut: Sequence[str] = ()) -> PromptTable:
    """cut: what crosses it, by default the last node."""
    nodes = (PROMPTS, ROLLOUT, *more)
    return PromptTable("prompts", nodes, cut or [nodes[-1].name], Blocks(weigh=True))


def both(*prompts: int) -> Keys:
    """The keys of both rows of each prompt."""
    return Keys.of(prompts).expand(2)


def feed(table: PromptTable, name: str, keys: Keys, version: int = NO_VERSION) -> list:
    table.add_rows(name, ref(keys, version=version))
    return table.pump()


def with_prompts(
    count: int, *more: PlannedNode, version: int = 0, cut: Sequence[str] = ()
) -> tuple[PromptTable, list[NodeChunk]]:
    """This many prompts, admitted and read, and what is then ready."""
    table = lane(*more, cut=cut)
    table.admit(range(count), [0] * count, version)
    return table, feed(table, "prompts", Keys.of(range(count)))


def prompts(table: PromptTable, status: int) -> list[int]:
    """The positions of the prompts of this status."""
    return table.prompts.position[table.prompts.slots(status)].tolist()


def versions(table: PromptTable) -> list[int]:
    """Of the rows of finished prompts."""
    return table.versions(table.prompts.slots(FINISHED)).tolist()


def made_with(table: PromptTable) -> list[int]:
    """The version that counts as the age of each finished prompt."""
    return table.prompts.begun[table.prompts.slots(FINISHED)].tolist()


def test_rows_that_come_twice_or_of_an_older_attempt_are_let_go() -> None:
    table, again = lane(), Keys.of([0], attempt=[1])
    table.admit([0], [1], 0)
    for keys, released in ((Keys.of([0]), 1), (Keys.of([7]), 1), (again, 0), (again, 1)):
        feed(table, "prompts", keys)
        assert len(table.blocks.drain().get("w", ())) == released


def test_a_prompt_is_as_old_as_its_oldest_row() -> None:
    table, _ = with_prompts(1, version=3)
    feed(table, "rollout", Keys.of([0], [1]), version=5)
    feed(table, "rollout", Keys.of([0], [0]), version=4)
    assert made_with(table) == [4]
    assert sorted(versions(table)) == [4, 5]


def test_the_node_that_came_first_counts_for_the_age_as_well() -> None:
    table, _ = with_prompts(1, node("again", "rollout"), version=1)
    feed(table, "rollout", both(0), version=2)
    feed(table, "again", both(0), version=6)
    assert made_with(table) == [2]
    assert versions(table) == [2, 2]


def test_rows_of_every_generation_count_for_the_age_whatever_their_number() -> None:
    more = node("more", "prompts", relation="expand", rows=3, inner=1, work="decode")
    table, _ = with_prompts(1, more, version=1, cut=["rollout", "more"])
    feed(table, "rollout", both(0), version=2)
    feed(table, "more", Keys.of([0]).expand(3), version=6)
    assert versions(table) == [2, 2, 6, 6, 6]


def test_a_refilling_select_that_keeps_nothing_rejects_the_prompt() -> None:
    table, _ = with_prompts(2, node("keep", "rollout", relation="subset", refill=True))
    (ready,) = feed(table, "rollout", both(0, 1))
    feed(table, "keep", Keys.of([1], [1]))
    assert table.close_chunk(ready) is None
    assert table.pump() == []
    assert (prompts(table, REJECTED), prompts(table, FINISHED)) == ([0], [1])
    assert table.stored_rows("keep").keys.rows() == [(1, 1, 0)]
    table.retire(table.prompts.slots(REJECTED, FINISHED))
    assert len(table.blocks.drain()["w"]) == 3
    assert (table.prompts.watermark, table.prompts.outstanding) == (2, 0)


def test_a_failed_row_drops_its_group_once_and_frees_the_cohort() -> None:
    table, _ = with_prompts(2, node("score", "rollout"))
    assert feed(table, "rollout", Keys.of([0, 1, 1], [0, 0, 1])) == []
    assert table.drop("rollout", 0, 0)
    assert not table.drop("rollout", 0, 0)
    assert not table.drop("rollout", 0, 1)
    (ready,) = table.pump()
    assert ready.keys.rows() == both(1).rows()
    assert prompts(table, DROPPED) == [0]


def test_given_back_prompts_are_not_retired() -> None:
    table, _ = with_prompts(3)
    feed(table, "rollout", both(0, 1, 2))
    zero, one, two = table.prompts.slots(FINISHED)
    table.retire(np.array([zero, two]))
    assert table.again(np.array([one])) == [(1, 1)]
    left = SourceCut(next=3, watermark=1, retired=(2,), running=((1, 0, 0),))
    assert table.prompts.cut_state([(1, 1)]) == left


def test_more_prompts_than_slots() -> None:
    table, _ = with_prompts(300)
    feed(table, "rollout", both(*range(300)), version=2)
    assert versions(table) == [2] * 600
    table.retire(table.prompts.slots(FINISHED))
    assert len(table.blocks.drain()["w"]) == 2


def test_a_cut_is_taken_up_with_its_rows() -> None:
    table = lane(node("keep", "rollout", relation="subset"))
    running, finished = ((5, 0, 1), (8, 0, 0)), ((4, 0, 0), (7, 0, 2))
    cut = SourceCut(next=9, watermark=4, retired=(6,), running=running, finished=finished)
    whole = Keys.of([4, 7], attempt=[0, 2])
    rows = {
        "prompts": ref(whole, block=1),
        "rollout": ref(whole.expand(2), block=2, version=3),
        "keep": ref(Keys.of([7], [1], [2]), block=3),
    }
    assert table.restore(cut, rows, 5) == [(5, 2), (8, 1)]
    assert made_with(table) == [3, 3]
    assert table.stored_rows("keep").keys.rows() == [(7, 1, 2)]
    assert table.prompts.cut_state([(5, 2), (8, 1)]) == cut


KEEP = node("keep", "rollout", relation="subset", refill=True, max_attempts=3)
TRAIN = node("learn", "keep", relation="sink", work="train", region="step")
SOURCE = PlannedSource(name="prompts", batch=2)
PLAN = plan_of(PROMPTS, ROLLOUT, KEEP, TRAIN, sources=(SOURCE,))


def error_of(plan: Plan, outcomes: Outcomes) -> tuple[str, Simulation]:
    """With what a run ended, and the run."""
    run = simulation(plan, settings=Settings(steps=2), outcomes=outcomes)
    finish = run.run()
    return finish.error, run


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_filter_that_keeps_nothing_ends_the_run(max_lag: int) -> None:
    plan = plan_of(*PLAN.nodes, sources=(replace(SOURCE, max_lag=max_lag),))
    error, run = error_of(plan, Outcomes(keep={"keep": 0.0}))
    assert "keep kept 0 of" in error
    assert not run.workers.outbox.blocks
    instructions = [each for _, each in run.history.instructions if isinstance(each, m.RunChunk)]
    admitted = sum(len(chunk.keys) for chunk in instructions if chunk.node == "prompts")
    assert 6 <= admitted <= 6 + 2 * max_lag


def test_the_error_budget_ends_the_run_with_the_first_cause() -> None:
    error, _ = error_of(PLAN, Outcomes(fail={"rollout": 1.0}))
    assert "more than the error budget of 10%" in error
    assert "the first: rollout row (0, " in error


def test_a_stop_ends_the_run_after_the_step_under_way() -> None:
    run = simulation(PLAN, settings=Settings(steps=9))
    asked = iter([m.StopRequested(reason="ctrl-c")])

    def stop() -> m.StopRequested | None:
        """As prompts of step 3 are on their way: a synchronous run has begun it."""
        return next(asked, None) if run.coordinator.version == 2 else None

    assert run.run(stop=stop) == m.Finish(reason="ctrl-c")
    assert run.coordinator.version == 3
    assert [s.message.step for s in run.store.stored] == [3]
    assert not run.workers.outbox.blocks


def begun() -> tuple[Coordinator, m.RunChunk]:
    """A coordinator, and the chunk of two prompts that it asks for first."""
    coordinator = Coordinator(PLAN, Settings(steps=1))
    coordinator.start()
    instructions = coordinator.handle(m.SourceOpened(node="prompts", rows=4), 0.0)
    (chunk,) = [each for each in instructions if isinstance(each, m.RunChunk)]
    return coordinator, chunk


def test_a_kernel_that_forgets_a_row_ends_the_run() -> None:
    coordinator, chunk = begun()
    coordinator.handle(m.Produced(id=chunk.id, node="prompts", ref=ref([0])), 0.0)
    instructions = coordinator.handle(m.ChunkDone(id=chunk.id, node="prompts"), 0.0)
    (finish,) = [each for each in instructions if isinstance(each, m.Finish)]
    assert "ended a chunk without row (position, sample, attempt) (1, 0, 0)" in finish.error


def test_rows_of_an_unknown_chunk_are_released() -> None:
    unknown = m.Produced(id=99, node="rollout", ref=ref([0], block=5))
    assert begun()[0].handle(unknown, 0.0) == [m.Release(worker="w", blocks=(5,))]


def test_waiting_says_who_waits_for_whom() -> None:
    coordinator, chunk = begun()
    coordinator.handle(m.Produced(id=chunk.id, node="prompts", ref=ref([0])), 0.0)
    lines = coordinator.waiting()
    assert "prompts: 1 rows have not come (first: prompt 1); it reads its data" in lines
    assert "rollout: 4 rows have not come (first: prompt 0); it reads prompts" in lines
    assert "intake of prompts: 0 of 2 prompts are finished" in lines


def test_a_prompt_whose_fate_is_known_still_runs_where_others_do() -> None:
    """Otherwise it depends on timing whether the chunk of `second` has its rows."""
    table, _ = with_prompts(
        2,
        node("keep", "rollout", relation="subset", refill=True),
        node("first", "rollout"),
        node("second", "first"),
        node("join", "second", "keep"),
    )
    keep, _ = feed(table, "rollout", both(0, 1))
    feed(table, "keep", both(1))
    assert table.close_chunk(keep) is None
    assert table.pump() == []
    assert prompts(table, RUNNING) == [0, 1]
    (second,) = feed(table, "first", both(0, 1))
    assert second.keys.rows() == both(0, 1).rows()
    (joined,) = feed(table, "second", both(0, 1))
    assert joined.keys.rows() == both(1).rows()
    assert prompts(table, REJECTED) == [0]
