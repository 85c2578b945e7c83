"""The torch kernel of generate: same tokens and log-probabilities as transformers, wherever a row
is decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError, KernelError
from dataflow.kernel import KernelNode, Layout
from dataflow.model import Model
from dataflow.schema import Rollout
from operators.kernels.torch import decode
from operators.kernels.torch.decode import common_prefix
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import pieces
from tests.kit.kernels import FakeSession, prompt_chunk
from tests.kit.models import EOS, save_tiny

PREFIXED = [
    "Reverse this word: abc",
    "Reverse this word: hello",
    "Reverse this word: zyxwvu",
    "Reverse this word: q",
]
MIXED = ["hello", "a", "what is 12+5?", "abcdefghijklmnopqrstuvwxyz", "zz"]
CHAT = [[{"role": "user", "content": "abc"}], [{"role": "user", "content": "defgh"}]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_tiny(folder / kind, kind) for kind in ("qwen2", "llama")}


def opened(
    base: str, *, layout: Layout | None = None, returns: tuple[str, ...] = (), **params: Any
) -> TorchGenerate:
    kernel = TorchGenerate()
    given = {"n": 1, "max_tokens": 12} | params
    models = {"policy": Model("policy", base)}
    node = KernelNode(
        name="rollout", operator="generate", models=models, params=given, returns=returns
    )
    kernel.open(node, layout or Layout(), FakeSession())
    return kernel


def generated(
    kernel: TorchGenerate, prompts: list[Any], positions: list[int] | None = None
) -> Batch:
    return Batch.concat(list(kernel.run(prompt_chunk(prompts, positions)))).sorted()


def tokens_of(batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    ids = batch.ragged("completion_ids")
    return {key: ids[i].tolist() for i, key in enumerate(batch.keys.rows())}


def logprobs_under(base: str, batch: Batch, temperature: float) -> np.ndarray:
    """Of each completion token, by a full forward of transformers with its own eager attention."""
    reference = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    found = []
    for row in range(len(batch)):
        prompt, answer = batch.ragged("prompt_ids")[row], batch.ragged("completion_ids")[row]
        ids = torch.tensor(np.concatenate([prompt, answer]), dtype=torch.int64)
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        found.append(
            torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        )
    return np.concatenate(found)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("prompts", [PREFIXED, MIXED])
def test_greedy_is_the_greedy_of_transformers_token_for_token(
    bases: dict[str, str], kind: str, prompts: list[str]
) -> None:
    batch = generated(opened(bases[kind], temperature=0.0, max_tokens=20), prompts)
    reference = AutoModelForCausalLM.from_pretrained(bases[kind], attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(bases[kind])
    for row, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        expected = reference.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=EOS
        )
        assert batch.ragged("completion_ids")[row].tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(("prompts", "temperature"), [(PREFIXED, 1.0), (MIXED, 0.7), (MIXED, 0.0)])
def test_logprobs_are_those_of_a_full_forward(
    bases: dict[str, str], kind: str, prompts: list[str], temperature: float
) -> None:
    batch = generated(opened(bases[kind], n=3, temperature=temperature), prompts)
    expected = logprobs_under(bases[kind], batch, temperature or 1.0)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=1e-5)


def test_rows_do_not_depend_on_slots_budget_company_or_order(bases: dict[str, str]) -> None:
    whole = tokens_of(generated(opened(bases["qwen2"], n=5, max_tokens=9), MIXED + PREFIXED))
    assert len({tuple(t) for t in whole.values()}) > len(whole) // 2
    for layout in (
        Layout(slots=1),
        Layout(slots=3, tokens=8),
        Layout(slots=7),
        Layout(slots=16, tokens=40),
    ):
        assert (
            tokens_of(
                generated(
                    opened(bases["qwen2"], layout=layout, n=5, max_tokens=9), MIXED + PREFIXED
                )
            )
            == whole
        )
    kernel = opened(bases["qwen2"], n=5, max_tokens=9)
    parts = tokens_of(generated(kernel, PREFIXED, [5, 6, 7, 8])) | tokens_of(
        generated(kernel, MIXED, [0, 1, 2, 3, 4])
    )
    assert parts == whole
    backwards = generated(kernel, (MIXED + PREFIXED)[::-1], list(range(9))[::-1])
    assert tokens_of(backwards) == whole


@settings(max_examples=12, deadline=None)
@given(
    prompts=st.lists(st.text("abcdefg", min_size=1, max_size=12), min_size=1, max_size=6),
    shared=st.sampled_from(["", "Reverse this: "]),
    n=st.integers(1, 4),
    slots=st.integers(1, 9),
    budget=st.integers(1, 40),
    max_tokens=st.integers(1, 14),
)
def test_any_slots_and_budget_write_the_same_rows(
    bases: dict[str, str],
    prompts: list[str],
    shared: str,
    n: int,
    slots: int,
    budget: int,
    max_tokens: int,
) -> None:
    texts = [shared + p for p in prompts]
    whole = generated(opened(bases["llama"], n=n, max_tokens=max_tokens), texts)
    parts = generated(
        opened(
            bases["llama"], layout=Layout(slots=slots, tokens=budget), n=n, max_tokens=max_tokens
        ),
        texts,
    )
    assert tokens_of(parts) == tokens_of(whole)
    old, new = (b.ragged("sampler_logprobs").values for b in (whole, parts))
    np.testing.assert_allclose(new, old, atol=1e-4)


def test_bfloat16_weights_generate_too(bases: dict[str, str]) -> None:
    kernel = TorchGenerate()
    models = {"policy": Model("policy", bases["qwen2"], dtype="bfloat16")}
    params = {"n": 2, "max_tokens": 12, "temperature": 0.0}
    node = KernelNode(name="rollout", operator="generate", models=models, params=params)
    kernel.open(node, Layout(slots=3), FakeSession())
    batch = generated(kernel, MIXED + PREFIXED)
    assert np.isfinite(batch.ragged("sampler_logprobs").values).all()
    assert len(batch) == 18
    assert (batch.ragged("completion_ids").lengths >= 1).all()


def test_small_steps_take_one_thread_large_ones_all_and_the_setting_is_restored(
    bases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    usual, step = torch.get_num_threads(), decode.sample

    def noted(logits: torch.Tensor, draws: torch.Tensor, how: Any) -> Any:
        taken.append((len(logits), torch.get_num_threads()))
        return step(logits, draws, how)

    monkeypatch.setattr(decode, "sample", noted)
    kernel = opened(bases["qwen2"], layout=Layout(threads=2), n=4, max_tokens=30)
    try:
        monkeypatch.setattr(decode, "SHARE", 8 * decode._mean_weight(kernel._module))
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


def test_a_chunk_run_twice_gives_the_same_bits(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], layout=Layout(slots=6), n=4)
    first, second = generated(kernel, MIXED), generated(kernel, MIXED)
    assert first.records.equals(second.records)


def test_seed_and_attempt_change_the_rows(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], n=4)
    chunk = prompt_chunk(MIXED)
    again = replace(chunk, keys=Keys.of(range(len(MIXED)), attempt=[1] * len(MIXED)))
    first, second = (Batch.concat(list(kernel.run(c))) for c in (chunk, again))
    assert not first.records.equals(second.records)
    assert second.keys.attempt.tolist() == [1] * 20


def test_columns_are_those_of_rollout(bases: dict[str, str]) -> None:
    batch = generated(opened(bases["qwen2"], n=2, max_tokens=30), MIXED)
    assert set(batch.names) == set(Rollout.columns)
    for name, column in Rollout.columns.items():
        assert batch.array(name).type == column.arrow.type, name
    ids, lengths = batch.ragged("completion_ids"), batch.ragged("completion_ids").lengths
    ended = np.array([row[-1] == EOS for row in (ids[i] for i in range(len(ids)))])
    assert 0 < ended.sum() < len(ended)
    assert batch.array("finish").to_pylist() == ["stop" if e else "length" for e in ended]
    assert (lengths[~ended] == 30).all()
    assert (batch.ragged("completion_mask").values == 1).all()
    assert "<eos>" not in "".join(batch.array("completion").to_pylist())
    assert len(batch.array("completion")[0].as_py()) == lengths[0] - ended[0]
    assert [len(batch.ragged("prompt_ids")[i]) for i in range(10)] == [
        len(p) for p in MIXED for _ in range(2)
    ]


def test_only_the_wanted_columns_are_made(bases: dict[str, str]) -> None:
    batch = generated(opened(bases["qwen2"], returns=("finish", "completion_ids")), MIXED)
    assert sorted(batch.names) == ["completion_ids", "finish"]


def test_messages_go_through_the_chat_template(bases: dict[str, str]) -> None:
    batch = generated(opened(bases["qwen2"]), CHAT)
    tokenizer = AutoTokenizer.from_pretrained(bases["qwen2"])
    assert tokenizer.decode(batch.ragged("prompt_ids")[1]) == "u:defgh\na:"


def test_stop_strings_end_a_row_with_the_token_that_completes_them(bases: dict[str, str]) -> None:
    free = generated(opened(bases["qwen2"], n=4, max_tokens=30), MIXED)
    texts = free.array("completion").to_pylist()
    stop = next(t[3:5] for t in texts if len(t) > 10)
    batch = generated(
        opened(bases["qwen2"], n=4, max_tokens=30, stop=(stop, "never written")), MIXED
    )
    for text, found, finish in zip(
        texts, batch.array("completion").to_pylist(), batch.array("finish").to_pylist(), strict=True
    ):
        end = text.find(stop)
        assert found == (text if end < 0 else text[: end + len(stop)])
        assert end < 0 or finish == "stop"
    assert any(stop in t for t in texts)


def test_truncated_sampling_stays_inside_the_most_likely_tokens(bases: dict[str, str]) -> None:
    greedy = generated(opened(bases["qwen2"], temperature=0.0), MIXED)
    for params in ({"top_k": 1}, {"top_p": 1e-6}):
        batch = generated(opened(bases["qwen2"], **params), MIXED)
        assert tokens_of(batch) == tokens_of(greedy)
        assert batch.array("sampler_logprobs").equals(greedy.array("sampler_logprobs"))


def test_rows_leave_as_whole_groups_in_few_batches(bases: dict[str, str]) -> None:
    small = list(opened(bases["qwen2"], n=4).run(prompt_chunk(MIXED)))
    assert len(small) == 1
    large = list(opened(bases["qwen2"], layout=Layout(slots=8), n=4).run(prompt_chunk(MIXED * 4)))
    assert 1 < len(large) <= 20
    for batch in large:
        assert (np.bincount(batch.keys.position)[batch.keys.position] == 4).all()
    assert (
        sorted(k for b in large for k in b.keys.rows())
        == prompt_chunk(MIXED * 4).keys.expand(4).rows()
    )


def test_no_decode_forward_holds_an_ended_row(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], layout=Layout(slots=8), n=4, max_tokens=30)
    batch = generated(kernel, MIXED * 4)
    metrics: dict[str, list[tuple[float, float]]] = kernel._session.metrics  # type: ignore[attr-defined]
    lengths = batch.ragged("completion_ids").lengths
    assert metrics["generate/tokens"] == [(pytest.approx(lengths.mean()), 80)]
    assert metrics["generate/slot_waste"] == [(0.0, lengths.sum() - 80)]
    [(idle, slots)] = metrics["generate/slot_idle"]
    assert slots * (1 - idle) == pytest.approx(lengths.sum() - 80)
    assert 0 < idle < 0.5


def test_a_prompt_that_is_too_long_is_refused_by_its_key(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], max_prompt_tokens=13)
    with pytest.raises(
        DataError,
        match=(
            r"row \(7, 0, 0\): expected at most 13 prompt tokens \(max_prompt_tokens=13\), found 26"
        ),
    ):
        generated(kernel, MIXED[:4], [4, 5, 6, 7])
    assert len(generated(kernel, MIXED[:3])) == 3


def test_loaded_weights_are_used_and_their_version_is_recorded(
    bases: dict[str, str], tmp_path: Path
) -> None:
    other = save_tiny(tmp_path, "qwen2", seed=1)
    kernel, expected = opened(bases["qwen2"], n=2), generated(opened(other, n=2), MIXED)
    assert (
        not generated(kernel, MIXED)
        .array("completion_ids")
        .equals(expected.array("completion_ids"))
    )
    addresses = [p.data.data_ptr() for p in pieces(kernel._module)]
    kernel.load(pieces(opened(other)._module), 7)
    batch = generated(kernel, MIXED)
    assert batch.array("completion_ids").equals(expected.array("completion_ids"))
    assert (batch.ragged("version").values == 7).all()
    assert [p.data.data_ptr() for p in pieces(kernel._module)] == addresses
    kernel.load([], 8)
    assert generated(kernel, MIXED).ragged("version").values[0] == 8


@pytest.mark.parametrize("slots", [5, 8])
def test_weights_that_arrive_within_a_chunk_interrupt_its_rows(
    bases: dict[str, str], tmp_path: Path, slots: int
) -> None:
    other = save_tiny(tmp_path, "qwen2", seed=1)
    kernel = opened(
        bases["qwen2"],
        layout=Layout(slots=slots),
        n=3,
        max_tokens=25,
        temperature=0.9,
        stop=("a", "X", "7"),
    )
    running = kernel.run(prompt_chunk(MIXED * 3))
    first = [next(running) for _ in range(3)]
    kernel.load(pieces(opened(other)._module), 3)
    batch = Batch.concat(first + list(running))
    assert set(Batch.concat(first).ragged("version").values) == {0}
    versions = batch.ragged("version")
    assert any(len(set(versions[i])) == 2 for i in range(len(batch)))
    expected = np.where(
        versions.values == 0,
        logprobs_under(bases["qwen2"], batch, 0.9),
        logprobs_under(other, batch, 0.9),
    )
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=1e-5)


def interrupted_after(
    kernel: TorchGenerate, tokens: int, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Batch, Iterator[Batch]]:
    """What a chunk yields when another thread interrupts it after so many steps, and the rest of
    it.
    """
    reached, asked, step, calls = Event(), Event(), decode.sample, itertools.count(1)

    def noted(logits: torch.Tensor, draws: torch.Tensor, how: Any) -> Any:
        if next(calls) == tokens:
            reached.set()
            assert asked.wait(30)
        return step(logits, draws, how)

    def ask() -> None:
        assert reached.wait(30)
        kernel.interrupt()
        asked.set()

    monkeypatch.setattr(decode, "sample", noted)
    asker = Thread(target=ask)
    asker.start()
    running = kernel.run(prompt_chunk(prompts))
    first = next(running)
    asker.join()
    return first, running


@pytest.mark.parametrize("prompts", [PREFIXED, MIXED])
@pytest.mark.parametrize("budget", [16384, 40])
def test_an_interrupted_row_keeps_its_tokens_and_goes_on_as_a_fresh_one_would_from_there(
    bases: dict[str, str],
    tmp_path: Path,
    prompts: list[str],
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, kept = save_tiny(tmp_path, "qwen2", seed=1), 7
    free = generated(opened(bases["qwen2"], max_tokens=kept, temperature=0.0), prompts)
    kernel = opened(bases["qwen2"], layout=Layout(tokens=budget), max_tokens=40, temperature=0.0)
    first, running = interrupted_after(kernel, kept, prompts, monkeypatch)
    kernel.load(pieces(opened(other)._module), 3)
    batch = Batch.concat([first, *running]).sorted()
    versions, ids, before = (
        batch.ragged("version"),
        batch.ragged("completion_ids"),
        free.ragged("completion_ids"),
    )
    reference, tokenizer = (
        AutoModelForCausalLM.from_pretrained(other),
        AutoTokenizer.from_pretrained(other),
    )
    assert any(set(versions[row]) == {0, 3} for row in range(len(batch)))
    for row, prompt in enumerate(prompts):
        assert versions[row].tolist() == [0] * len(before[row]) + [3] * (
            len(ids[row]) - len(before[row])
        )
        assert ids[row][:kept].tolist() == before[row].tolist()
        if len(ids[row]) > kept:
            fed = torch.cat(
                [tokenizer(prompt, return_tensors="pt")["input_ids"][0], torch.tensor(before[row])]
            )[None]
            expected = reference.generate(
                fed,
                attention_mask=torch.ones_like(fed),
                do_sample=False,
                max_new_tokens=40 - kept,
                pad_token_id=EOS,
            )
            assert ids[row][kept:].tolist() == expected[0, fed.shape[1] :].tolist()
    old, new = (logprobs_under(base, batch, 1.0) for base in (bases["qwen2"], other))
    expected = np.where(versions.values == 0, old, new)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=1e-5)


def test_what_was_written_is_fed_again_in_one_pass(
    bases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    kernel, hidden = opened(bases["qwen2"], n=2, max_tokens=40), decode.hidden

    def noted(module: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(len(ids))
        return hidden(module, ids, *rest)

    first, running = interrupted_after(kernel, 20, MIXED, monkeypatch)
    monkeypatch.setattr(decode, "hidden", noted)
    kernel.load([], 1)
    whole = Batch.concat([first, *running])
    versions = whole.ragged("version")
    live = [row for row in range(len(whole)) if 1 in versions[row]]
    assert len(live) > 1
    assert passes == [19 * len(live)]
    fed = sum(
        {whole.keys.rows()[row][0]: len(MIXED[whole.keys.rows()[row][0]]) for row in live}.values()
    )
    [(share, tokens)] = kernel._session.metrics["generate/recomputed"]  # type: ignore[attr-defined]
    assert 19 * len(live) + fed <= round(share * tokens) <= 19 * len(live) + sum(map(len, MIXED))


def test_an_interruption_changes_nothing_where_no_weights_come(
    bases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = opened(bases["qwen2"], layout=Layout(slots=6), n=4)
    whole = generated(kernel, MIXED)
    first, running = interrupted_after(kernel, 5, MIXED, monkeypatch)
    assert Batch.concat([first, *running]).sorted().records.equals(whole.records)
    kernel.interrupt()  # between two chunks
    batches = list(kernel.run(prompt_chunk(MIXED)))
    assert len(batches[0]) == 0
    assert Batch.concat(batches).sorted().records.equals(whole.records)


def test_a_draining_kernel_offers_no_interruption(bases: dict[str, str]) -> None:
    assert getattr(opened(bases["qwen2"], on_update="drain"), "interrupt", None) is None
    assert getattr(opened(bases["qwen2"]), "interrupt", None) is not None


def test_after_a_sleep_the_same_bits_come(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], n=3)
    before, addresses = generated(kernel, MIXED), [id(p) for p in kernel._module.parameters()]
    kernel.sleep()
    kernel.sleep()
    kernel.wake()
    assert [id(p) for p in kernel._module.parameters()] == addresses
    assert generated(kernel, MIXED).records.equals(before.records)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sleeping_kernel_has_no_weights_on_its_device(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], n=3)
    rows = generated(kernel, MIXED)
    awake, weights = (
        torch.cuda.memory_allocated(),
        sum(p.data.nbytes for p in pieces(kernel._module)),
    )
    kernel.sleep()
    assert torch.cuda.memory_allocated() <= awake - weights
    kernel.wake()
    assert generated(kernel, MIXED).records.equals(rows.records)


def test_weights_that_arrive_within_a_draining_chunk_are_an_error(bases: dict[str, str]) -> None:
    kernel = opened(bases["qwen2"], layout=Layout(slots=2), n=2, on_update="drain")
    running = kernel.run(prompt_chunk(MIXED))
    next(running)
    kernel.load([], 3)
    with pytest.raises(
        KernelError, match="version 3 came between two batches of a chunk begun at version 0"
    ):
        list(running)


def test_an_empty_chunk_yields_nothing(bases: dict[str, str]) -> None:
    chunk = prompt_chunk(["a"])
    none = replace(chunk, keys=chunk.keys.take(np.zeros(0, int)))
    assert list(opened(bases["qwen2"]).run(none)) == []


@pytest.mark.parametrize(
    "params", [{"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_parameters_out_of_range_are_refused(bases: dict[str, str], params: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="expected"):
        opened(bases["qwen2"], **params)


def test_the_common_prefix_leaves_each_prompt_a_token() -> None:
    from operators.kernels.text import to_ragged

    assert common_prefix(to_ragged([[1] * 10, [1] * 12])) == 9
    assert common_prefix(to_ragged([[1] * 10 + [2], [1] * 10 + [3]])) == 10
    assert common_prefix(to_ragged([[1] * 7 + [2] * 9, [1] * 7 + [3] * 9])) == 0
    assert common_prefix(to_ragged([[1] * 30])) == 0
