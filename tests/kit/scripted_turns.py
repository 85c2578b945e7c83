"""Rows that are written in turns by a script: how long each turn is, what it is answered, when.

Owns: the script, its run on a loop of turns, and what transformers says of the rows. Does not own:
any loop. What a row does depends on its number and its turn, so that two runs of one script can be
compared row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    answer; delay: steps until it comes at most. renewals: steps before which weights come.
    """

    seed: int = 0
    turns: int = 3
    first: int = 5
    longest: int = 9
    delay: int = 3
    renewals: tuple[int, ...] = ()

    def draw_for(self, row: int, turn: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, row, turn))


@dataclass(slots=True)
class Episodes:
    """What a run of a script left. written: of each row, in the order in which they came to the
    loop; given bool [rows, room]: tokens that the rows were given.
    """

    written: Written
    given: np.ndarray
    turns: np.ndarray
    ended: list[int] = field(default_factory=list)

    @staticmethod
    def none(*, truncates: bool) -> Episodes:
        written = Written.empty(0, limit=1, truncates=truncates)
        return Episodes(written, np.zeros((0, 0), bool), np.zeros(0, np.int64))

    def add(self, rows: int) -> np.ndarray:
        """So many rows come; their places."""
        places = np.arange(rows) + len(self.turns)
        self.turns = np.pad(self.turns, (0, rows))
        self.given = np.pad(self.given, ((0, rows), (0, 0)))
        self.written.reserve_rows(len(self.turns))
        return places

    def note_given(self, place: int, begin: int, end: int) -> None:
        more_room = max(0, end - self.given.shape[1])
        self.given = np.pad(self.given, ((0, 0), (0, more_room)))
        self.given[place, begin:end] = True

    def copy(self, place: int, written: Written, row: int) -> None:
        """Copy what a row has written, before another one has its number."""
        end = int(written.length[row])
        mass = None if written.mass is None else written.mass[row]
        for at in range(end):
            its_mass = None if mass is None else mass[at : at + 1]
            self.written.append(
                np.array([place]),
                written.tokens[row, at : at + 1],
                written.logprobs[row, at : at + 1],
                its_mass,
                written.versions[row, at : at + 1],
            )

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
    loop: TurnLoop,
    script: TurnScript,
    module: nn.Module,
    versions: Sequence[Weights],
    joining: Mapping[int, DecodeTask] | None = None,
) -> Episodes:
    """Write all rows by the script; version v of the weights comes with renewal v. joining: by the
    step before which they come, tasks that join.
    """
    waiting = dict(joining or {})
    running = _ScriptRun(loop, script)
    running.add(np.arange(len(loop.written.length)))
    step = 0
    while running.goes_on or waiting:
        if step in script.renewals:
            version = 1 + script.renewals.index(step)
            set_weights(module, versions[version])
            loop.renew(version)
        if step in waiting:
            running.add(loop.join(waiting.pop(step)))
        running.step(step)
        step += 1
    return running.episodes


class _ScriptRun:
    """Rows under way: of each number of the loop which row it is, and when it is answered."""

    def __init__(self, loop: TurnLoop, script: TurnScript) -> None:
        self.episodes = Episodes.none(truncates=loop.written.mass is not None)
        self._loop, self._script = loop, script
        self._place: dict[int, int] = {}
        self._due: dict[int, int] = {}

    @property
    def goes_on(self) -> bool:
        return bool(self._place)

    def add(self, rows: np.ndarray) -> None:
        places = self.episodes.add(len(rows)).tolist()
        for row, place in zip(rows.tolist(), places, strict=True):
            assert row not in self._place, "a number of a row that has not left"
            self._place[row] = place
            limit = self._script.draw_for(place, 0).integers(1, self._script.first + 1)
            self._loop.written.limit[row] = limit

    def step(self, step: int) -> None:
        """Answer the rows that are due, and write a token."""
        answered = sorted(row for row, at in self._due.items() if at <= step)
        for row in answered:
            del self._due[row]
        self._answer(answered)
        for row in self._loop.step().tolist():
            place = self._place[row]
            self.episodes.ended.append(place)
            self.episodes.turns[place] += 1
            draw = self._script.draw_for(place, int(self.episodes.turns[place]))
            self._due[row] = step + 1 + int(draw.integers(0, self._script.delay + 1))

    def _answer(self, rows: Sequence[int]) -> None:
        """Extend these rows, but for those that end here."""
        loop, script, episodes = self._loop, self._script, self.episodes
        extended: list[int] = []
        answers: list[np.ndarray] = []
        limits: list[int] = []
        for row in rows:
            place = self._place[row]
            turn = int(episodes.turns[place])
            draw = script.draw_for(place, turn)
            if draw.random() < 0.1 or turn >= script.turns:
                self._end(row)
                continue
            length, more = draw.integers(1, script.longest + 1), draw.integers(1, script.first + 1)
            begin = int(loop.written.length[row])
            extended.append(row)
            answers.append(draw.integers(7, 95, length).astype(np.int32))
            limits.append(int(begin + length + more))
            episodes.note_given(place, begin, int(begin + length))
        if extended:
            loop.extend(np.array(extended, np.int64), answers, np.array(limits, np.int32))

    def _end(self, row: int) -> None:
        self.episodes.copy(self._place.pop(row), self._loop.written, row)
        self._loop.drop(np.array([row]))


def merge_tasks(tasks: Sequence[DecodeTask]) -> DecodeTask:
    """All of their rows in one."""
    prompts = [task.prompts[index].tolist() for task in tasks for index in range(len(task.prompts))]
    counts = np.concatenate([task.row_counts for task in tasks])
    seeds = np.concatenate([task.seeds for task in tasks])
    return replace(tasks[0], prompts=ragged(prompts), counts=counts, seeds=seeds)


def require_trained_logprobs(
    module: nn.Module, versions: Sequence[Weights], task: DecodeTask, episodes: Episodes
) -> None:
    """Each token that a row wrote has the log-prob that the packed forward of training gives it,
    under the weights of its version.
    """
    written = episodes.written
    rows = np.flatnonzero(written.length).tolist()
    completions = ragged([written.tokens[row, : written.length[row]].tolist() for row in rows])
    prompts = ragged([_prompt_of(task, row).tolist() for row in rows])
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
            prompt = _prompt_of(task, row).astype(np.int64)
            ids = torch.from_numpy(np.concatenate([prompt, tokens]))
            with torch.no_grad():
                logits = reference(ids[None]).logits[0, len(prompt) - 1 : -1]
            draws = uniform(np.repeat(task.seeds[row : row + 1], length), np.arange(length))
            _require_drawn(logits[its], tokens[its], draws[its], task.how)
    set_weights(reference, versions[0])


def _prompt_of(task: DecodeTask, row: int) -> np.ndarray:
    prompts = np.repeat(np.arange(len(task.prompts)), task.row_counts)
    return task.prompts[prompts[row]]


def _require_drawn(
    logits: torch.Tensor, tokens: np.ndarray, draws: np.ndarray, how: Sampling
) -> None:
    """These tokens are those of these draws, or of some so close that rounding decides."""
    fits = np.zeros(len(tokens), bool)
    for error in (0.0, -1e-5, 1e-5):
        near = np.clip(draws + error, 0.0, 1.0 - 1e-12)
        fits |= sample(logits, torch.from_numpy(near), how).tokens.numpy() == tokens
    assert fits.all()
