"""Rows in several turns on an engine: their tokens and numbers, what is cached, and the order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Keys
from dataflow.errors import DataError, KernelError
from operators.kernels.decoding import DecodeTask
from operators.kernels.vllm.sampling_processor import make_vllm_params
from operators.kernels.vllm.startup import BLOCK
from operators.kernels.vllm.turns import VllmTurnDecoder
from tests.kit.decode_tasks import CUT, PLAIN, make_task, random_prompts
from tests.kit.generate_suite import weights_of
from tests.kit.rows import padded_logprobs, plain
from tests.kit.turn_schedules import (
    TURN,
    answer_of,
    answer_rows,
    batch_of,
    completions_of,
    numbers_of,
    write_plainly,
    write_round,
    write_turns,
)
from tests.vllm.conftest import TENSOR

TURNS = 3
PROMPTS = random_prompts([40, 70, 5], shared=40)
TASK = make_task(PROMPTS, n=3, slots=4)

Begin = Callable[[DecodeTask], VllmTurnDecoder]


@pytest.fixture
def begin(make: Any) -> Any:
    """Begins a task on the engine, which has forgotten what others computed."""
    engine = make()._engine
    loops: list[VllmTurnDecoder] = []

    def begun(task: DecodeTask) -> VllmTurnDecoder:
        engine.forget()
        loops.append(VllmTurnDecoder(engine, task, engine.version))
        return loops[-1]

    yield begun
    for loop in loops:
        loop.close()
    assert engine.idle


def logprobs_by_version(bases: list[str], task: DecodeTask, loop: VllmTurnDecoder) -> np.ndarray:
    """float32: of each token by a forward of its whole row under its version, 0 if it was given."""
    rows = batch_of(task, loop.written)
    versions = np.concatenate(numbers_of(loop.written)["versions"])
    expected = np.zeros(len(versions), np.float32)
    with torch.no_grad():
        for version, base in enumerate(bases):
            computed = torch.cat(padded_logprobs(plain(base), rows, task.how.temperature)).numpy()
            expected = np.where(versions == version, computed, expected)
    return np.where(np.concatenate(numbers_of(loop.written)["logprobs"]) == 0.0, 0.0, expected)


def require_near(loop: VllmTurnDecoder, expected: np.ndarray, tolerance: float) -> None:
    recorded = np.concatenate(numbers_of(loop.written)["logprobs"])
    np.testing.assert_allclose(recorded, expected, atol=tolerance)


@pytest.mark.parametrize("task", [replace(TASK, stopped=None), replace(TASK, how=CUT)])
def test_turns_are_those_of_a_plain_loop_and_log_probs_those_of_a_whole_row(
    begin: Begin, base: str, tolerance: float, task: DecodeTask
) -> None:
    loop = begin(task)
    write_turns(loop, TURNS)
    assert completions_of(loop.written) == write_plainly(plain(base), task, TURNS)
    require_near(loop, logprobs_by_version([base], task, loop), tolerance)
    assert (loop.written.mass is not None) == task.how.truncates


def test_a_later_turn_finds_all_whole_blocks_of_the_earlier_ones(begin: Begin) -> None:
    loop = begin(replace(TASK, slots=8))
    steps = loop._engine.step
    cached: dict[int, int] = {}

    def noted_step() -> Any:
        tokens = steps()
        for token in tokens:
            if token.cached is not None:
                cached[loop._live[token.request]] = token.cached
        return tokens

    loop._engine.step = noted_step  # type: ignore[method-assign]
    rows = write_round(loop)
    computed = loop._count_tokens(rows) - 1
    answer_rows(loop, rows, 0)
    cached.clear()
    write_round(loop)
    del loop._engine.step
    assert [cached[row] for row in rows] == (computed // BLOCK * BLOCK).tolist()
    assert loop.counts.again == (computed % BLOCK).sum()


def test_new_weights_within_and_between_turns(
    begin: Begin, make: Any, base: str, other: str, tolerance: float
) -> None:
    loop = begin(make_task(PROMPTS, n=2, slots=8))
    rows = write_round(loop)
    computed = int((loop._count_tokens(rows) - 1).sum())
    kernel = make()

    def load(version: int) -> None:
        kernel.load(weights_of((base, other)[version % 2]), version)
        loop.renew(version)

    load(1)
    answer_rows(loop, rows, 0)
    for _ in range(5):
        loop.step()
    live = np.array(list(loop._live.values()))
    # Blocks that one row computes for others: the first of all six, three more of two each.
    shared = (5 + 3) * BLOCK
    assert loop.counts.again == computed - shared
    before = loop.counts.again
    load(2)
    assert loop.counts.again - before == loop._count_tokens(live).sum()
    write_round(loop)
    versions = numbers_of(loop.written)["versions"]
    assert {version for row in versions for version in row} == {0, 1, 2}
    require_near(loop, logprobs_by_version([base, other, base], loop._task, loop), tolerance)


def test_rows_that_compute_their_keys_again_draw_the_same_tokens(begin: Begin) -> None:
    expected = begin(TASK)
    write_turns(expected, TURNS)
    loop = begin(TASK)
    steps = count()

    def forget_sometimes() -> None:
        if next(steps) % 5 == 0:
            loop._engine.forget()
            loop.renew(0)

    write_turns(loop, TURNS, after_step=forget_sometimes)
    assert completions_of(loop.written) == completions_of(expected.written)


def make_long_rows(rows: int) -> DecodeTask:
    """Rows of more than 380 tokens that have nothing in common."""
    return make_task(random_prompts([380] * rows, shared=0), slots=8)


def test_weights_that_come_within_the_prefill_of_a_turn_are_counted_once(begin: Begin) -> None:
    """Of eight rows the engine takes five at once."""
    loop = begin(make_long_rows(8))
    rows = write_round(loop)
    computed = loop._count_tokens(rows) - 1
    loop._engine.forget()
    answer_rows(loop, rows, 0)
    ended = loop.step()
    has_begun = loop.written.length[rows] > loop.written.begin[rows]
    assert 0 < has_begun.sum() < len(rows)
    loop._engine.forget()
    writing = rows[has_begun & ~np.isin(rows, ended)]
    again = computed.sum() + loop._count_tokens(writing).sum()
    loop.renew(0)
    write_round(loop)
    assert loop.counts.again == again


def test_equal_calls_give_equal_bits_where_vllm_evicts(begin: Begin) -> None:
    """Rows that together have more tokens than the engine has keys for."""
    rows = 12 * TENSOR
    task = make_long_rows(rows)
    first = begin(task)
    write_turns(first, TURNS)
    write_turns(begin(TASK), 1)
    for _ in range(3):  # in the order of a set one of several is the same by chance
        later = begin(task)
        write_turns(later, TURNS)
        assert numbers_of(later.written) == numbers_of(first.written)
        assert later.counts == first.counts
    assert first.counts.again > rows * TURNS * BLOCK, "nothing was evicted"


def step_until_ended(loop: VllmTurnDecoder) -> list[int]:
    """The rows that end next."""
    while True:
        rows = loop.step()
        if len(rows):
            return rows.tolist()


def test_rows_with_answers_go_before_rows_that_were_not_begun(begin: Begin) -> None:
    loop = begin(replace(TASK, slots=1))
    order = step_until_ended(loop) + step_until_ended(loop)
    for row in (1, 0):
        answer_rows(loop, np.array([row]), 0)
    for _ in range(3):
        order += step_until_ended(loop)
    assert order == [0, 1, 1, 0, 2]


def test_dropped_rows_write_nothing_more(begin: Begin) -> None:
    loop = begin(replace(TASK, slots=2))
    rows = np.array(step_until_ended(loop))
    lengths = loop.written.length[rows]
    loop.drop(rows)
    ended = write_round(loop)
    assert set(ended) == set(range(9)) - set(rows)
    assert (loop.written.length[rows] == lengths).all()
    with pytest.raises(KernelError, match=f"row {rows[0]} of a task: expected a parked row to ext"):
        answer_rows(loop, rows[:1], 0)
    with pytest.raises(KernelError, match="of a task: expected a parked row to drop"):
        loop.drop(rows)


def test_rows_that_join_are_those_of_a_plain_loop(begin: Begin, base: str) -> None:
    """Those of another task come in the middle of a turn, and go by the numbers of dropped ones."""
    loop = begin(TASK)
    other = replace(TASK, prompts=random_prompts([9, 30, 12], shared=17), n=1, seeds=TASK.seeds[:3])
    rows = np.array(step_until_ended(loop))
    loop.drop(rows)
    joined = loop.join(other)
    assert set(joined[: len(rows)]) == set(rows)
    write_round(loop)
    answers = [answer_of(place, 0) for place in range(3)]
    limits = loop.written.length[joined] + [len(ids) for ids in answers] + TURN
    loop.extend(joined, answers, limits)
    write_round(loop)
    completions = completions_of(loop.written)
    plainly = write_plainly(plain(base), other, 2)
    assert [completions[row] for row in joined.tolist()] == plainly


def test_the_sampler_of_vllm_draws_each_turn_anew(
    begin: Begin, base: str, tolerance: float
) -> None:
    task = replace(TASK, sampler="vllm")
    loop = begin(task)
    write_turns(loop, TURNS)
    require_near(loop, logprobs_by_version([base], task, loop), tolerance)
    how = {"how": PLAIN, "max_tokens": 1, "stop_token_ids": []}
    seeds = [make_vllm_params(7, place=place, **how).seed for place in (0, 5, 6)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_a_row_for_which_the_engine_has_no_room_is_an_error(begin: Begin) -> None:
    loop = begin(TASK)
    rows = write_round(loop)
    ids = [np.array([9], np.int32)] * len(rows)
    loop.extend(rows, ids, np.full(len(rows), loop._engine.size.length, np.int32))
    with pytest.raises(KernelError, match=r"at most 512 tokens.* found one of up to \d+\. Fix: "):
        loop.step()


def test_a_bound_on_whole_rows_is_the_room_of_every_prompt(make: Any) -> None:
    keys, prompts = Keys.of(range(3)), random_prompts([40, 480, 5], shared=0)
    make(max_context=512)._require_room(keys, prompts)
    unbound = make(max_context=None, max_tokens=64)
    with pytest.raises(DataError, match=r"at most 448 tokens.* found 480\..*max_context=512, for"):
        unbound._require_room(keys, prompts)
