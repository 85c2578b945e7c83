"""The coordinator's parts: the intake's rule, blocks, tables, the states of a prompt, the ends of a
run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator import intake
from engine.coordinator.blocks import Blocks, _counted, _indexed
from engine.coordinator.core import Coordinator, Settings
from engine.coordinator.messages import (
    NO_VERSION,
    ChunkDone,
    Finish,
    Produced,
    Publish,
    Ref,
    Release,
    RunChunk,
    SourceCut,
    SourceOpened,
)
from engine.coordinator.prompt_table import DROPPED, FINISHED, REJECTED, RUNNING, PromptTable
from engine.coordinator.tables import StepRows, by_prompt
from engine.plan.plan import Fetch, Plan, PlannedInput, PlannedNode, PlannedSource
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.workers import Simulation

VERSION = 7
AGES = st.lists(st.integers(0, VERSION), max_size=12)


def ages(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# --- intake ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(begun=AGES, running=AGES, batch=st.integers(1, 4), max_lag=st.integers(0, 4))
def test_exact_is_the_rule_as_it_is_written(
    begun: list[int], running: list[int], batch: int, max_lag: int
) -> None:
    chosen = intake.exact(
        ages(begun), ages(running), batch=batch, max_lag=max_lag, version=VERSION, last=False
    )
    oldest = sorted(range(len(begun)), key=lambda i: (begun[i], i))[:batch]
    left = [begun[i] for i in range(len(begun)) if i not in oldest] + running
    fits = all(
        sum(age <= s for age in left) <= max(0, batch * (s + max_lag - VERSION))
        for s in range(-1, VERSION + 1)
    )
    expected = sorted(oldest) if len(begun) >= batch and fits else []
    assert chosen.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), max_lag=st.integers(0, 3))
def test_exact_never_strands_a_group(data: st.DataObject, batch: int, max_lag: int) -> None:
    """Whatever finishes first, no group is trained too old, and when all have finished a Step can
    be formed.
    """
    begun: list[int] = []
    done: list[bool] = []
    for version in range(8):
        begun += [version] * ((1 + max_lag) * batch - len(begun))
        done += [False] * (len(begun) - len(done))
        taken = np.zeros(0, dtype=np.int64)
        finished: list[int] = []
        while not len(taken):
            waiting = [i for i, d in enumerate(done) if not d]
            assert waiting or not begun or not finished, (
                "all have finished, and no Step could be formed"
            )
            done[data.draw(st.sampled_from(waiting))] = True
            finished = [i for i, d in enumerate(done) if d]
            running = [begun[i] for i, d in enumerate(done) if not d]
            taken = intake.exact(
                ages([begun[i] for i in finished]),
                ages(running),
                batch=batch,
                max_lag=max_lag,
                version=version,
                last=False,
            )
        gone = {finished[i] for i in taken}
        assert all(version - begun[i] <= max_lag for i in gone)
        begun = [b for i, b in enumerate(begun) if i not in gone]
        done = [d for i, d in enumerate(done) if i not in gone]


def test_a_short_batch_is_taken_only_at_the_end() -> None:
    begun, none = ages([3, 3]), ages([])
    assert not len(intake.exact(begun, none, batch=4, max_lag=0, version=3, last=False))
    assert intake.exact(begun, none, batch=4, max_lag=0, version=3, last=True).tolist() == [0, 1]
    assert not len(intake.oldest(begun, batch=4, last=False))
    assert intake.oldest(begun, batch=4, last=True).tolist() == [0, 1]


def test_too_old_counts_from_the_version_that_the_step_starts_from() -> None:
    assert intake.too_old(ages([2, 3, 5]), max_lag=2, version=5).tolist() == [True, False, False]


# --- tables ---------------------------------------------------------------------------------------


def ref(keys: Keys, block: int = 1, version: int = NO_VERSION) -> Ref:
    rows = len(keys)
    return Ref(
        worker="w",
        block=block,
        keys=keys,
        lengths=np.ones(rows, dtype=np.int64),
        version=np.full(rows, version, dtype=np.int32),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30))
def test_counting_and_indexing_are_those_of_unique(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    numbers, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    assert _counted(array) == (numbers.tolist(), counts.tolist())
    found, at = _indexed(array)
    assert found == numbers.tolist()
    assert at.tolist() == index.tolist()


def test_a_block_goes_when_no_row_is_wanted_and_no_chunk_reads_it() -> None:
    blocks = Blocks()
    number = blocks.add(ref(Keys.of([0, 1]), block=9), 2)
    blocks.hold([number])
    blocks.drop(np.array([number]))
    blocks.drop(np.array([number]))
    assert blocks.drain() == {}
    blocks.let_go([number])
    assert blocks.drain() == {"w": (9,)}
    assert blocks.drain() == {}
    assert len(blocks) == 0


def test_a_block_of_which_nothing_is_wanted_goes_at_once() -> None:
    blocks = Blocks()
    blocks.add(ref(Keys.of([0]), block=3), 0)
    assert blocks.drain() == {"w": (3,)}


def test_step_rows_find_an_ancestor_by_its_ratio() -> None:
    rows = StepRows(
        Keys.of([4, 4, 6], [0, 1, 0]), np.array([7, 8, 9]), np.array([0, 1, 2], dtype=np.int32)
    )
    wanted = Keys.of([4, 6, 4], [3, 1, 0])
    block, row = rows.find(wanted, 2)
    assert block.tolist() == [8, 9, 7]
    assert row.tolist() == [1, 2, 0]
    assert rows.having(Keys.of([4, 5, 6], [3, 0, 2]), 2).rows() == [(4, 3, 0)]


def positions_of(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 4))
def test_without_lengths_chunks_are_runs_of_whole_prompts(sizes: list[int], parts: int) -> None:
    positions = positions_of(sizes)
    found = by_prompt(positions, np.zeros(len(positions), dtype=np.int64), parts)
    assert np.concatenate(found).tolist() == list(range(len(positions)))
    assert len(found) == min(parts, len(sizes))
    assert sum(len(set(positions[rows].tolist())) for rows in found) == len(sizes)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=3), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_with_lengths_chunks_are_whole_prompts_of_balanced_tokens(
    tokens: list[list[int]], parts: int
) -> None:
    positions, each = (
        positions_of([len(t) for t in tokens]),
        np.array([n for t in tokens for n in t]),
    )
    found = by_prompt(positions, each, parts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(positions)))
    assert all((np.diff(rows) > 0).all() for rows in found)
    assert sum(len(set(positions[rows].tolist())) for rows in found) == len(tokens)
    assert len(found) <= parts
    weights = [sum(t) + len(t) for t in tokens]
    heaviest = max(int((each[rows] + 1).sum()) for rows in found)
    assert heaviest <= -(-sum(weights) // parts) + max(weights)


def test_tokens_are_those_of_the_longest_input() -> None:
    blocks = Blocks(weigh=True)
    lengths = {
        n: np.array(values)
        for n, values in {"rollout": [5, 0, 7], "reward": [0, 0, 0], "ref": [2, 9, 1]}.items()
    }
    numbers = {
        n: blocks.add(replace(ref(Keys.of([0, 1, 2])), lengths=some), 3)
        for n, some in lengths.items()
    }
    rows = np.array([2, 0, 1], dtype=np.int32)
    inputs = {
        n: (blocks.reading(n, (), np.full(3, number), rows),) for n, number in numbers.items()
    }
    assert blocks.tokens(inputs, 3).tolist() == [7, 5, 9]
    assert Blocks().tokens(inputs, 3).tolist() == [0, 0, 0]


def test_a_long_prompt_has_a_chunk_to_itself() -> None:
    it, _ = lane(node("logprobs", "rollout", chunks=2))
    it.admit([0, 1, 2], [0, 0, 0], 0)
    feed(it, "prompts", Keys.of([0, 1, 2]))
    keys = Keys.of([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    it.produced("rollout", replace(ref(keys), lengths=np.array([1, 1, 50, 50, 2, 2])))
    first, second = it.pump()
    assert first.keys.position.tolist() == [0, 0, 2, 2]
    assert second.keys.position.tolist() == [1, 1]


# --- a prompt's states ----------------------------------------------------------------------------


def node(
    name: str, *gates: str, relation: str = "same", rows: int = 2, inner: int = 2, **given_: object
) -> PlannedNode:
    inputs = tuple(
        PlannedInput(name=g, gate=g, fetches=(Fetch(producer=g, columns=()),)) for g in gates
    )
    fields = {
        "operator": name,
        "work": "host",
        "scope": "row",
        "region": "stream",
        "source": "prompts",
    } | given_
    return PlannedNode(
        name=name, relation=relation, rows=rows, inner=inner, inputs=inputs, **fields
    )


PROMPTS = node("prompts", relation="source", rows=1, inner=1, work="source")
ROLLOUT = node("rollout", "prompts", relation="expand", inner=1, work="decode")


def lane(*more: PlannedNode) -> tuple[PromptTable, Blocks]:
    blocks = Blocks(weigh=True)
    return (
        PromptTable(
            "prompts", (PROMPTS, ROLLOUT, *more), [more[-1].name if more else "rollout"], blocks
        ),
        blocks,
    )


def feed(it: PromptTable, name: str, keys: Keys, version: int = NO_VERSION) -> list:
    it.produced(name, ref(keys, version=version))
    return it.pump()


def test_a_cohort_begins_when_all_of_it_is_there() -> None:
    it, _ = lane()
    assert it.admit([0, 1], [0, 0], 0).keys.rows() == [(0, 0, 0), (1, 0, 0)]
    assert feed(it, "prompts", Keys.of([1])) == []
    (ready,) = feed(it, "prompts", Keys.of([0]))
    assert ready.node.name == "rollout"
    assert ready.keys.rows() == [(0, 0, 0), (1, 0, 0)]
    assert it.count[RUNNING] == 2


def test_rows_that_come_twice_or_of_an_older_attempt_are_let_go() -> None:
    it, blocks = lane()
    it.admit([0], [1], 0)
    feed(it, "prompts", Keys.of([0], attempt=[0]))
    feed(it, "prompts", Keys.of([7]))
    assert len(blocks.drain()["w"]) == 2
    feed(it, "prompts", Keys.of([0], attempt=[1]))
    feed(it, "prompts", Keys.of([0], attempt=[1]))
    assert len(blocks.drain()["w"]) == 1


def test_a_prompt_is_as_old_as_its_oldest_row() -> None:
    it, _ = lane()
    it.admit([0], [0], 3)
    feed(it, "prompts", Keys.of([0]))
    feed(it, "rollout", Keys.of([0], [1]), version=5)
    feed(it, "rollout", Keys.of([0], [0]), version=4)
    assert it.count[FINISHED] == 1
    assert it.begun[it.slots(FINISHED)].tolist() == [4]
    assert sorted(it.versions(it.slots(FINISHED)).tolist()) == [4, 5]


def test_the_node_that_came_first_counts_for_the_age_as_well() -> None:
    it, _ = lane(node("again", "rollout"))
    it.admit([0], [0], 1)
    feed(it, "prompts", Keys.of([0]))
    feed(it, "rollout", Keys.of([0, 0], [0, 1]), version=2)
    feed(it, "again", Keys.of([0, 0], [0, 1]), version=6)
    assert it.begun[it.slots(FINISHED)].tolist() == [2]
    assert it.versions(it.slots(FINISHED)).tolist() == [2, 2]


def test_rows_of_every_generation_count_for_the_age_whatever_their_number() -> None:
    more = node("more", "prompts", relation="expand", rows=3, inner=1, work="decode")
    it = PromptTable("prompts", (PROMPTS, ROLLOUT, more), ["rollout", "more"], Blocks(weigh=True))
    it.admit([0], [0], 1)
    feed(it, "prompts", Keys.of([0]))
    feed(it, "rollout", Keys.of([0, 0], [0, 1]), version=2)
    feed(it, "more", Keys.of([0, 0, 0], [0, 1, 2]), version=6)
    assert it.versions(it.slots(FINISHED)).tolist() == [2, 2, 6, 6, 6]


def test_a_refilling_select_that_keeps_nothing_rejects_the_prompt() -> None:
    it, blocks = lane(node("keep", "rollout", relation="subset", refill=True))
    it.admit([0, 1], [0, 0], 0)
    feed(it, "prompts", Keys.of([0, 1]))
    (ready,) = feed(it, "rollout", Keys.of([0, 0, 1, 1], [0, 1, 0, 1]))
    feed(it, "keep", Keys.of([1], [1]))
    assert it.closed(ready.node, ready.keys) is None
    assert it.pump() == []
    assert it.position[it.slots(REJECTED)].tolist() == [0]
    assert it.position[it.slots(FINISHED)].tolist() == [1]
    assert it.rows("keep", it.slots(FINISHED)).keys.rows() == [(1, 1, 0)]
    it.retire(it.slots(REJECTED, FINISHED))
    assert len(blocks.drain()["w"]) == 3
    assert (it.watermark, it.outstanding) == (2, 0)


def test_a_failed_row_drops_its_group_once_and_frees_the_cohort() -> None:
    it, _ = lane(node("score", "rollout"))
    it.admit([0, 1], [0, 0], 0)
    feed(it, "prompts", Keys.of([0, 1]))
    assert feed(it, "rollout", Keys.of([0, 1, 1], [0, 0, 1])) == []
    assert it.drop("rollout", 0, 0)
    assert not it.drop("rollout", 0, 0)
    assert not it.drop("rollout", 0, 1)
    (ready,) = it.pump()
    assert ready.keys.rows() == [(1, 0, 0), (1, 1, 0)]
    assert it.position[it.slots(DROPPED)].tolist() == [0]


def test_a_chunk_that_ends_without_a_row_names_it() -> None:
    it, _ = lane()
    it.admit([0], [0], 0)
    (ready,) = feed(it, "prompts", Keys.of([0]))
    feed(it, "rollout", Keys.of([0], [0]))
    assert it.closed(ready.node, ready.keys) == (0, 1, 0)


def test_given_back_prompts_are_not_retired() -> None:
    it, _ = lane()
    it.admit([0, 1, 2], [0, 0, 0], 0)
    feed(it, "prompts", Keys.of([0, 1, 2]))
    feed(it, "rollout", Keys.of([0, 1, 2]).expand(2))
    zero, one, two = it.slots(FINISHED)
    it.retire(np.array([zero, two]))
    assert it.again(np.array([one])) == [(1, 1)]
    assert it.cut_state([(1, 1)]) == SourceCut(
        next=3, watermark=1, retired=(2,), running=((1, 0, 0),)
    )


def test_more_prompts_than_slots() -> None:
    it, blocks = lane()
    it.admit(range(300), [0] * 300, 0)
    feed(it, "prompts", Keys.of(range(300)))
    feed(it, "rollout", Keys.of(range(300)).expand(2), version=2)
    assert it.count[FINISHED] == 300
    assert (it.versions(it.slots(FINISHED)) == 2).all()
    it.retire(it.slots(FINISHED))
    assert len(blocks.drain()["w"]) == 2


def test_a_cut_is_taken_up_with_its_rows() -> None:
    it, _ = lane(node("keep", "rollout", relation="subset"))
    cut = SourceCut(
        next=9,
        watermark=4,
        retired=(6,),
        running=((5, 0, 1), (8, 0, 0)),
        finished=((4, 0, 0), (7, 0, 2)),
    )
    rows = {
        "prompts": ref(Keys.of([4, 7], attempt=[0, 2]), block=1),
        "rollout": ref(Keys.of([4, 7], attempt=[0, 2]).expand(2), block=2, version=3),
        "keep": ref(Keys.of([7], [1], [2]), block=3),
    }
    assert it.restore(cut, rows, 5) == [(5, 2), (8, 1)]
    assert it.begun[it.slots(FINISHED)].tolist() == [3, 3]
    assert it.stored("keep").keys.rows() == [(7, 1, 2)]
    assert it.cut_state([(5, 2), (8, 1)]) == cut


# --- the ends of a run ----------------------------------------------------------------------------


TRAIN = replace(node("learn", "keep", relation="sink", work="train"), region="step")
PLAN = Plan(
    graph="g",
    digest="",
    seed=0,
    nodes=(
        PROMPTS,
        ROLLOUT,
        node("keep", "rollout", relation="subset", refill=True, max_attempts=3),
        TRAIN,
    ),
    sources=(PlannedSource(name="prompts", batch=2),),
)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_filter_that_keeps_nothing_ends_the_run(max_lag: int) -> None:
    plan = replace(PLAN, sources=(replace(PLAN.sources[0], max_lag=max_lag),))
    outcomes = Outcomes(keep={"keep": 0.0})
    run = Simulation(
        plan, Settings(steps=2), rows={"prompts": 50}, timing=Timing(), outcomes=outcomes
    )
    run.begin()
    finish = run.run()
    assert finish is not None
    assert "keep kept 0 of" in finish.error
    assert not run.outbox.blocks
    admitted = sum(
        len(m.keys)
        for _, m in run.history.instructions
        if isinstance(m, RunChunk) and m.node == "prompts"
    )
    assert 6 <= admitted <= 6 + 2 * max_lag


def test_the_error_budget_ends_the_run_with_the_first_cause() -> None:
    outcomes = Outcomes(fail={"rollout": 1.0})
    run = Simulation(
        PLAN, Settings(steps=9), rows={"prompts": 50}, timing=Timing(), outcomes=outcomes
    )
    run.begin()
    finish = run.run()
    assert finish is not None
    assert "more than the error budget of 10%" in finish.error
    assert "the first: rollout row (0, " in finish.error


def test_a_stop_ends_the_run_after_the_step_under_way() -> None:
    run = Simulation(
        PLAN, Settings(steps=9), rows={"prompts": 50}, timing=Timing(), outcomes=Outcomes()
    )
    run.begin()
    run.run(until=lambda: run.coordinator.version == 2)
    run.stop("ctrl-c")  # prompts of step 3 are on their way: a synchronous run has begun it
    assert run.run() == Finish(reason="ctrl-c")
    assert run.coordinator.version == 3
    assert [s.message.step for s in run.history.stored] == [3]
    assert not run.outbox.blocks


def opened() -> tuple[Coordinator, RunChunk]:
    it = Coordinator(PLAN, Settings(steps=1))
    assert not [i for i in it.start() if not isinstance(i, Publish)]
    (chunk,) = [
        i for i in it.handle(SourceOpened(node="prompts", rows=4), 0.0) if isinstance(i, RunChunk)
    ]
    return it, chunk


def test_a_kernel_that_forgets_a_row_ends_the_run() -> None:
    it, chunk = opened()
    it.handle(Produced(chunk=chunk.id, node="prompts", ref=ref(Keys.of([0]))), 0.0)
    said = it.handle(ChunkDone(chunk=chunk.id, node="prompts"), 0.0)
    (finish,) = [i for i in said if isinstance(i, Finish)]
    assert "ended a chunk without row (position, sample, attempt) (1, 0, 0)" in finish.error


def test_rows_of_an_unknown_chunk_are_released() -> None:
    it, _ = opened()
    assert it.handle(Produced(chunk=99, node="rollout", ref=ref(Keys.of([0]), block=5)), 0.0) == [
        Release(worker="w", blocks=(5,))
    ]


def test_waiting_says_who_waits_for_whom() -> None:
    it, chunk = opened()
    it.handle(Produced(chunk=chunk.id, node="prompts", ref=ref(Keys.of([0]))), 0.0)
    lines = it.waiting()
    assert "prompts: 1 rows have not come (first: prompt 1); it reads its data" in lines
    assert "rollout: 4 rows have not come (first: prompt 0); it reads prompts" in lines
    assert "intake of prompts: 0 of 2 prompts are finished" in lines


def test_a_prompt_whose_fate_is_known_still_runs_where_others_do() -> None:
    """Else it would depend on timing whether the chunk of `second` has its rows."""
    it, _ = lane(
        node("keep", "rollout", relation="subset", refill=True),
        node("first", "rollout"),
        node("second", "first"),
        node("join", "second", "keep"),
    )
    both = Keys.of([0, 1]).expand(2)
    it.admit([0, 1], [0, 0], 0)
    feed(it, "prompts", Keys.of([0, 1]))
    keep, first = feed(it, "rollout", both)
    feed(it, "keep", Keys.of([1, 1], [0, 1]))
    assert it.closed(keep.node, keep.keys) is None
    assert it.pump() == []
    assert it.count[RUNNING] == 2
    (second,) = feed(it, "first", first.keys)
    assert second.keys.rows() == both.rows()
    (joined,) = feed(it, "second", both)
    assert joined.keys.rows() == [(1, 0, 0), (1, 1, 0)]
    assert it.position[it.slots(REJECTED)].tolist() == [0]
