"""An engine with an adapter merged into its matrices, version by version, against the trainer that
makes them. It is the only engine of its process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dataflow.adapters import lora
from dataflow.errors import KernelError
from dataflow.log_prob_probe import probe_rows
from dataflow.model import Model
from operators.kernels.torch.train import TorchTrain
from tests.kit.forked_ranks import forked_spawns
from tests.kit.generate_suite import MIXED, generated
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.rows import random_rows
from tests.kit.training import SUPERVISED, assignment, opened
from tests.vllm.conftest import LAYOUT

pytest.importorskip("peft")
ADAPTER = lora(rank=4)


@pytest.fixture(scope="module")
def engine(base: str) -> Iterator[Any]:
    """A kernel of `generate` that merges its Model's adapter."""
    from operators.kernels.vllm.generate import VllmGenerate

    model = Model("policy", base, trainable=True, adapter=ADAPTER)
    how = {"n": 2, "max_tokens": 12, "temperature": 0.0, "merge": True}
    with forked_spawns():
        kernel = open_kernel(VllmGenerate(), model, layout=LAYOUT, session=FakeSession(), **how)
    yield kernel
    kernel.close()


def test_each_version_is_the_trainers_merged_anew(engine: Any, base: str, tolerance: float) -> None:
    trainer: TorchTrain = opened(base, SUPERVISED, adapter=ADAPTER, lr=1e-2)
    rows = probe_rows(5, trainer.vocabulary)
    engine.load(trainer.pieces(), 0)
    before = engine.probe(rows)
    np.testing.assert_allclose(before, trainer.probe(rows), atol=tolerance)
    for version in range(1, 4):
        trainer.step(assignment(random_rows(3, 2, seed=version), version))
        engine.load(trainer.pieces(), version)
        after = engine.probe(rows)
        np.testing.assert_allclose(after, trainer.probe(rows), atol=tolerance)
        assert float(np.abs(after - before).max()) > 10 * tolerance
        before = after
    assert set(generated(engine, MIXED).ragged("version").values.tolist()) == {3}
    assert len(engine._session.metrics["generate/merge_error"]) == 4
    with pytest.raises(KernelError, match="did not come"):
        engine.load(list(trainer.pieces())[:-1], 4)
    assert np.array_equal(engine.probe(rows), before)
