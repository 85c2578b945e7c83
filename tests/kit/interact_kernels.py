"""Kernels of interact without an engine, and what holds for each of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.kernel import KernelNode, Layout
from dataflow.model import Model
from operators.environments import Environment, as_environment
from operators.kernels.interacting import Interacting
from operators.kernels.torch.interact import TorchInteract
from tests.kit.environments import Chatter
from tests.kit.generate_suite import logprobs_under
from tests.kit.kernels import FakeSession, prompt_chunk

TOLERANCE = 1e-5


@pytest.fixture
def kernels() -> Iterator[list[TorchInteract]]:
    """Kernels to be closed at the end."""
    opened_kernels: list[TorchInteract] = []
    yield opened_kernels
    for kernel in opened_kernels:
        kernel.close()


def with_arguments(environment: type, **arguments: Any) -> Environment:
    """An environment of this class, with keywords for it."""
    wrapped = as_environment(environment)
    assert isinstance(wrapped, Environment)
    return replace(wrapped, arguments=arguments)


def open_interact(
    base: str,
    environment: Any = Chatter,
    *,
    session: FakeSession | None = None,
    layout: Layout | None = None,
    inproc: bool = True,
    **params: Any,
) -> TorchInteract:
    """A kernel whose environments run in this process, unless inproc is False."""
    usual = {"n": 1, "max_turns": 4, "max_tokens": 60, "max_turn_tokens": 9}
    model = Model("policy", base)
    node = KernelNode(
        name="episode",
        operator="interact",
        models={"policy": model},
        params=usual | params | {"environment": as_environment(environment)},
        inproc=inproc,
    )
    kernel = TorchInteract()
    kernel.open(node, layout or Layout(slots=8), session or FakeSession(node="episode"))
    return kernel


def run_episodes(kernel: Interacting, prompts: list[Any]) -> Batch:
    """All rows of one chunk."""
    return Batch.concat(list(kernel.run(prompt_chunk(prompts)))).sort()


def require_sound(batch: Batch, base: str, *, completion: int, context: int) -> None:
    """Lengths, turns, budgets and log-probs of each row."""
    ids = batch.ragged("completion_ids")
    for name in ("completion_mask", "sampler_logprobs", "version", "turn"):
        assert batch.ragged(name).offsets.tolist() == ids.offsets.tolist(), name
    prompt_lengths = batch.ragged("prompt_ids").lengths
    assert ids.lengths.max() <= completion
    assert (prompt_lengths + ids.lengths).max() <= context
    mask = batch.ragged("completion_mask")
    turns = batch.ragged("turn_end")
    for row in range(len(batch)):
        ends = turns[row].tolist()
        assert ends == sorted(set(ends))
        assert ends[-1] == ids.lengths[row]
        assert mask[row][np.array(ends) - 1].all()
        assert mask[row][0] == 1
        assert batch.ragged("turn")[row][np.array(ends) - 1].tolist() == list(range(len(ends)))
        assert len(batch.ragged("turn_reward")[row]) == len(ends)
    logprobs = batch.ragged("sampler_logprobs").values
    trained = mask.values == 1
    assert (logprobs[~trained] == 0).all()
    expected = logprobs_under(base, batch, 1.0)
    np.testing.assert_allclose(logprobs[trained], expected[trained], atol=TOLERANCE, rtol=TOLERANCE)
