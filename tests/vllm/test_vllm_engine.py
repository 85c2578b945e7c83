"""What only an engine can get wrong: keys of other weights, prefixes, calls that raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataflow.errors import DataError, KernelError
from engine.weights.probe import probe_rows
from operators.kernels.torch.models import load_model, pieces
from operators.kernels.vllm.decode import VllmDecoder
from tests.kit.generate_suite import (
    MIXED,
    generated,
    logprobs_under,
    tokens_of,
    weights_of,
)
from tests.kit.kernels import prompt_chunk


def test_keys_of_older_weights_show_in_the_probe(
    make: Any, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make()
    rows = probe_rows(0, kernel.vocabulary)
    kernel.probe(rows)
    monkeypatch.setattr(kernel._engine, "forget", lambda: None)
    kernel.load(weights_of(other), 5)
    with pytest.raises(KernelError, match="found those of 64 tokens"):
        kernel.probe(rows)


def test_a_reset_that_vllm_declines_is_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make()
    monkeypatch.setattr(kernel._engine._core, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(KernelError, match="declined"):
        generated(kernel, MIXED)


def test_an_engine_whose_call_raised_is_lost(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make()

    def broken() -> None:
        raise RuntimeError("no such block")

    with monkeypatch.context() as patch:
        patch.setattr(kernel._engine._core, "get_output", broken)
        message = r"expected its vLLM engine to answer, found RuntimeError: no such block\. Fix: "
        with pytest.raises(KernelError, match=message):
            generated(kernel, MIXED)
    with pytest.raises(KernelError, match="lost"):
        generated(kernel, MIXED)
    recover(kernel)
    assert len(generated(kernel, MIXED)) == len(MIXED)


def recover(kernel: Any) -> None:
    """An engine that only a test has lost goes on with the others."""
    kernel._engine._lost = False
    kernel._engine.abort([str(i) for i in range(kernel._engine._count + 1)])


def test_a_group_shares_its_prompt_but_for_the_last_block(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make(n=8, max_tokens=2)
    fed: list[int] = []
    outputs = kernel._engine._core.get_output

    def noted() -> Any:
        said = outputs()
        fed.extend(
            o.prefill_stats.num_computed_tokens for o in said.outputs if o.prefill_stats is not None
        )
        return said

    monkeypatch.setattr(kernel._engine._core, "get_output", noted)
    generated(kernel, ["abcdefghij" * 30])
    assert sum(fed) <= 1.25 * (300 + 8 * 12)


def test_random_interruptions_lose_no_token_and_versions_never_fall(
    make: Any, base: str, other: str, tolerance: float
) -> None:
    rng = np.random.default_rng(0)
    kernel = make(n=4, max_tokens=40, temperature=0.8, top_p=0.95)
    weights, version = (weights_of(base), weights_of(other)), 0
    running = kernel.run(prompt_chunk_of(12))
    found, batches = 0, []
    for batch in running:
        batches.append(batch)
        found += len(batch)
        if version < 20 and rng.random() < 0.2:
            version += 1
            kernel.load(weights[version % 2], version)
        kernel.interrupt()
    assert found == 48
    assert version == 20
    for batch in batches:
        versions = batch.ragged("version")
        assert all((np.diff(versions[i]) >= 0).all() for i in range(len(batch)))
    require_even_and_odd(batches, base, other, tolerance)


def prompt_chunk_of(count: int) -> Any:
    from tests.kit.kernels import prompt_chunk

    return prompt_chunk([MIXED[i % len(MIXED)] + "abc"[i % 3] for i in range(count)])


def require_even_and_odd(batches: list[Any], base: str, other: str, tolerance: float) -> None:
    """Each log-prob is that of its own version: even ones are `base`, odd ones `other`."""
    from dataflow.batch import Batch
    from tests.kit.generate_suite import logprobs_under

    whole = Batch.concat(batches)
    even, odd = (logprobs_under(each, whole, 0.8) for each in (base, other))
    expected = np.where(whole.ragged("version").values % 2 == 0, even, odd)
    said = whole.ragged("sampler_logprobs").values
    np.testing.assert_allclose(said, expected, atol=tolerance * max(1.0, expected.std()))


def test_a_second_node_of_the_engine_takes_its_version_without_weights(
    make: Any, other: str
) -> None:
    first, second = make(), make()
    first.load(weights_of(other), 7)
    second.load([], 7)
    rows = generated(second, MIXED)
    assert set(rows.ragged("version").values.tolist()) == {7}
    assert tokens_of(rows) == tokens_of(generated(first, MIXED))
    with pytest.raises(KernelError, match="expected the weights of version 8, found none"):
        second.load([], 8)


def test_what_each_node_of_an_engine_asks_is_done_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = make()._engine, []
    monkeypatch.setattr(engine._llm, "sleep", lambda level: calls.append("sleep"))
    monkeypatch.setattr(engine._llm, "wake_up", lambda: calls.append("wake"))
    monkeypatch.setattr(engine._core, "shutdown", lambda: calls.append("end"))
    monkeypatch.setattr(engine, "_shared", None)
    for ask in (engine.sleep, engine.wake, engine.close):
        ask()
        ask()
    monkeypatch.setattr(engine, "_closed", False)
    assert calls == ["sleep", "wake", "end"]


def test_a_prompt_for_which_the_engine_has_no_room_names_what_makes_room(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Model has positions for it: no row has to be dropped, whatever the policy says."""
    kernel = make(overlong_prompt="drop")
    size = replace(kernel._engine.size, length=112)
    monkeypatch.setattr(kernel._engine, "size", size)
    message = r"row \(1, 0, 0\): expected a prompt of at most 100 tokens.* found 150\. Fix: --set"
    with pytest.raises(DataError, match=message + r" \w+\.max_prompt_tokens=256"):
        generated(kernel, ["a", "b" * 150])


def test_a_follower_is_refused(make: Any, base: str) -> None:
    with pytest.raises(KernelError, match="rate"):
        make().load(weights_of(base), 1, rate=0.5)


def test_the_names_of_the_engine_are_those_of_the_writer(make: Any, base: str) -> None:
    kernel = make()
    from dataflow.model import Model

    given = {p.name for p in pieces(load_model(Model("policy", base)))}
    assert given <= set(kernel._engine._names)
    assert tokens_of(generated(kernel, MIXED))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_sampler_of_vllm_records_the_log_probs_of_a_full_forward(
    make: Any, base: str, tolerance: float, temperature: float
) -> None:
    kernel = make(n=3, temperature=temperature, sampler="vllm")
    batch = generated(kernel, MIXED)
    expected = logprobs_under(base, batch, temperature or 1.0)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=tolerance)
    assert len(set(map(tuple, tokens_of(batch).values()))) == len(MIXED) * (3 if temperature else 1)
    again = generated(kernel, MIXED)
    assert tokens_of(again) == tokens_of(batch)
    assert again.array("sampler_logprobs").equals(batch.array("sampler_logprobs"))


def test_rows_of_both_samplers_run_side_by_side(make: Any, base: str, tolerance: float) -> None:
    kernels = [make(n=2, temperature=0.7, sampler=sampler) for sampler in ("keyed", "vllm")]
    alone = [generated(kernel, MIXED[:2]) for kernel in kernels]
    tasks = [
        VllmDecoder(kernel._engine, kernel._task(*asked(kernel, MIXED[:2]), kernel._n), 0)
        for kernel in kernels
    ]
    for decoder in tasks:
        decoder._begin()
    while any(decoder._live for decoder in tasks):
        said = kernels[0]._engine.step()
        for decoder in tasks:
            decoder._append(said)
    for decoder, batch in zip(tasks, alone, strict=True):
        written = decoder.written
        rows = [written.tokens[row, :end].tolist() for row, end in enumerate(written.length)]
        assert rows == list(tokens_of(batch).values())
        said = np.concatenate([written.logprobs[i, :n] for i, n in enumerate(written.length)])
        np.testing.assert_allclose(said, batch.ragged("sampler_logprobs").values, atol=tolerance)


def asked(kernel: Any, prompts: list[str]) -> Any:
    """Token ids and keys of these prompts, as `run` has them."""
    chunk = prompt_chunk(prompts)
    return kernel._encode(chunk)[1], chunk.keys.expand(kernel._n)


def test_the_sampler_of_vllm_takes_prompts_of_several_forwards(make: Any, base: str) -> None:
    kernel = make(n=2, sampler="vllm", temperature=0.9)
    budget = kernel._engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    long = "abcdefghij" * 40
    batch = generated(kernel, [long] * (2 * budget // 400 + 2))
    expected = logprobs_under(base, batch, 0.9)
    np.testing.assert_allclose(batch.ragged("sampler_logprobs").values, expected, atol=1e-3)


def test_the_sampler_of_vllm_takes_no_top_p(make: Any) -> None:
    with pytest.raises(KernelError, match="no top-k or top-p"):
        generated(make(top_p=0.9, sampler="vllm"), MIXED)
