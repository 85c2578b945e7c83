"""Loops of turns on a tiny module, with steps of both kinds: what their tests share.

Owns: the module in three versions, sizes so small that everything grows, rows that end at their
limits. Does not own: scripts of turns (scripted_turns.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn
from transformers import PreTrainedModel

from dataflow.model import Model
from operators.kernels.decoding import DecodeTask
from operators.kernels.torch import decode_pass, prompt_feeding, shared_step, static_turns
from operators.kernels.torch import static_step as static_steps
from operators.kernels.torch.models import load_model
from operators.kernels.torch.static_memory import StaticMemory
from operators.kernels.torch.turns import TurnDecoder
from tests.kit.decode_tasks import make_task, random_prompts
from tests.kit.rows import plain
from tests.kit.scripted_turns import (
    Episodes,
    TurnScript,
    Weights,
    make_versions,
    require_plain_tokens,
    require_trained_logprobs,
    run_script,
    set_weights,
)

STEPS = pytest.mark.parametrize("static", [False, True], ids=["shared keys", "static keys"])


class TinyModel:
    """A module as ours and as transformers runs it, and three versions of its weights."""

    def __init__(self, folder: str) -> None:
        self.module: PreTrainedModel = load_model(Model("policy", folder), "cpu")
        self.reference: nn.Module = plain(folder)
        self.versions: list[Weights] = make_versions(self.module, 3)

    def make_loop(self, task: DecodeTask, static: bool) -> TurnDecoder:
        set_weights(self.module, self.versions[0])
        return TurnDecoder(self.module, task, static=StaticMemory(self.module) if static else None)

    def run(
        self,
        task: DecodeTask,
        script: TurnScript,
        static: bool,
        joining: dict[int, DecodeTask] | None = None,
    ) -> Episodes:
        loop = self.make_loop(task, static)
        return run_script(loop, script, self.module, self.versions, joining)

    def require_contract(self, task: DecodeTask, episodes: Episodes) -> None:
        require_trained_logprobs(self.module, self.versions, task, episodes)
        require_plain_tokens(self.reference, self.versions, task, episodes)


@pytest.fixture(scope="module")
def model(base: str) -> TinyModel:
    return TinyModel(base)


@pytest.fixture(autouse=True, scope="module")
def few_sizes() -> Any:
    """Rows and keys of the step at fixed places in such small sizes that they grow, and parts of
    rows that share a product as small as can be.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_steps, "FEWEST_ROWS", 1)
        patch.setattr(static_steps, "FEWEST_KEYS", 4)
        patch.setattr(static_turns, "FEWEST_KEYS", 4)
        # Rows are cut wherever they are unlike, and several threads read the keys of a few.
        patch.setattr(shared_step, "PART_READS", 0)
        patch.setattr(prompt_feeding, "PASS_TOKENS", 0)
        patch.setattr(decode_pass, "THREAD_READS", 256)
        yield


def endless_task(lengths: list[int], **how: Any) -> DecodeTask:
    """Rows that end at their limit alone."""
    task = make_task(random_prompts(lengths, 0), **how)
    return replace(task, ends=np.zeros(0, np.int64), stopped=None)


def step_until_parked(loop: TurnDecoder) -> list[int]:
    """Step until no row is live; returns those whose turn ended, in this order."""
    ended: list[int] = []
    while not loop.is_idle:
        ended += loop.step().tolist()
    return ended
