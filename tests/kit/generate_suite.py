"""The promises of every kernel of `generate`, as tests.

A module imports them all (`from tests.kit.generate_suite import *`) and has the fixture `make`:
opens its kernel for the model `base` with given parameters, on 8 slots. `base` and `other` are
directories of two models of one shape, for which `tolerance` bounds a log-prob's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from dataflow.schema import Rollout, TruncatedRollout
from engine.weights.probe import probe_rows
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import load_model, pieces
from tests.kit.kernels import open_kernel, prompt_chunk
from tests.kit.models import EOS
from tests.kit.rows import padded_logprobs, plain

__all__: list[str] = []
Make = Callable[..., Any]

PREFIXED = [f"Reverse this word: {word}" for word in ("abc", "hello", "zyxwvu", "q")]
MIXED = ["hello", "a", "what is 12+5?", "abcdefghijklmnopqrstuvwxyz", "zz"]


def generated(kernel: Any, prompts: list[Any], positions: Any = None) -> Batch:
    """All rows of one chunk."""
    return Batch.concat(list(kernel.run(prompt_chunk(prompts, positions)))).sort()


def tokens_of(batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    """Each row's answer."""
    ids = batch.ragged("completion_ids")
    return {key: ids[i].tolist() for i, key in enumerate(batch.keys.rows())}


def weights_of(base: str) -> list[Piece]:
    """What a writer with this base offers."""
    return list(pieces(load_model(Model("policy", base))))


def by_torch(base: str, prompts: list[Any], **given: Any) -> Batch:
    """What the torch kernel writes."""
    return generated(
        open_kernel(TorchGenerate(), base, **{"n": 1, "max_tokens": 12} | given), prompts
    )


def logprobs_under(base: str, batch: Batch, temperature: float) -> np.ndarray:
    """Of each completion token, by a full forward of transformers with its own eager attention."""
    return logprobs_by(plain(base), batch, temperature)


def logprobs_by(reference: Any, batch: Batch, temperature: float) -> np.ndarray:
    """Of each completion token, by a padded forward of this module."""
    with torch.no_grad():
        return torch.cat(padded_logprobs(reference, batch, temperature)).numpy()


def greedy_by(reference: Any, ids: torch.Tensor, count: int) -> list[int]:
    """The next tokens after [1, tokens], at most so many, as transformers generates them."""
    how = {"do_sample": False, "max_new_tokens": count, "pad_token_id": EOS}
    written = reference.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return written[0, ids.shape[1] :].tolist()


def require_logprobs_by_version(
    batch: Batch, first: str, later: str, temperature: float, tolerance: float
) -> None:
    """Tokens of version 0 have the log-probs of the first base, all others those of the later."""
    old, new = (logprobs_under(each, batch, temperature) for each in (first, later))
    expected = np.where(batch.ragged("version").values == 0, old, new)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=tolerance)


@pytest.mark.parametrize("prompts", [PREFIXED, MIXED])
def test_greedy_is_the_greedy_of_transformers_token_for_token(
    make: Make, base: str, prompts: list[str]
) -> None:
    batch = generated(make(temperature=0.0, max_tokens=20), prompts)
    reference, tokenizer = plain(base), AutoTokenizer.from_pretrained(base)
    for row, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert batch.ragged("completion_ids")[row].tolist() == greedy_by(reference, ids, 20)


@pytest.mark.parametrize(("prompts", "temperature"), [(PREFIXED, 1.0), (MIXED, 0.7), (MIXED, 0.0)])
def test_logprobs_are_those_of_a_full_forward(
    make: Make, base: str, tolerance: float, prompts: list[str], temperature: float
) -> None:
    batch = generated(make(n=3, temperature=temperature), prompts)
    expected = logprobs_under(base, batch, temperature or 1.0)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=tolerance)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}]
)
def test_rows_are_those_of_the_torch_kernel(
    make: Make, base: str, tolerance: float, how: dict[str, Any]
) -> None:
    how = {"n": 4, "max_tokens": 24} | how
    mine, its = generated(make(**how), MIXED), by_torch(base, MIXED, **how)
    assert tokens_of(mine) == tokens_of(its)
    for name in ("finish", "completion", "version", "prompt_ids"):
        assert mine.array(name).equals(its.array(name)), name
    for name in {"sampler_logprobs", "sampler_mass"} & set(its.names):
        np.testing.assert_allclose(
            mine.ragged(name).values, its.ragged(name).values, atol=tolerance
        )


def _another_chunk(kernel: Any) -> None:
    generated(kernel, PREFIXED * 3)


def _a_chunk_that_is_given_up(kernel: Any) -> None:
    running = kernel.run(prompt_chunk(PREFIXED * 5))
    next(running)
    running.close()


def _a_sleep(kernel: Any) -> None:
    kernel.sleep()
    kernel.wake()


@pytest.mark.parametrize("between", [_another_chunk, _a_chunk_that_is_given_up, _a_sleep])
def test_a_chunk_run_twice_gives_the_same_bits(make: Make, between: Callable[[Any], None]) -> None:
    kernel = make(n=4)
    first = generated(kernel, MIXED)
    between(kernel)
    assert first.records.equals(generated(kernel, MIXED).records)


def test_seed_and_attempt_change_the_rows(make: Make) -> None:
    kernel = make(n=4)
    chunk = prompt_chunk(MIXED)
    again = replace(chunk, keys=Keys.of(range(len(MIXED)), attempt=[1] * len(MIXED)))
    first, second = (Batch.concat(list(kernel.run(c))) for c in (chunk, again))
    assert not first.records.equals(second.records)
    assert second.keys.attempt.tolist() == [1] * 20


def test_columns_are_those_of_rollout(make: Make) -> None:
    batch = generated(make(n=2, max_tokens=30), MIXED)
    types = {name: batch.array(name).type for name in batch.names}
    assert types == {name: column.arrow.type for name, column in Rollout.columns.items()}
    ids, lengths = batch.ragged("completion_ids"), batch.ragged("completion_ids").lengths
    ended = np.array([ids[i][-1] == EOS for i in range(len(ids))])
    assert 0 < ended.sum() < len(ended)
    assert batch.array("finish").to_pylist() == ["stop" if e else "length" for e in ended]
    assert (lengths[~ended] == 30).all()
    assert (batch.ragged("completion_mask").values == 1).all()
    assert "<eos>" not in "".join(batch.array("completion").to_pylist())
    assert len(batch.array("completion")[0].as_py()) == lengths[0] - ended[0]
    assert batch.ragged("prompt_ids").lengths.tolist() == [len(p) for p in MIXED for _ in range(2)]


def test_only_the_wanted_columns_are_made(make: Make) -> None:
    batch = generated(make(returns=("finish", "completion_ids")), MIXED)
    assert sorted(batch.names) == ["completion_ids", "finish"]


def test_messages_go_through_the_chat_template(make: Make, base: str) -> None:
    batch = generated(make(), [[{"role": "user", "content": "defgh"}]])
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(batch.ragged("prompt_ids")[0]) == "u:defgh\na:"


def test_stop_strings_end_a_row_with_the_token_that_completes_them(make: Make) -> None:
    free = generated(make(n=4, max_tokens=30), MIXED)
    texts = free.array("completion").to_pylist()
    stop = next(t[3:5] for t in texts if len(t) > 10)
    batch = generated(make(n=4, max_tokens=30, stop=(stop, "never written")), MIXED)
    stopped, finishes = (batch.array(name).to_pylist() for name in ("completion", "finish"))
    for text, cut, finish in zip(texts, stopped, finishes, strict=True):
        if stop in text:
            assert (cut, finish) == (text[: text.find(stop) + len(stop)], "stop")
        else:
            assert cut == text


def test_truncated_sampling_stays_inside_the_most_likely_tokens(
    make: Make, tolerance: float
) -> None:
    likeliest = generated(make(temperature=0.0), MIXED)
    for params in ({"top_k": 1}, {"top_p": 1e-6}):
        batch = generated(make(**params), MIXED)
        assert set(batch.names) == set(TruncatedRollout.columns)
        assert tokens_of(batch) == tokens_of(likeliest)
        mine, its = (b.ragged("sampler_logprobs").values for b in (batch, likeliest))
        np.testing.assert_allclose(mine, its, atol=tolerance)


def test_rows_leave_as_whole_groups_in_few_batches(make: Make) -> None:
    assert len(list(make(n=4).run(prompt_chunk(MIXED[:2])))) == 1
    chunk = prompt_chunk(MIXED * 4)
    large = list(make(n=4).run(chunk))
    assert 1 < len(large) <= 20
    for batch in large:
        assert (np.bincount(batch.keys.position)[batch.keys.position] == 4).all()
    assert Batch.concat(large).sort().keys.rows() == chunk.keys.expand(4).rows()


def test_the_written_tokens_are_counted(make: Make) -> None:
    kernel = make(n=4, max_tokens=30)
    lengths = generated(kernel, MIXED * 4).ragged("completion_ids").lengths
    metrics = kernel._session.metrics
    assert metrics["generate/tokens"] == [(pytest.approx(lengths.mean()), 80)]
    assert metrics["generate/slot_waste"] == [(0.0, lengths.sum() - 80)]
    [(idle, _)] = metrics["generate/slot_idle"]
    assert 0 <= idle < 0.5


def test_a_prompt_that_is_too_long_is_refused_by_its_key(make: Make) -> None:
    kernel = make(max_prompt_tokens=13)
    at_most = r"expected at most 13 prompt tokens \(max_prompt_tokens=13\), found 26"
    with pytest.raises(DataError, match=rf"row \(7, 0, 0\): {at_most}"):
        generated(kernel, MIXED[:4], [4, 5, 6, 7])
    assert len(generated(kernel, MIXED[:3])) == 3


def test_loaded_weights_write_the_rows_of_their_base(make: Make, base: str, other: str) -> None:
    kernel, expected = make(n=2), tokens_of(by_torch(other, MIXED, n=2))
    assert tokens_of(generated(kernel, MIXED)) != expected
    kernel.load(iter(weights_of(other)), 7)
    batch = generated(kernel, MIXED)
    assert tokens_of(batch) == expected
    assert (batch.ragged("version").values == 7).all()
    kernel.load(weights_of(base), 8)
    assert tokens_of(generated(kernel, MIXED)) == tokens_of(by_torch(base, MIXED, n=2))


def test_the_probe_is_that_of_the_loaded_weights(
    make: Make, base: str, other: str, tolerance: float
) -> None:
    kernel = make()
    rows = probe_rows(0, kernel.vocabulary)
    for version, each in enumerate((base, other, base)):
        kernel.load(weights_of(each), version)
        expected = open_kernel(TorchGenerate(), each, max_tokens=4).probe(rows)
        for _ in range(2):
            np.testing.assert_allclose(kernel.probe(rows), expected, atol=tolerance)
        generated(kernel, MIXED)


def test_a_probe_between_two_batches_loses_no_token(make: Make) -> None:
    how = {"n": 4, "max_tokens": 25}
    whole, kernel = generated(make(**how), MIXED * 3), make(**how)
    running = kernel.run(prompt_chunk(MIXED * 3))
    first = next(running)
    kernel.probe(probe_rows(0, kernel.vocabulary))
    assert tokens_of(Batch.concat([first, *running])) == tokens_of(whole)


def test_a_permuted_weight_shows_in_the_probe(make: Make, base: str, tolerance: float) -> None:
    kernel, given = make(), weights_of(base)
    rows = probe_rows(0, kernel.vocabulary)
    right = kernel.probe(rows)
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = [Piece(p.name, p.data.flip(0)) if p.name == name else p for p in given]
    kernel.load(wrong, 1)
    assert np.abs(kernel.probe(rows) - right).max() > 10 * tolerance
    kernel.load(given, 2)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: p[:-1], "expected all weights"),
        (lambda p: [*p[1:], Piece(p[0].name, p[0].data[:1])], "expected shape"),
        (lambda p: [*p, Piece("model.extra", p[0].data)], "'model.extra'"),
    ],
)
def test_anything_but_all_weights_is_refused_by_name(
    make: Make, base: str, spoil: Callable[[list[Piece]], list[Piece]], told: str
) -> None:
    kernel, given = make(), weights_of(base)
    with pytest.raises(KernelError, match=told):
        kernel.load(spoil(given), 1)
    kernel.load(given, 2)


def test_weights_that_arrive_within_a_chunk_interrupt_its_rows(
    make: Make, base: str, other: str, tolerance: float
) -> None:
    kernel = make(n=3, max_tokens=25, temperature=0.9, stop=("a", "X", "7"))
    running = kernel.run(prompt_chunk(MIXED * 3))
    first = [next(running) for _ in range(3)]
    kernel.load(weights_of(other), 3)
    batch = Batch.concat(first + list(running))
    assert set(Batch.concat(first).ragged("version").values) == {0}
    versions = batch.ragged("version")
    assert any(len(set(versions[i])) == 2 for i in range(len(batch)))
    require_logprobs_by_version(batch, base, other, 0.9, tolerance)


def test_an_interruption_yields_before_the_next_token(make: Make) -> None:
    kernel = make(n=4)
    whole = generated(kernel, MIXED)
    kernel.interrupt()  # between two chunks
    batches = list(kernel.run(prompt_chunk(MIXED)))
    assert len(batches[0]) == 0
    assert tokens_of(Batch.concat(batches)) == tokens_of(whole)


def test_weights_that_arrive_within_a_draining_chunk_are_an_error(make: Make, base: str) -> None:
    kernel = make(n=4, on_update="drain")
    assert not kernel.interruptible
    assert make().interruptible
    running = kernel.run(prompt_chunk(MIXED * 3))
    next(running)
    kernel.load(weights_of(base), 3)
    told = "version 3 came between two batches of a chunk begun at version 0"
    with pytest.raises(KernelError, match=told):
        list(running)


def test_an_empty_chunk_yields_nothing(make: Make) -> None:
    chunk = prompt_chunk(["a"])
    assert list(make().run(replace(chunk, keys=chunk.keys.take(np.zeros(0, int))))) == []


@pytest.mark.parametrize(
    "params", [{"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_parameters_out_of_range_are_refused(make: Make, params: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="expected"):
        make(**params)


__all__ += [name for name in dir() if name.startswith("test_")]
