"""Milliseconds of the train kernel alone: 32 groups of 8 rows, two updates, on a Qwen2 of 2 layers
x 128.

Owns: generated rows with the lengths and repetitions of the demo task and of a long tail, and the
timing. Does not own: any run of a graph (against_trl.py).

    OMP_NUM_THREADS=2 python -m benchmarks.train_step --threads 2
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import tyro
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.settings import TEXT_TOKENS, character_tokenizer
from dataflow.batch import Batch, Keys, Ragged
from dataflow.kernel import Assignment, KernelNode, Layout
from dataflow.loss import Loss, LossTerm
from dataflow.model import Model
from dataflow.processor_time import ProcessorTime
from dataflow.schema import Advantage, Rollout
from operators import losses
from operators.kernels.torch.train import TorchTrain

T = TypeVar("T")
GROUPS, ROWS, COMMON = 32, 8, 44
"""COMMON: tokens that all prompts begin with; 8 more are each prompt's own."""


@dataclass(frozen=True, slots=True)
class OneProcess:
    """The Session of a kernel that runs alone."""

    seed: int = 0
    rank: int = 0
    world: int = 1
    group: Any = None

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """Training makes no random draw per row."""
        return np.zeros(len(keys), dtype=np.uint64)

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Do nothing: `step` returns a Step's metrics."""

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Nobody reads it."""
        return nullcontext()

    def flight(self, count: int) -> None:
        """Nobody reads it."""

    def note_least_tokens(self, count: int) -> None:
        """No Step is worked on in parts."""

    def count_computed(self, elsewhere: ProcessorTime) -> None:
        """Nobody reads it."""

    def tombstone(
        self,
        key: tuple[int, int, int],
        error: str,
        *,
        failed: bool = True,
        row_only: bool = False,
    ) -> None:
        """No row of this benchmark fails."""
        raise ValueError(f"row {key}: {error}")

    def module(self, model: Any, make: Callable[[], T]) -> T:
        """There is nobody to share with."""
        return make()

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """There is nobody to share with."""
        return make()

    def allocate(self, count: int, dtype: npt.DTypeLike) -> np.ndarray:
        """Ordinary memory: nobody else reads it."""
        return np.empty(count, dtype)


def answers(draw: np.random.Generator, kind: str) -> list[list[int]]:
    """One group's answers: a word with some correct letters, or answers of long-tailed length."""
    if kind == "long_tail":
        lengths = np.clip(draw.lognormal(np.log(8), 0.9, ROWS), 1, 43).astype(int)
        return [draw.integers(2, 95, n).tolist() for n in lengths]
    right = {"distinct": 0.0, "learning": 0.75, "learned": 0.95}[kind]
    word = draw.integers(2, 95, draw.integers(3, 7))
    return [
        [
            *np.where(
                draw.random(len(word)) < right, word, draw.integers(2, 95, len(word))
            ).tolist(),
            97,
        ]
        for _ in range(ROWS)
    ]


def rows_of(kind: str) -> Batch:
    """The rows of one Step."""
    draw = np.random.default_rng(0)
    common = draw.integers(2, 95, COMMON).tolist()
    own = [common + draw.integers(2, 95, 8).tolist() for _ in range(GROUPS)]
    written = [answer for _ in range(GROUPS) for answer in answers(draw, kind)]
    ids = ragged(written)
    columns = {
        "prompt_ids": ragged([prompt for prompt in own for _ in range(ROWS)]),
        "completion_ids": ids,
        "completion_mask": ids.like(np.ones(len(ids.values), dtype=np.uint8)),
        "sampler_logprobs": ids.like(np.full(len(ids.values), -4.6, dtype=np.float32)),
    }
    return Batch.make(Keys.of(np.arange(GROUPS)).expand(ROWS), columns, Rollout)


def ragged(rows: list[list[int]]) -> Ragged:
    """Lists as a list column."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Ragged(np.array([token for row in rows for token in row], dtype=np.int32), offsets)


def opened(folder: str, *, minibatches: int = 2, tokens: int = 16384) -> TorchTrain:
    """The kernel with the clipped loss, on random weights. tokens: of a micro-batch."""
    config = Qwen2Config(
        vocab_size=len(TEXT_TOKENS), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    character_tokenizer(TEXT_TOKENS).save_pretrained(folder)
    clipped = LossTerm(function=losses.CLIPPED_POLICY, label="loss", params=(("clip", 0.2),))
    params = {"loss": Loss((clipped,)), "lr": 1e-5, "minibatches": minibatches}
    models = {"model": Model("policy", folder, trainable=True)}
    kernel = TorchTrain()
    kernel.open(
        KernelNode(name="train", operator="train", models=models, params=params),
        Layout(tokens=tokens),
        OneProcess(),
    )
    return kernel


def timed(kernel: TorchTrain, assignment: Assignment, repeats: int) -> list[float]:
    """Milliseconds of each Step after three that are not counted, in ascending order."""
    found = []
    for _ in range(repeats + 3):
        begun = time.perf_counter()
        kernel.step(assignment)
        found.append(1e3 * (time.perf_counter() - begun))
    return sorted(found[3:])


def main(threads: int = 2, repeats: int = 20) -> None:
    """Print least and median milliseconds of a Step, and fed tokens against the rows' tokens."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kernel = opened(folder)
    for kind in ("distinct", "learning", "learned", "long_tail"):
        rows = rows_of(kind)
        ids = rows.ragged("completion_ids")
        gain = np.random.default_rng(1).standard_normal(len(ids.values)).astype(np.float32)
        advantage = Batch.make(rows.keys, {"advantage": ids.like(gain)}, Advantage)
        assignment = Assignment(
            sequence=1, step=1, keys=rows.keys, inputs={"rows": rows, "loss.advantage": advantage}
        )
        found = timed(kernel, assignment, repeats)
        fed = kernel.step(assignment)["train/fed_tokens"]
        total = len(rows.ragged("prompt_ids").values) + len(ids.values)
        print(
            f"{kind:10} {threads} threads: {found[0]:6.1f} ms least, {found[len(found) // 2]:6.1f}"
            f" median; {fed:.0f} tokens fed of {total}"
        )


if __name__ == "__main__":
    tyro.cli(main)
