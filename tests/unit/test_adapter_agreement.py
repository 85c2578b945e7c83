"""Trainer, sampler and reference beside one base: it stays, and they agree on each version."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from dataflow.adapters import lora
from dataflow.batch import Batch
from dataflow.model import Model
from engine.weights.probe import TOLERANCES
from operators.kernels.torch.adapters import named_trained
from operators.kernels.torch.forward import TorchLogprobs
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.train import TorchTrain
from tests.kit.generate_suite import MIXED, generated
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk
from tests.kit.training import PG, opened, with_advantage

pytest.importorskip("peft")
ADAPTER = lora(rank=4)
UPDATES, LR = 10, 1e-2


def make_policy(base: str, dtype: Any = "auto") -> Model:
    return Model("policy", base, trainable=True, adapter=ADAPTER, dtype=dtype)


def open_sampler(model: Model, session: FakeSession | None = None) -> TorchGenerate:
    return open_kernel(TorchGenerate(), model, session=session, n=4, max_tokens=12, temperature=1.0)


def open_trainer(base: str, session: FakeSession | None = None, **params: Any) -> TorchTrain:
    return opened(base, PG, adapter=ADAPTER, session=session, lr=LR, temperature=1.0, **params)


def hash_base(module: Any) -> str:
    """Of all weights and buffers of a module but those that are trained."""
    trained_ids = {id(weight) for _, weight in named_trained(module)}
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) not in trained_ids:
            digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_run_changes_no_bit_of_the_base(base: str) -> None:
    session = FakeSession(seed=5, node="train_policy")
    trainer, sampler = open_trainer(base, session), open_sampler(make_policy(base), session)
    reference = open_kernel(TorchLogprobs(), Model("reference", base), session=session)
    module: Any = session.modules["policy"]
    assert module is sampler._module is trainer._module
    rows = generated(sampler, MIXED)
    before, of_base = hash_base(module), generated_logprobs(reference, rows)
    for step in range(1, UPDATES + 1):
        trainer.step(with_advantage(rows, step))
        sampler.load((), step)
        rows_of_step = generated(sampler, MIXED)
        generated_logprobs(reference, rows_of_step)
    assert hash_base(module) == before
    # The adapter is off in the reference's module, which has the same weights.
    assert np.array_equal(generated_logprobs(reference, rows), of_base)
    policy = open_kernel(TorchLogprobs(), make_policy(base), session=session)
    assert np.abs(generated_logprobs(policy, rows) - of_base).max() > 0.1


def generated_logprobs(kernel: TorchLogprobs, rows: Batch) -> np.ndarray:
    """float32 [tokens]: those of the rows' answers."""
    return Batch.concat(list(kernel.run(rows_chunk(rows)))).sort().ragged("logprobs").values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unmerged_sampler_agrees_on_each_version(base: str, dtype: str) -> None:
    trainer = open_trainer(base, dtype=dtype)
    sampler = open_sampler(make_policy(base, dtype))
    for version in range(4):
        sampler.load(trainer.pieces(), version)
        rows = generated(sampler, MIXED)
        require_agreement(trainer.step(with_advantage(rows, version + 1)), rows, dtype)
    # Rows of the version before the last update are beyond the bound.
    with pytest.raises(AssertionError):
        require_agreement(trainer.step(with_advantage(rows, 5)), rows, dtype)


def require_agreement(metrics: Any, rows: Batch, dtype: str) -> None:
    """What a Step says of sampler and trainer is rounding, by the bound of the probe."""
    scale = max(1.0, float(rows.ragged("sampler_logprobs").values.std()))
    assert metrics["policy/mismatch/mean"] <= scale * TOLERANCES[dtype].mean
    assert metrics["policy/mismatch/max"] <= scale * TOLERANCES[dtype].max
