"""An engine that serves an adapter beside a base in bfloat16 agrees with its trainer on each
version, the first too. It is the only engine of its process.
"""

from __future__ import annotations

import pytest

from dataflow.adapters import lora
from dataflow.model import Model
from engine.weights.probe import Ends, compare_probes, probe_rows, tolerance_of
from tests.kit.forked_ranks import forked_spawns
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.rows import random_rows
from tests.kit.training import SUPERVISED, assignment, opened
from tests.vllm.conftest import LAYOUT

pytest.importorskip("peft")
DTYPE = "bfloat16"


@pytest.mark.long
def test_each_version_is_the_trainers_as_far_as_bfloat16_goes(base: str) -> None:
    from operators.kernels.vllm.generate import VllmGenerate

    adapter = lora(rank=4)
    trainer = opened(base, SUPERVISED, adapter=adapter, dtype=DTYPE, lr=1e-2)
    model = Model("policy", base, trainable=True, adapter=adapter, dtype=DTYPE)
    how = {"n": 1, "max_tokens": 12, "temperature": 0.0}
    with forked_spawns():
        engine = open_kernel(VllmGenerate(), model, layout=LAYOUT, session=FakeSession(), **how)
    rows = probe_rows(5, trainer.vocabulary)
    for version in range(4):
        engine.load(trainer.pieces(), version)
        ends = Ends(model="policy", writer="train", reader="rollout", version=version)
        compare_probes(trainer.probe(rows), engine.probe(rows), rows, tolerance_of([DTYPE]), ends)
        trainer.step(assignment(random_rows(3, 2, seed=version), version + 1))
    engine.close()
