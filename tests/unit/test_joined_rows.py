"""Tasks that join a decode loop at any step: the rows that they are alone, by both steps; numbers
are given again; and the order in which rows enter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from dataflow.model import Model
from operators.kernels.decoding import DecodeTask
from operators.kernels.row_queue import RowQueue
from operators.kernels.torch import static_step
from operators.kernels.torch.cache import Cache, Level
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.models import load_model
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.static_memory import StaticMemory
from tests.kit.decode_tasks import CUT, PLAIN, make_task, random_prompts, written_by
from tests.kit.rows import ragged
from tests.kit.turns import example_count

Row = tuple[list[int], list[float], list[int]]
"""Tokens, log-probs and versions."""


@pytest.fixture(scope="module")
def module(base: str) -> PreTrainedModel:
    return load_model(Model("policy", base), "cpu")


def copy_row(decoder: Decoder, row: int) -> Row:
    written, length = decoder.written, int(decoder.written.length[row])
    parts = (written.tokens, written.logprobs, written.versions)
    tokens, logprobs, versions = (part[row, :length].tolist() for part in parts)
    return tokens, logprobs, versions


def write_joined(
    decoder: Decoder, first: DecodeTask, joins: list[tuple[int, DecodeTask]], renewals: set[int]
) -> list[list[Row]]:
    """The rows of each task. joins: before which step a task comes, ascending, or once no row is
    left; renewals: before which steps all keys are computed again.
    """
    row_of: dict[int, tuple[int, int]] = {row: (0, row) for row in range(len(first.seeds))}
    rows: list[dict[int, Row]] = [{}]
    waiting, step = list(joins), 0
    while row_of or waiting:
        while waiting and (waiting[0][0] <= step or not row_of):
            task = waiting.pop(0)[1]
            for place, number in enumerate(decoder.join(task).tolist()):
                assert number not in row_of
                row_of[number] = len(rows), place
            rows.append({})
        for ended in decoder.write_rows(lambda: True):
            if not len(ended):  # before a step
                if step in renewals:
                    decoder.renew(step)
                step += 1
                if waiting and waiting[0][0] <= step:
                    break
                continue
            for number in ended.tolist():
                index, place = row_of.pop(number)
                rows[index][place] = copy_row(decoder, number)
            decoder.release(ended)
    return [[task_rows[place] for place in range(len(task_rows))] for task_rows in rows]


def write_alone(module: PreTrainedModel, task: DecodeTask) -> list[Row]:
    decoder = Decoder(module, task)
    written_by(decoder)
    return [copy_row(decoder, row) for row in range(len(task.seeds))]


tasks = st.tuples(
    st.lists(st.integers(1, 14), min_size=1, max_size=4),  # lengths of prompts
    st.sampled_from([0, 0, 9, 12]),  # what they share
    st.lists(st.integers(1, 4), min_size=4, max_size=4),  # rows of each
    st.booleans(),  # whether they have weights
    st.integers(0, 40),  # before which step it comes
)


def task_of(drawn: Any, how: Sampling, slots: int, number: int) -> DecodeTask:
    lengths, shared, counts, weighs, _ = drawn
    prompts = random_prompts(lengths, shared)
    draw = np.random.default_rng(number)
    task = make_task(prompts, slots=slots, how=how, max_tokens=12)
    rows = sum(counts[: len(lengths)])
    return replace(
        task,
        counts=np.array(counts[: len(lengths)], np.int64),
        weights=draw.random(len(lengths)).astype(np.float32) if weighs else None,
        seeds=draw.integers(0, 1 << 63, rows).astype(np.uint64),
    )


@settings(max_examples=example_count(20), deadline=None)
@given(
    drawn=st.lists(tasks, min_size=2, max_size=5),
    slots=st.integers(1, 10),
    how=st.sampled_from([PLAIN, CUT, Sampling(temperature=0.0)]),
    renewals=st.sets(st.integers(1, 40), max_size=2),
    static=st.booleans(),
)
def test_rows_that_join_are_those_that_they_are_alone(
    module: PreTrainedModel,
    drawn: list[Any],
    slots: int,
    how: Sampling,
    renewals: set[int],
    static: bool,
) -> None:
    drawn = [drawn[0], *sorted(drawn[1:], key=lambda each: each[-1])]
    made = [task_of(each, how, slots, number) for number, each in enumerate(drawn)]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(static_step, "FEWEST_ROWS", 1)
        patch.setattr(static_step, "FEWEST_KEYS", 4)
        decoder = Decoder(module, made[0], static=StaticMemory(module) if static else None)
        joins = [(each[-1], task) for each, task in zip(drawn[1:], made[1:], strict=True)]
        together = write_joined(decoder, made[0], joins, renewals)
    for task, rows in zip(made, together, strict=True):
        for row, alone in zip(rows, write_alone(module, task), strict=True):
            assert row[0] == alone[0]
            # Sums over other numbers of places round differently, by the size of what they sum.
            np.testing.assert_allclose(row[1], alone[1], rtol=1e-5, atol=1e-5)
    present = max(len(task.seeds) for task in made) * 5
    assert len(decoder.written.length) <= present


@pytest.mark.parametrize("static", [False, True])
def test_what_all_prompts_share_becomes_what_joined_ones_share_too(
    module: PreTrainedModel, static: bool
) -> None:
    beginning = list(range(10, 22))
    first = make_task(ragged([[*beginning, 30], [*beginning, 31, 32]]), n=2, slots=3)
    near = make_task(ragged([[*beginning[:9], 40], [*beginning[:10], 41]]), n=1, slots=3)
    other = make_task(ragged([[50, 51, 52]]), n=2, slots=3)
    decoder = Decoder(module, first, static=StaticMemory(module) if static else None)
    prefixes = [decoder._step._feeder.prefix]  # type: ignore[attr-defined]
    real_join = decoder.join

    def join(task: DecodeTask) -> np.ndarray:
        rows = real_join(task)
        prefixes.append(decoder._step._feeder.prefix)  # type: ignore[attr-defined]
        return rows

    decoder.join = join  # type: ignore[method-assign]
    together = write_joined(decoder, first, [(3, near), (60, other)], set())
    assert prefixes == [12, 9, 0]
    for task, rows in zip((first, near, other), together, strict=True):
        for row, alone in zip(rows, write_alone(module, task), strict=True):
            assert row[0] == alone[0]
            # Sums over other numbers of places round differently, by the size of what they sum.
            np.testing.assert_allclose(row[1], alone[1], rtol=1e-5, atol=1e-5)


def test_a_loop_without_an_end_keeps_what_is_in_it(module: PreTrainedModel) -> None:
    for static in (None, StaticMemory(module)):
        task = make_task(random_prompts([5, 3, 8], 0), n=2, slots=4, max_tokens=6)
        decoder = Decoder(module, task, static=static)
        joins = [(step, task) for step in range(3, 480, 16)]
        assert len(write_joined(decoder, task, joins, {50})) == 31
        # Of 31 tasks of 6 rows, those of at most four at once.
        assert len(decoder.written.length) <= 24
        assert len(decoder._step._rows._ids) <= 12  # type: ignore[attr-defined]


def test_rows_enter_by_weight_and_those_of_a_prompt_together() -> None:
    queue = RowQueue()
    queue.add(np.arange(6), np.array([0, 0, 1, 1, 2, 2]), np.array([1, 1, 5, 5, 5, 5], np.float32))
    assert queue.take(1).tolist() == [2]
    queue.add(np.array([9, 8]), np.array([4, 3]), np.array([7, 5], np.float32))
    assert queue.take(2).tolist() == [3, 9], "its prompt has been fed"
    assert queue.take(9).tolist() == [4, 5, 8, 0, 1], "ties in the order in which they came"
    assert (queue.count, queue.take(1).tolist()) == (0, [])
    queue.add(np.array([7, 3, 1]), np.array([0, 0, 5]))
    assert queue.take(3).tolist() == [7, 3, 1]


def test_a_shorter_prefix_moves_its_rest_to_each_prompt() -> None:
    keys = torch.arange(6.0).view(1, 1, 3, 2)
    rest = torch.arange(100.0, 108.0).view(2, 1, 2, 2)
    cache = Cache(prefix=3, prefixes={0: Level(keys, keys)}, prompts={0: Level(rest, -rest)})
    cache.shorten_prefix(1)
    assert cache.prefixes[0].keys.flatten().tolist() == [0.0, 1.0]
    assert cache.prompts[0].keys[0].flatten().tolist() == [2.0, 3.0, 4.0, 5.0, *range(100, 104)]
    assert cache.prompts[0].values[1].flatten().tolist()[4:] == [-104.0, -105.0, -106.0, -107.0]
    cache.shorten_prefix(0)
    assert (cache.prefix, cache.prefixes) == (0, {})
    assert cache.prompts[0].keys.shape[2] == 5
