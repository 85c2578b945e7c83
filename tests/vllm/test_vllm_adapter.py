"""An engine that serves an adapter, version by version, against the trainer that makes it. It is
the only engine of its process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dataflow.adapters import lora
from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from engine.weights.probe import probe_rows
from operators.kernels.torch.base_piece import NAME
from operators.kernels.torch.train import TorchTrain
from tests.kit.forked_ranks import forked_spawns
from tests.kit.generate_suite import MIXED, generated
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.rows import random_rows
from tests.kit.training import SUPERVISED, assignment, opened
from tests.vllm.conftest import LAYOUT

pytest.importorskip("peft")
ADAPTER = lora(rank=4)
UPDATES = 3


@pytest.fixture(scope="module")
def engine(base: str) -> Iterator[Any]:
    """A kernel of `generate` of a Model with an adapter."""
    from operators.kernels.vllm.generate import VllmGenerate

    model = Model("policy", base, trainable=True, adapter=ADAPTER)
    how = {"n": 2, "max_tokens": 12, "temperature": 0.0}
    with forked_spawns():
        kernel = open_kernel(VllmGenerate(), model, layout=LAYOUT, session=FakeSession(), **how)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def trainer(base: str) -> TorchTrain:
    return opened(base, SUPERVISED, adapter=ADAPTER, lr=1e-2)


def require_same_numbers(engine: Any, trainer: TorchTrain, tolerance: float) -> np.ndarray:
    """The engine's log-probs, which are those of the trainer's module."""
    rows = probe_rows(5, trainer.vocabulary)
    numbers = engine.probe(rows)
    np.testing.assert_allclose(numbers, trainer.probe(rows), atol=tolerance)
    return numbers


def test_each_version_is_the_trainers(engine: Any, trainer: TorchTrain, tolerance: float) -> None:
    engine.load(trainer.pieces(), 0)
    before = require_same_numbers(engine, trainer, tolerance)
    first = generated(engine, MIXED)
    for version in range(1, UPDATES + 1):
        trainer.step(assignment(random_rows(3, 2, seed=version), version))
        engine.load(trainer.pieces(), version)
        after = require_same_numbers(engine, trainer, tolerance)
        # Keys of an earlier version would give some of its numbers.
        assert float(np.abs(after - before).max()) > 10 * tolerance
        before = after
    later = generated(engine, MIXED)
    assert set(later.ragged("version").values.tolist()) == {UPDATES}
    assert not later.array("completion_ids").equals(first.array("completion_ids"))


def test_half_an_adapter_and_one_of_another_base_are_refused(
    engine: Any, trainer: TorchTrain
) -> None:
    pieces = list(trainer.pieces())
    rows = probe_rows(5, trainer.vocabulary)
    engine.load(pieces, UPDATES)
    before = engine.probe(rows)
    with pytest.raises(KernelError, match="did not come"):
        engine.load(pieces[:-1], UPDATES + 1)
    others: list[Piece] = []
    for piece in pieces:
        changed = piece.data + 1 if piece.name == NAME else piece.data
        others.append(Piece(piece.name, changed))
    with pytest.raises(KernelError, match="expected weights that were trained beside it"):
        engine.load(others, UPDATES + 1)
    assert np.array_equal(engine.probe(rows), before)
