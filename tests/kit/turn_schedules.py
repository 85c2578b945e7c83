"""Rows that are written in turns: a schedule for any TurnLoop, and the same by plain forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from dataflow.batch import Batch, Keys, Ragged
from dataflow.randomness import uniform
from dataflow.schema import Rollout
from operators.kernels.decoding import DecodeTask, Written
from operators.kernels.torch.sampling import sample
from operators.kernels.turn_loop import TurnLoop
from tests.kit.rows import ragged

TURN = 12
"""A turn after the first ends after so many tokens in any case."""


def answer_of(row: int, turn: int) -> np.ndarray:
    """What a row is given after a turn: int32 [1..40]."""
    draw = np.random.default_rng((row, turn))
    return draw.integers(7, 95, draw.integers(1, 41)).astype(np.int32)


def write_round(loop: TurnLoop, after_step: Callable[[], None] | None = None) -> np.ndarray:
    """All rows that wait or write, until each has ended its turn: those, ascending."""
    ended: list[int] = []
    while not loop.is_idle:
        ended += loop.step().tolist()
        if after_step is not None:
            after_step()
    return np.array(sorted(ended), np.int64)


def answer_rows(loop: TurnLoop, rows: np.ndarray, turn: int) -> None:
    """Extend these rows by their answers to a turn."""
    ids = [answer_of(row, turn) for row in rows.tolist()]
    lengths = loop.written.length[rows] + [len(row_ids) for row_ids in ids]
    loop.extend(rows, ids, lengths + TURN)


def write_turns(
    loop: TurnLoop, turns: int, after_step: Callable[[], None] | None = None
) -> Written:
    """Rounds of all rows. after_step: called after each step."""
    for turn in range(turns - 1):
        answer_rows(loop, write_round(loop, after_step), turn)
    write_round(loop, after_step)
    return loop.written


@torch.inference_mode()
def write_plainly(module: nn.Module, task: DecodeTask, turns: int) -> list[list[int]]:
    """The completions of the same rows, each token by a forward of its whole row."""
    rows = len(task.seeds)
    written = Written.empty(rows, limit=task.max_tokens, truncates=task.how.truncates)
    for row in range(rows):
        for turn in range(turns):
            if turn:
                ids = answer_of(row, turn - 1)
                written.give(row, ids, int(written.length[row]) + len(ids) + TURN)
            while not _write_token(module, task, written, row):
                pass
    return completions_of(written)


def _write_token(module: nn.Module, task: DecodeTask, written: Written, row: int) -> bool:
    """Append a row's next token; returns whether its turn ended."""
    place = int(written.length[row])
    ids = [*task.prompts[row // task.n].tolist(), *written.tokens[row, :place].tolist()]
    logits = module(input_ids=torch.tensor([ids])).logits[:, -1]
    draws = torch.from_numpy(uniform(task.seeds[row : row + 1], place))
    drawn = sample(logits, draws, task.how)
    index = np.array([row])
    mass = None if drawn.mass is None else drawn.mass.numpy()
    written.append(index, drawn.tokens.numpy(), drawn.logprobs.numpy(), mass, 0)
    return bool(task.find_ended(written, index)[0])


def completions_of(written: Written) -> list[list[int]]:
    """The tokens of each row, its own and those that it was given."""
    rows: list[list[int]] = []
    for row, length in enumerate(written.length.tolist()):
        rows.append(written.tokens[row, :length].tolist())
    return rows


def numbers_of(written: Written) -> dict[str, list[Any]]:
    """What was written, for comparison by bits."""
    names = ("tokens", "logprobs", "versions", "mass")
    present = [name for name in names if getattr(written, name) is not None]
    columns: dict[str, list[Any]] = {}
    for name in present:
        rows = zip(getattr(written, name), written.length, strict=True)
        columns[name] = [numbers[:length].tolist() for numbers, length in rows]
    return columns


def batch_of(task: DecodeTask, written: Written) -> Batch:
    """The rows as a batch: prompt_ids and completion_ids."""
    groups = (np.arange(len(task.seeds)) // task.n).tolist()
    columns: dict[str, Ragged] = {
        "prompt_ids": ragged([task.prompts[group].tolist() for group in groups]),
        "completion_ids": ragged(completions_of(written)),
    }
    return Batch.make(Keys.of(np.arange(len(task.seeds))), columns, Rollout)
