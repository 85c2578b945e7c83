"""Episodes on an engine: the rows of the torch kernel, in rounds, and nothing left of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dataflow.kernel import KernelNode
from dataflow.model import Model
from operators.environments import as_environment
from operators.kernels.vllm.interact import VllmInteract
from tests.kit.environments import Chatter, Hooked, first_and_last
from tests.kit.generate_suite import MIXED, logprobs_under, tokens_of, weights_of
from tests.kit.interact_kernels import open_interact, run_episodes
from tests.kit.joined_runs import numbered_chunks, require_rows_alone, run_joined
from tests.kit.kernels import FakeSession, prompt_chunk
from tests.vllm.conftest import LAYOUT

HOW: dict[str, Any] = {"n": 3, "max_turns": 4, "max_tokens": 60, "max_turn_tokens": 9}
SEGMENTS: dict[str, Any] = {
    "max_context": 40,
    "overflow": "segment",
    "segments": 3,
    "compact": first_and_last,
}
TALKS = [[{"role": "user", "content": text}] for text in MIXED]
Open = Callable[..., VllmInteract]


@pytest.fixture
def open_one(base: str, modules: dict[Any, Any]) -> Iterator[Open]:
    """Opens a kernel on the engine, whose environments end with the test."""
    opened_kernels: list[VllmInteract] = []

    def opened(environment: Any = Chatter, **how: Any) -> VllmInteract:
        session = FakeSession(node="episode")
        session.modules = modules
        node = KernelNode(
            name="episode",
            operator="interact",
            models={"policy": Model("policy", base)},
            params=HOW | how | {"environment": as_environment(environment)},
            inproc=True,
        )
        kernel = VllmInteract()
        kernel.open(node, LAYOUT, session)
        kernel.load(weights_of(base), 0)
        opened_kernels.append(kernel)
        return kernel

    yield opened
    for kernel in opened_kernels:
        kernel.close_environments()


@pytest.mark.parametrize(
    ("prompts", "how"),
    [(MIXED, {}), (TALKS, {}), (MIXED, SEGMENTS)],
    ids=["text", "messages", "segments"],
)
def test_rows_are_those_of_the_torch_kernel(
    open_one: Open, base: str, tolerance: float, prompts: list[Any], how: dict[str, Any]
) -> None:
    reference = open_interact(base, **HOW | how)
    expected = run_episodes(reference, prompts)
    reference.close()
    batch = run_episodes(open_one(**how), prompts)
    assert tokens_of(batch) == tokens_of(expected)
    for name in ("finish", "turn", "turn_end", "version", "prompt_ids", "messages"):
        assert batch.array(name).equals(expected.array(name)), name
    np.testing.assert_allclose(
        batch.ragged("sampler_logprobs").values,
        expected.ragged("sampler_logprobs").values,
        atol=tolerance,
    )


def test_a_chunk_that_is_given_up_leaves_the_engine_idle(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = open_one(Hooked)
    expected = tokens_of(run_episodes(kernel, MIXED))
    monkeypatch.setattr(Hooked, "hook", kernel.interrupt)
    running: Any = kernel.run(prompt_chunk(MIXED))
    next(running)
    running.close()
    assert kernel._engine.idle
    monkeypatch.setattr(Hooked, "hook", None)
    assert tokens_of(run_episodes(kernel, MIXED)) == expected


def test_new_weights_come_between_turns_and_within_them(
    open_one: Open, base: str, other: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = open_one(Hooked)
    calls = iter(range(1 << 20))

    def interrupt() -> None:
        if next(calls) == 4:
            kernel.interrupt()

    monkeypatch.setattr(Hooked, "hook", interrupt)
    batches = []
    for batch in kernel.run(prompt_chunk(MIXED)):
        batches.append(batch)
        if len(batches) == 1:
            kernel.load(weights_of(other), 1)
    batch = type(batches[0]).concat(batches).sort()
    versions = batch.ragged("version").values
    assert set(versions.tolist()) == {0, 1}
    first, later = (logprobs_under(each, batch, 1.0) for each in (base, other))
    expected = np.where(versions == 0, first, later)
    is_written = batch.ragged("completion_mask").values == 1
    sampled = batch.ragged("sampler_logprobs").values
    np.testing.assert_allclose(sampled[is_written], expected[is_written], atol=tolerance)


@pytest.mark.parametrize("how", [{}, SEGMENTS], ids=["rows", "segments"])
def test_episodes_that_join_are_those_of_their_chunk_alone(
    open_one: Open, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    kernel = open_one(Hooked, pace="free", **how)
    chunks = numbered_chunks([MIXED[:2], MIXED[2:], ["b", "hello"]])
    monkeypatch.setattr(Hooked, "hook", kernel.interrupt)
    joined = run_joined(kernel, chunks, lambda number: number % 3 == 0)
    monkeypatch.setattr(Hooked, "hook", None)
    assert kernel._engine.idle
    require_rows_alone(joined, kernel, chunks)
