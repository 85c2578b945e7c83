"""The torch kernel of generate: transformers' tokens and log-probs, however rows are batched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Layout
from dataflow.model import Model
from operators.kernels.text import to_ragged
from operators.kernels.torch import prompt_feeding, shared_step
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import pieces
from operators.kernels.torch.prompt_feeding import common_prefix
from tests.kit.generate_suite import (
    MIXED,
    PREFIXED,
    generated,
    greedy_by,
    require_logprobs_by_version,
    tokens_of,
    weights_of,
)
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk
from tests.kit.models import save_tiny
from tests.kit.rows import plain


def opened(base: str | Model, **given: Any) -> TorchGenerate:
    kernel = open_kernel(TorchGenerate(), base, **{"n": 1, "max_tokens": 12} | given)
    kernel._static = None  # the step with shared keys, on a card too
    return kernel


def test_rows_do_not_depend_on_slots_budget_company_or_order(base: str) -> None:
    prompts, how = MIXED + PREFIXED, {"n": 5, "max_tokens": 9}
    kernel = opened(base, **how)
    whole = tokens_of(generated(kernel, prompts))
    assert len({tuple(t) for t in whole.values()}) > len(whole) // 2
    narrow = opened(base, layout=Layout(slots=3, tokens=8), **how)
    assert tokens_of(generated(narrow, prompts)) == whole
    last, first = generated(kernel, PREFIXED, range(5, 9)), generated(kernel, MIXED, range(5))
    assert tokens_of(last) | tokens_of(first) == whole
    assert tokens_of(generated(kernel, prompts[::-1], range(9)[::-1])) == whole


def test_prompts_without_tokens_end_the_run_or_are_given_up(base: str) -> None:
    prompts = ["", "ab", ""]
    session = FakeSession()
    kernel = opened(base, session=session, n=2, empty_prompt="drop")
    batch = generated(kernel, prompts, [4, 5, 6])
    assert batch.keys.position.tolist() == [5, 5]
    assert [key for key, _ in session.tombstones] == [(4, 0, 0), (6, 0, 0)]
    assert session.metrics["prompt/empty"] == [(2 / 3, 3)]
    message = r"row \(4, 0, 0\): expected at least one token in its prompt, found none. Fix: "
    with pytest.raises(DataError, match=message):
        generated(opened(base), prompts, [4, 5, 6])


def test_bfloat16_weights_generate_too(base: str) -> None:
    model = Model("policy", base, dtype="bfloat16")
    kernel = opened(model, layout=Layout(slots=3), n=2, temperature=0.0)
    batch = generated(kernel, MIXED + PREFIXED)
    assert np.isfinite(batch.ragged("sampler_logprobs").values).all()
    assert len(batch) == 18
    assert (batch.ragged("completion_ids").lengths >= 1).all()


def noting(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, note: Callable[..., object]
) -> None:
    """Have each call of this function of a module noted first."""
    real = getattr(module, name)

    def noted(*args: Any) -> Any:
        note(*args)
        return real(*args)

    monkeypatch.setattr(module, name, noted)


def test_small_steps_take_one_thread_large_ones_all_and_the_setting_is_restored(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    usual = torch.get_num_threads()

    def note(logits: torch.Tensor, *_: object) -> None:
        taken.append((len(logits), torch.get_num_threads()))

    noting(monkeypatch, shared_step, "sample", note)
    kernel = opened(base, layout=Layout(threads=2), n=4, max_tokens=30)
    try:
        monkeypatch.setattr(shared_step, "SHARE", 8 * shared_step._mean_weight(kernel._module))
        many, few = generated(kernel, MIXED), generated(kernel, MIXED[:2])
        assert torch.get_num_threads() == 2
        assert (len(many), len(few)) == (20, 8)
        begun = [0, taken.index((8, 2))]  # both admissions take all threads
        steps = [seen for index, seen in enumerate(taken) if index not in begun]
        assert {rows for rows, _ in steps} >= {20, 8}
        assert all(threads == (2 if rows >= 16 else 1) for rows, threads in steps)
        assert many.records.equals(generated(kernel, MIXED).records)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.long
def test_no_decode_forward_holds_an_ended_row(base: str) -> None:
    kernel = opened(base, layout=Layout(slots=8), n=4, max_tokens=30)
    lengths = generated(kernel, MIXED * 4).ragged("completion_ids").lengths
    [(idle, slots)] = kernel._session.metrics["generate/slot_idle"]  # type: ignore[attr-defined]
    assert slots * (1 - idle) == pytest.approx(lengths.sum() - 80)
    assert idle > 0


def interrupted_after(
    kernel: TorchGenerate, tokens: int, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Batch, Iterator[Batch]]:
    """What a chunk yields that another thread interrupts after some steps, and the rest of it."""
    reached, asked, calls = Event(), Event(), itertools.count(1)

    def wait_at_a_step(*_: object) -> None:
        if next(calls) == tokens:
            reached.set()
            assert asked.wait(30)

    def ask() -> None:
        assert reached.wait(30)
        kernel.interrupt()
        asked.set()

    noting(monkeypatch, shared_step, "sample", wait_at_a_step)
    asker = Thread(target=ask)
    asker.start()
    running = kernel.run(prompt_chunk(prompts))
    first = next(running)
    asker.join()
    return first, running


@pytest.mark.long
@pytest.mark.parametrize("prompts", [PREFIXED, MIXED])
@pytest.mark.parametrize("budget", [16384, 40])
def test_an_interrupted_row_keeps_its_tokens_and_goes_on_as_a_fresh_one_would_from_there(
    base: str, tmp_path: Path, prompts: list[str], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, kept = save_tiny(tmp_path, "qwen2", seed=1), 7
    free = generated(opened(base, max_tokens=kept, temperature=0.0), prompts)
    kernel = opened(base, layout=Layout(tokens=budget), max_tokens=40, temperature=0.0)
    first, running = interrupted_after(kernel, kept, prompts, monkeypatch)
    kernel.load(weights_of(other), 3)
    batch = Batch.concat([first, *running]).sort()
    versions, ids = batch.ragged("version"), batch.ragged("completion_ids")
    reference, tokenizer = plain(other), AutoTokenizer.from_pretrained(other)
    assert any(set(versions[row]) == {0, 3} for row in range(len(batch)))
    for row, prompt in enumerate(prompts):
        before = free.ragged("completion_ids")[row]
        later = len(ids[row]) - len(before)
        assert versions[row].tolist() == [0] * len(before) + [3] * later
        assert ids[row][:kept].tolist() == before.tolist()
        if len(ids[row]) > kept:
            asked = tokenizer(prompt, return_tensors="pt")["input_ids"][0]
            fed = torch.cat([asked, torch.tensor(before)])[None]
            assert ids[row][kept:].tolist() == greedy_by(reference, fed, 40 - kept)
    require_logprobs_by_version(batch, base, other, 1.0, 1e-5)


def test_what_was_written_is_refed_in_one_pass(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    kernel = opened(base, n=2, max_tokens=40)
    first, running = interrupted_after(kernel, 20, MIXED, monkeypatch)

    def note(module: object, ids: torch.Tensor, *_: object) -> None:
        passes.append(len(ids))

    noting(monkeypatch, prompt_feeding, "compute_hidden", note)
    kernel.load([], 1)
    whole = Batch.concat([first, *running])
    versions = whole.ragged("version")
    live = [row for row in range(len(whole)) if 1 in versions[row]]
    assert len(live) > 1
    assert passes == [19 * len(live)]
    fed = sum(len(MIXED[position]) for position in set(whole.keys.position[live].tolist()))
    [(share, tokens)] = kernel._session.metrics["generate/recomputed"]  # type: ignore[attr-defined]
    assert 19 * len(live) + fed <= round(share * tokens) <= 19 * len(live) + sum(map(len, MIXED))


def test_an_interruption_changes_nothing_where_no_weights_come(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = opened(base, layout=Layout(slots=6), n=4)
    whole = generated(kernel, MIXED)
    first, running = interrupted_after(kernel, 5, MIXED, monkeypatch)
    assert Batch.concat([first, *running]).sort().records.equals(whole.records)


def test_parameters_stay_the_same_objects_over_a_sleep(base: str) -> None:
    kernel = opened(base)
    before = [id(p) for p in kernel._module.parameters()]
    kernel.sleep()
    kernel.sleep()
    kernel.wake()
    assert [id(p) for p in kernel._module.parameters()] == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sleeping_kernel_has_no_weights_on_its_device(base: str) -> None:
    kernel = open_kernel(TorchGenerate(), base, n=3, max_tokens=12)
    rows = generated(kernel, MIXED)
    awake = torch.cuda.memory_allocated()
    weights = sum(piece.data.nbytes for piece in pieces(kernel._module))
    kernel.sleep()
    assert torch.cuda.memory_allocated() <= awake - weights
    kernel.wake()
    assert generated(kernel, MIXED).records.equals(rows.records)


def test_the_common_prefix_leaves_each_prompt_a_token() -> None:
    assert common_prefix(to_ragged([[1] * 10, [1] * 12])) == 9
    assert common_prefix(to_ragged([[1] * 10 + [2], [1] * 10 + [3]])) == 10
    assert common_prefix(to_ragged([[1] * 7 + [2] * 9, [1] * 7 + [3] * 9])) == 0
    assert common_prefix(to_ragged([[1] * 30])) == 0
