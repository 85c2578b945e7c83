"""Rows that are written in turns by a script: how long each turn is, what it is answered, when.

Owns: the script, its run on a loop of turns, and what transformers says of the rows. Does not own:
any loop. What a row does depends on its number and its turn, so that two runs of one script can be
compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from dataflow.randomness import uniform
from operators.kernels.decoding import DecodeTask, Written
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.packing import pack
from operators.kernels.torch.sampling import Sampling, sample
from operators.kernels.turn_loop import TurnLoop
from tests.kit.rows import ragged

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScript:
    """turns: the most turns of a row; a third of the rows ends sooner. longest: tokens of an
    answer; delay: steps until it comes at most. unwanted: rows that are dropped at the first step
    at which they have not begun, from the third on. renewals: steps before which weights come.
    """

    seed: int = 0
    turns: int = 3
    first: int = 5
    longest: int = 9
    delay: int = 3
    unwanted: tuple[int, ...] = ()
    renewals: tuple[int, ...] = ()

    def draw_for(self, row: int, turn: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, row, turn))


@dataclass(slots=True)
class Episodes:
    """What a run of a script left. given bool [rows, room]: tokens that the rows were given."""

    written: Written
    given: np.ndarray
    turns: np.ndarray
    ended: list[int] = field(default_factory=list)

    def list_completions(self) -> list[list[int]]:
        lengths = self.written.length
        return [self.written.tokens[row, :length].tolist() for row, length in enumerate(lengths)]

    def require_same_bits(self, other: Episodes) -> None:
        assert self.ended == other.ended
        assert self.list_completions() == other.list_completions()
        assert np.array_equal(self.given, other.given)
        for name in ("logprobs", "versions"):
            mine, its = getattr(self.written, name), getattr(other.written, name)
            assert np.array_equal(mine, its), name


def set_weights(module: nn.Module, weights: Weights) -> None:
    """Copy these weights into a module, in place."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])


def make_versions(module: nn.Module, count: int) -> list[Weights]:
    """The module's weights, and others that differ so much that all log-probs do."""
    base = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    versions = [base]
    for _ in range(1, count):
        changed: Weights = {}
        for name, weight in base.items():
            noise = torch.randn(weight.shape, generator=generator)
            changed[name] = weight + 0.1 * noise
        versions.append(changed)
    return versions


def run_script(
    loop: TurnLoop, script: TurnScript, module: nn.Module, versions: Sequence[Weights]
) -> Episodes:
    """Write all rows by the script; version v of the weights comes with renewal v."""
    rows = len(loop.written.length)
    loop.written.limit[:] = [_draw_limit(script, row) for row in range(rows)]
    episodes = Episodes(loop.written, np.zeros((rows, 0), bool), np.zeros(rows, np.int64))
    due: dict[int, int] = {}  # row -> the step at which it is answered
    step = 0
    while due or not loop.is_idle:
        if step in script.renewals:
            version = 1 + script.renewals.index(step)
            set_weights(module, versions[version])
            loop.renew(version)
        if step == 3:
            unwanted = np.array(script.unwanted, np.int64)
            loop.drop(unwanted[loop.written.length[unwanted] == 0])
        answered = sorted(row for row, at in due.items() if at <= step)
        _answer(loop, script, episodes, np.array(answered, np.int64))
        for row in answered:
            del due[row]
        for row in loop.step().tolist():
            episodes.ended.append(row)
            episodes.turns[row] += 1
            delay = script.draw_for(row, int(episodes.turns[row])).integers(0, script.delay + 1)
            due[row] = step + 1 + int(delay)
        step += 1
    return episodes


def _draw_limit(script: TurnScript, row: int) -> int:
    return int(script.draw_for(row, 0).integers(1, script.first + 1))


def _answer(loop: TurnLoop, script: TurnScript, episodes: Episodes, rows: np.ndarray) -> None:
    """Extend these rows, but for those that end here."""
    answers: list[np.ndarray] = []
    limits: list[int] = []
    goes_on: list[bool] = []
    for row in rows.tolist():
        turn = int(episodes.turns[row])
        draw = script.draw_for(row, turn)
        ends = draw.random() < 0.1 or turn >= script.turns
        goes_on.append(not ends)
        if ends:
            continue
        length, more = draw.integers(1, script.longest + 1), draw.integers(1, script.first + 1)
        answers.append(draw.integers(7, 95, length).astype(np.int32))
        limits.append(int(loop.written.length[row] + length + more))
    extended = rows[np.array(goes_on, bool)]
    if len(extended) < len(rows):
        loop.drop(rows[~np.array(goes_on, bool)])
    if not len(extended):
        return
    begins = loop.written.length[extended]
    loop.extend(extended, answers, np.array(limits, np.int32))
    more_room = loop.written.tokens.shape[1] - episodes.given.shape[1]
    episodes.given = np.pad(episodes.given, ((0, 0), (0, more_room)))
    for row, begin in zip(extended.tolist(), begins.tolist(), strict=True):
        episodes.given[row, begin : loop.written.length[row]] = True


def require_trained_logprobs(
    module: nn.Module, versions: Sequence[Weights], task: DecodeTask, episodes: Episodes
) -> None:
    """Each token that a row wrote has the log-prob that the packed forward of training gives it,
    under the weights of its version.
    """
    written = episodes.written
    rows = np.flatnonzero(written.length).tolist()
    completions = ragged([written.tokens[row, : written.length[row]].tolist() for row in rows])
    prompts = ragged([task.prompts[row // task.n].tolist() for row in rows])
    packed = pack(prompts, completions, np.arange(len(rows)))
    temperature = task.how.temperature or 1.0
    ids = torch.from_numpy(completions.values.astype(np.int64)[packed.tokens])
    row_of_token = np.repeat(rows, completions.lengths)
    index = np.arange(len(row_of_token)) - np.repeat(completions.offsets[:-1], completions.lengths)
    is_given = np.pad(episodes.given, ((0, 0), (0, written.tokens.shape[1])))[row_of_token, index]
    recorded = written.logprobs[row_of_token, index]
    assert not recorded[is_given].any()
    token_versions = written.versions[row_of_token, index]
    for version, weights in enumerate(versions):
        set_weights(module, weights)
        expected = np.zeros(len(row_of_token), np.float32)
        with torch.no_grad():
            logprobs = predictions(module, packed, ids, temperature=temperature).logprobs
        expected[packed.tokens] = logprobs.numpy()
        its = (token_versions == version) & ~is_given
        np.testing.assert_allclose(recorded[its], expected[its], atol=1e-5, rtol=1e-5)
    set_weights(module, versions[0])


def require_plain_tokens(
    reference: Any, versions: Sequence[Weights], task: DecodeTask, episodes: Episodes
) -> None:
    """Each token that a row wrote is the one that the Hugging Face module's logits after all tokens
    before it, and the draw of its index, choose.
    """
    written = episodes.written
    for version, weights in enumerate(versions):
        set_weights(reference, weights)
        for row in np.flatnonzero(written.length).tolist():
            length = int(written.length[row])
            its = written.versions[row, :length] == version
            its[: episodes.given.shape[1]] &= ~episodes.given[row, :length]
            if not its.any():
                continue
            tokens = written.tokens[row, :length].astype(np.int64)
            prompt = task.prompts[row // task.n].astype(np.int64)
            ids = torch.from_numpy(np.concatenate([prompt, tokens]))
            with torch.no_grad():
                logits = reference(ids[None]).logits[0, len(prompt) - 1 : -1]
            draws = uniform(np.repeat(task.seeds[row : row + 1], length), np.arange(length))
            _require_drawn(logits[its], tokens[its], draws[its], task.how)
    set_weights(reference, versions[0])


def _require_drawn(
    logits: torch.Tensor, tokens: np.ndarray, draws: np.ndarray, how: Sampling
) -> None:
    """These tokens are those of these draws, or of some so close that rounding decides."""
    fits = np.zeros(len(tokens), bool)
    for error in (0.0, -1e-5, 1e-5):
        near = np.clip(draws + error, 0.0, 1.0 - 1e-12)
        fits |= sample(logits, torch.from_numpy(near), how).tokens.numpy() == tokens
    assert fits.all()
