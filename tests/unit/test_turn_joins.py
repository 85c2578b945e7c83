"""Rows that join a loop of turns at any step: what they write is what one forward over the whole
row says, and the loop keeps nothing of rows that have left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kernels.decoding import DecodeTask
from operators.kernels.torch.sampling import Sampling
from tests.kit.decode_tasks import CUT, PLAIN, make_task, random_prompts
from tests.kit.scripted_turns import Episodes, TurnScript, merge_tasks
from tests.kit.turn_loops import STEPS, TinyModel, endless_task, step_until_parked
from tests.kit.turn_loops import few_sizes as few_sizes
from tests.kit.turn_loops import model as model
from tests.kit.turns import example_count


@STEPS
@settings(max_examples=example_count(30), deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=2, max_size=5),
    shared=st.lists(st.sampled_from([0, 9, 14]), min_size=5, max_size=5),
    counts=st.lists(st.integers(1, 4), min_size=15, max_size=15),
    steps=st.lists(st.integers(0, 40), min_size=4, max_size=4, unique=True),
    slots=st.integers(1, 10),
    budget=st.sampled_from([4, 24, 500]),
    parked=st.sampled_from([0, 1, 30, 90]),
    how=st.sampled_from([PLAIN, CUT]),
    renewals=st.sets(st.integers(1, 30), max_size=2).map(tuple),
    seed=st.integers(0, 1000),
)
def test_rows_that_join_at_any_step_are_those_of_one_forward_over_each_whole_row(
    model: TinyModel,
    static: bool,
    lengths: list[list[int]],
    shared: list[int],
    counts: list[int],
    steps: list[int],
    slots: int,
    budget: int,
    parked: int,
    how: Sampling,
    renewals: tuple[int, ...],
    seed: int,
) -> None:
    tasks: list[DecodeTask] = []
    for number, prompt_lengths in enumerate(lengths):
        prompts = random_prompts(prompt_lengths, shared[number])
        task = make_task(prompts, slots=slots, how=how, budget=budget)
        row_counts = np.array(counts[3 * number :][: len(prompts)], np.int64)
        seeds = (np.arange(row_counts.sum()) + 16 * number).astype(np.uint64) << np.uint64(50)
        tasks.append(replace(task, parked=parked, counts=row_counts, seeds=seeds))
    first, *others = tasks
    joining = dict(sorted(zip(steps, others, strict=False)))
    in_order = [first, *joining.values()]
    script = TurnScript(seed=seed, turns=3, delay=4, renewals=renewals)
    episodes = model.run(first, script, static, joining)
    model.require_contract(merge_tasks(in_order), episodes)
    model.run(first, script, static, joining).require_same_bits(episodes)


@STEPS
def test_parked_rows_go_on_where_their_prompts_share_less_than_before(
    model: TinyModel, static: bool
) -> None:
    """All rows are parked when a prompt comes that begins otherwise."""
    task = endless_task([5, 3], max_tokens=40)
    task = replace(task, prompts=random_prompts([5, 3], shared=12))
    other = replace(task, prompts=random_prompts([7], shared=0), seeds=task.seeds[:1] + 1)
    loop = model.make_loop(task, static)
    loop.written.limit[:] = 4
    step_until_parked(loop)
    joined = loop.join(other)
    loop.written.limit[joined] = 6
    given = [np.array([7, 8, 9], np.int32), np.array([10], np.int32)]
    loop.extend(np.array([0, 1]), given, np.array([11, 9], np.int32))
    step_until_parked(loop)
    episodes = Episodes(loop.written, np.zeros((3, 40), bool), np.zeros(3, np.int64))
    episodes.given[0, 4:7] = episodes.given[1, 4] = True
    # The numbers of those rows that joined follow those of the task.
    assert joined.tolist() == [2]
    model.require_contract(merge_tasks([task, other]), episodes)


@STEPS
def test_a_loop_that_never_ends_keeps_what_is_in_it_alone(model: TinyModel, static: bool) -> None:
    """A hundred tasks of which two are there at a time."""
    task = endless_task([5, 9], n=2, slots=4, max_tokens=3)
    loop = model.make_loop(task, static)
    ended = [step_until_parked(loop)]
    for _ in range(100):
        rows = loop.join(task)
        loop.drop(np.array(ended.pop()))
        ended.append(step_until_parked(loop))
        assert sorted(ended[-1]) == rows.tolist()
    assert len(loop.written.length) <= 10
    assert len(loop._step._lengths) <= 6  # type: ignore[attr-defined]
    assert len(loop._queue._states) <= 10
