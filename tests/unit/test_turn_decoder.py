"""Rows that stop, keep their keys, and go on: what they write is what one forward over the whole
row says, wherever their keys were meanwhile, and under whichever weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch import prompt_feeding
from operators.kernels.torch.models import load_model
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.static_memory import StaticMemory
from operators.kernels.torch.turns import TurnDecoder
from tests.kit.architectures import tiny
from tests.kit.decode_tasks import CUT, PLAIN, make_task, random_prompts
from tests.kit.scripted_turns import (
    Episodes,
    TurnScript,
    make_versions,
    run_script,
)
from tests.kit.turn_loops import STEPS, TinyModel, endless_task, step_until_parked
from tests.kit.turn_loops import few_sizes as few_sizes
from tests.kit.turn_loops import model as model
from tests.kit.turns import example_count

KINDS = ["gemma2", "gemma3", "gpt2", "gpt_oss", "mistral-window", "opt", "qwen3_moe"]
"""Architectures with each way of attention, positions and experts."""


@STEPS
@settings(max_examples=example_count(30), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    shared=st.sampled_from([0, 9]),
    n=st.integers(1, 4),
    slots=st.integers(1, 10),
    budget=st.sampled_from([4, 24, 500]),
    parked=st.sampled_from([0, 1, 30, 90]),
    how=st.sampled_from([PLAIN, CUT]),
    script=st.builds(
        TurnScript,
        seed=st.integers(0, 1000),
        turns=st.integers(1, 4),
        longest=st.sampled_from([1, 9, 25]),
        delay=st.integers(0, 6),
        renewals=st.sets(st.integers(1, 25), max_size=2).map(tuple),
    ),
)
def test_rows_are_those_of_one_forward_over_each_whole_row(
    model: TinyModel,
    static: bool,
    lengths: list[int],
    shared: int,
    n: int,
    slots: int,
    budget: int,
    parked: int,
    how: Sampling,
    script: TurnScript,
) -> None:
    prompts = random_prompts(lengths, shared)
    task = make_task(prompts, n=n, slots=slots, how=how, budget=budget)
    task = replace(task, parked=parked)
    episodes = model.run(task, script, static)
    model.require_contract(task, episodes)
    model.run(task, script, static).require_same_bits(episodes)


@STEPS
@pytest.mark.parametrize("parked", [0, 40])
@pytest.mark.parametrize("name", KINDS)
def test_each_way_of_attention_goes_on_as_it_began(
    tmp_path: Path, name: str, parked: int, static: bool
) -> None:
    model = TinyModel(str(tiny(name, tmp_path, tied=False)))
    task = make_task(random_prompts([12, 3, 8], 9), n=3, slots=5, budget=40, how=PLAIN)
    task = replace(task, parked=parked)
    episodes = model.run(task, TurnScript(turns=4, longest=15, renewals=(9, 23)), static)
    assert episodes.turns.max() == 4
    assert set(episodes.written.versions[episodes.written.tokens > 0]) == {0, 1, 2}
    model.require_contract(task, episodes)


@STEPS
@pytest.mark.parametrize("shared", [0, 9])
def test_rows_that_end_before_any_step_are_fed_in_parts_beside_each_other(
    model: TinyModel, static: bool, shared: int
) -> None:
    """Rows without any keys park and go on, a long one in several parts, which need more room than
    those behind it.
    """
    for slots in (7, 8):
        prompts = random_prompts([1, 1], shared)
        task = make_task(prompts, n=4, slots=slots, budget=4, how=PLAIN)
        episodes = model.run(task, TurnScript(seed=338, turns=2, delay=0), static)
        model.require_contract(task, episodes)


@STEPS
@settings(max_examples=example_count(9), deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 4), slots=st.integers(1, 8))
def test_greedy_rows_are_the_same_whatever_was_evicted(
    model: TinyModel, static: bool, seed: int, n: int, slots: int
) -> None:
    script = TurnScript(seed=seed)
    prompts = random_prompts([5, 13, 2], 0)
    task = make_task(prompts, n=n, slots=slots, how=Sampling(temperature=0.0))
    unevicted = model.run(task, script, static)
    for parked in (1, 35, 70):
        evicted = model.run(replace(task, parked=parked), script, static)
        assert evicted.list_completions() == unevicted.list_completions()


@STEPS
def test_parked_keys_stay_within_their_bound_and_what_is_evicted_is_counted(
    model: TinyModel, static: bool
) -> None:
    script = TurnScript(turns=4, delay=9)
    task = make_task(random_prompts([9, 4, 6], 9), n=4, slots=6, how=Sampling())
    again: list[int] = []
    for parked in (0, 120, 60, 1):
        loop = model.make_loop(replace(task, parked=parked), static)
        most = note_most_parked(loop)
        run_script(loop, script, model.module, model.versions)
        keys: Any = loop._step._parked  # type: ignore[attr-defined]
        assert (keys.tokens, keys._rows, keys._prompts) == (0, {}, {})
        assert 0 < most[0] <= (parked or 10_000) or parked == 1
        again.append(loop.counts.again)
    assert again == sorted(set(again)), "the less room, the more is computed again"
    assert again[0] == 0


def note_most_parked(loop: TurnDecoder) -> list[int]:
    """The most tokens of parked keys that there were after a step so far."""
    most, record = [0], loop._record

    def record_and_note(drawn: Any) -> np.ndarray:
        ended = record(drawn)
        keys: Any = loop._step._parked  # type: ignore[attr-defined]
        most[0] = max(most[0], keys.tokens)
        return ended

    loop._record = record_and_note  # type: ignore[method-assign]
    return most


@STEPS
def test_what_is_computed_again_is_what_had_been_computed(model: TinyModel, static: bool) -> None:
    """One row of a prompt of 6 tokens: 4 tokens written, 3 of them fed; nothing is kept of it."""
    for parked, again in ((0, 0), (1, 9)):
        task = replace(endless_task([6]), parked=parked)
        loop = model.make_loop(task, static)
        loop.written.limit[:] = 4
        step_until_parked(loop)
        loop.extend(np.array([0]), [np.array([7, 8, 9], np.int32)], np.array([9], np.int32))
        step_until_parked(loop)
        assert loop.counts.again == again
        assert loop.written.length.tolist() == [9]
        if parked == 0:
            loop.renew(1)
            assert loop.counts.again == 0, "parked keys are computed again when the row goes on"
            loop.extend(np.array([0]), [np.array([7], np.int32)], np.array([11], np.int32))
            step_until_parked(loop)
            assert loop.counts.again == 6 + 8


@STEPS
def test_parked_rows_are_in_no_step(model: TinyModel, static: bool) -> None:
    """Each forward of a step has the live rows alone, and its prompts are those of live rows."""
    loop = model.make_loop(endless_task([5] * 8, n=2, max_tokens=9), static)
    loop.written.limit[:] = 3
    loop.written.limit[:4] = 9
    ended = [loop.step().tolist() for _ in range(3)]
    assert ended == [[], [], [*range(4, 16)]]
    loop.step()  # at fixed places it had been started with all rows
    before = replace(loop.counts)
    loop.step()
    assert loop.counts.rows - before.rows == 4
    assert loop.counts.padded == before.padded
    if not static:
        assert len(loop._step._prompt) == 2  # type: ignore[attr-defined]
        assert loop._step.rows.tolist() == [0, 1, 2, 3]


@STEPS
def test_many_rows_are_extended_in_one_pass(
    model: TinyModel, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_feeding, "PASS_TOKENS", 128)
    loop = model.make_loop(endless_task([5, 9, 2], n=4, max_tokens=4, budget=300), static)
    step_until_parked(loop)
    passes = note_passes(monkeypatch)
    rows, lengths = np.arange(12), 1 + np.arange(12) % 5
    answers = [np.full(length, 11, np.int32) for length in lengths]
    loop.extend(rows, answers, (5 + lengths).astype(np.int32))
    assert loop.step().tolist() != []
    assert passes == [12 + lengths.sum()]


def note_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward has from here on."""
    passes: list[int] = []
    for name in ("forward", "compute_hidden"):
        real = getattr(prompt_feeding, name)

        def noted(module: Any, ids: torch.Tensor, *rest: Any, real: Any = real, **more: Any) -> Any:
            passes.append(len(ids))
            return real(module, ids, *rest, **more)

        monkeypatch.setattr(prompt_feeding, name, noted)
    return passes


@STEPS
@pytest.mark.parametrize("most", [7, 1024])
def test_a_long_answer_is_fed_in_parts_of_the_budget(
    model: TinyModel, static: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_feeding, "MOST_PIECE", most)
    task = endless_task([5, 6], max_tokens=3, budget=16)
    loop = model.make_loop(task, static)
    step_until_parked(loop)
    passes = note_passes(monkeypatch)
    draw = np.random.default_rng(0)
    answers = [draw.integers(7, 95, length).astype(np.int32) for length in (50, 4)]
    loop.extend(np.arange(2), answers, np.array([60, 8], np.int32))
    loop.step()
    assert max(passes) <= min(most, 16)
    assert sum(passes) == 51 + 5
    step_until_parked(loop)
    episodes = Episodes(loop.written, np.zeros((2, 80), bool), np.zeros(2, np.int64))
    episodes.given[0, 3:53] = episodes.given[1, 3:7] = True
    model.require_contract(task, episodes)


@STEPS
def test_rows_go_on_in_the_order_of_calls_and_before_others_begin(
    model: TinyModel, static: bool
) -> None:
    loop = model.make_loop(endless_task([3] * 5, slots=1, max_tokens=1), static)
    first = [loop.step().tolist() for _ in range(3)]
    assert first == [[0], [1], [2]]
    token, limit = [np.array([7], np.int32)], np.array([4, 4], np.int32)
    loop.extend(np.array([2]), token, limit[:1])
    loop.extend(np.array([1, 0]), token * 2, limit)
    assert step_until_parked(loop) == [2, 0, 1, 3, 4]
    assert loop.step().tolist() == []


def test_rows_that_are_not_parked_are_refused(model: TinyModel) -> None:
    loop = model.make_loop(endless_task([3, 3, 3], slots=2, max_tokens=2), static=False)
    loop.step()
    rows, token, limit = np.array([0]), [np.array([7], np.int32)], np.array([9], np.int32)
    with pytest.raises(KernelError, match=r"row 0: expected a parked row to extend, .* live"):
        loop.extend(rows, token, limit)
    with pytest.raises(KernelError, match=r"row 1: expected a parked row to drop, found .* live"):
        loop.drop(np.array([1]))
    with pytest.raises(KernelError, match=r"row 2: expected a parked row to drop, .* unbegun"):
        loop.drop(np.array([2]))
    loop.step()
    for ids, its_limit in (([np.zeros(0, np.int32)], limit), (token, limit - 6)):
        with pytest.raises(KernelError, match="row 0: expected at least one token to extend it by"):
            loop.extend(rows, ids, its_limit)
    loop.drop(rows)
    with pytest.raises(KernelError, match="found one that is dropped"):
        loop.extend(rows, token, limit)
    assert step_until_parked(loop) == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parked", [0, 60])
def test_graphs_of_a_card_write_what_shared_keys_write(base: str, parked: int) -> None:
    """Rows go on in slots that others had, under graphs that were captured before."""
    module = load_model(Model("policy", base), "cuda")
    versions = make_versions(module, 1)
    how = Sampling(temperature=0.0)
    task = make_task(random_prompts([9, 4, 6], 9), n=4, slots=6, how=how, budget=64)
    task, script = replace(task, parked=parked), TurnScript(turns=4)
    memory = StaticMemory(module)
    completions: list[list[list[int]]] = []
    for static in (None, memory, memory):
        loop = TurnDecoder(module, task, static=static)
        episodes = run_script(loop, script, module, versions)
        completions.append(episodes.list_completions())
    assert completions[0] == completions[1] == completions[2]
    assert memory.steps.captures > 0
