"""An adapter after ten Steps, against what TRL's trainers with peft made of the same.

`make peers` records theirs in tests/peers/adapters/; nothing of a peer but peft is needed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataflow.adapters import lora
from dataflow.batch import Batch, Keys
from dataflow.kernel import Assignment, Layout
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.schema import Advantage, Reward, Rollout
from dataflow.user import Columns
from operators import losses
from operators.advantage_formulas import group_advantage
from operators.kernels.torch.forward import TorchLogprobs
from operators.kernels.torch.train import TorchTrain
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk
from tests.kit.models import save_tiny
from tests.kit.ragged_lists import ragged
from tests.kit.rows import with_tokens
from tests.kit.training import SUPERVISED, assignment, distance, loss_of, weights_of
from tests.peers import adapter_steps as steps

pytest.importorskip("peft")
RECORDED = json.loads((Path(__file__).parents[1] / "peers/adapters/trl.json").read_text())
TRL_ADVANTAGE: dict[str, Any] = {"baseline": "mean", "scale": "std", "ragged": False}
TEMPERATURE: dict[str, Any] = {"temperature": 1.0}
GRPO = loss_of(
    losses.CLIPPED_POLICY, clip=steps.CLIP, beta=steps.BETA, kl="k3", dual_clip=None, dialect="trl"
)


def tensor_of(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(like.shape)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base that both sides have."""
    folder = save_tiny(tmp_path_factory.mktemp("base"), **steps.CONFIG)
    path = Path(folder) / "model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        weights[name] = tensor_of(steps.draw_weight(name, tuple(weight.shape)), weight)
    save_file(weights, path, {"format": "pt"})
    return folder


class AdapterTraining:
    """A policy that begins as the peer's, with what computes log-probs beside it."""

    def __init__(self, base: str, loss: Loss, **params: Any) -> None:
        adapter = lora(rank=steps.RANK, alpha=steps.ALPHA, targets=steps.TARGETS)
        self._policy = Model("policy", base, trainable=True, adapter=adapter)
        self._reference = Model("reference", base)
        self._session = FakeSession(node="train_policy")
        self.kernel: TorchTrain = open_kernel(
            TorchTrain(),
            self._policy,
            node="train_policy",
            layout=Layout(tokens=16384),
            session=self._session,
            loss=loss,
            lr=steps.LR,
            clip_norm=steps.CLIP_NORM,
            optimizer=AdamW(betas=steps.BETAS),
            **params,
        )
        with torch.no_grad():
            for piece in self.kernel.pieces():
                if ".lora_" in piece.name:
                    numbers = steps.draw_adapter(piece.name, tuple(piece.data.shape))
                    piece.data.copy_(tensor_of(numbers, piece.data))

    def compute_logprobs(self, rows: Batch, model: Model) -> Batch:
        kernel = open_kernel(TorchLogprobs(), model, session=self._session, **TEMPERATURE)
        return Batch.concat(list(kernel.run(rows_chunk(rows)))).sort()

    def make_grpo(self, step_rows: list[steps.StepRow], step: int) -> Assignment:
        """A Step of rows that the policy wrote as it is now."""
        rows = rows_of(step_rows)
        written = self.compute_logprobs(rows, self._policy).ragged("logprobs")
        rows = with_tokens(rows, sampler_logprobs=written.values)
        reward = np.array([row.reward for row in step_rows], np.float32)
        scores = Batch.make(rows.keys, {"reward": reward}, Reward)
        advantages = group_advantage(
            Columns(rows, Rollout), Columns(scores, Reward), dialect="trl", **TRL_ADVANTAGE
        )
        return assignment(
            rows,
            step,
            clipped_policy_loss__advantage=Batch.make(
                rows.keys, {"advantage": advantages["advantage"]}, Advantage
            ),
            clipped_policy_loss__reference=self.compute_logprobs(rows, self._reference),
        )

    def make_sft(self, step_rows: list[steps.StepRow], step: int) -> Assignment:
        return assignment(rows_of(step_rows), step)


def rows_of(step_rows: list[steps.StepRow]) -> Batch:
    """They are the samples of their groups, in order; every token of an answer is trained."""
    answers = ragged([row.answer for row in step_rows])
    count = len(answers.values)
    columns = {
        "prompt_ids": ragged([row.prompt for row in step_rows]),
        "completion_ids": answers,
        "completion_mask": answers.like(np.ones(count, np.uint8)),
        "sampler_logprobs": answers.like(np.zeros(count, np.float32)),
        "version": answers.like(np.zeros(count, np.int32)),
    }
    keys = Keys.of(np.arange(steps.GROUPS)).expand(steps.SAMPLES)
    return Batch.make(keys, columns, Rollout)


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_ten_steps_make_the_adapter_that_trl_makes(base: str, trainer: str) -> None:
    if trainer == "sft":
        training = AdapterTraining(base, SUPERVISED)
        make = training.make_sft
    else:
        training = AdapterTraining(base, GRPO, aggregate="sequence_mean", **TEMPERATURE)
        make = training.make_grpo
    began = weights_of(training.kernel)
    for step, step_rows in enumerate(steps.list_steps(), start=1):
        training.kernel.step(make(step_rows, step))
    trained = weights_of(training.kernel)
    theirs: dict[str, Tensor] = {}
    for name, numbers in RECORDED[trainer].items():
        theirs[name] = tensor_of(numbers, began[name])
    assert distance(trained, began) > steps.LR
    assert distance(trained, theirs) < 1e-5
