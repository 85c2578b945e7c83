"""The kernel of `transitions`: each turn of an episode as a row.

Owns: cutting episodes into rows, and giving up the rows of turns that were not taken. Does not own:
where turns are (operators/turn_formulas.py), text (text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.samplers import MOST_SAMPLES
from dataflow.schema import Transition, TruncatedTransition
from operators.kernels.overlong import take_spans
from operators.kernels.text import load_tokenizer
from operators.turn_formulas import TurnPlaces, find_turns, sum_turn_rewards

_BY_TOKEN = (
    "completion_ids",
    "completion_mask",
    "sampler_logprobs",
    "sampler_mass",
    "version",
)
"""Columns of the episode of which a turn has its part."""


class Transitions:
    """See `operators.turns.transitions`. params: max_turns. models: `tokenizer`, the Model whose
    directory has it; read only if somebody reads `completion`.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load the tokenizer if text is read. Raises DataError if that is malformed."""
        self._node = node
        self._session = session
        self._max_turns = int(node.params["max_turns"])
        self._tokenizer: Any = None
        if "completion" in (node.returns or Transition.columns):
            self._tokenizer = load_tokenizer(node.models["tokenizer"].base)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of the turns of all episodes, keyed `chunk.keys.expand(max_turns)`; the rows of
        turns that an episode does not have become tombstones of their own. Raises DataError for an
        episode with more than max_turns.
        """
        episodes = chunk.inputs["episode"]
        turn_end = episodes.ragged("turn_end")
        mask = episodes.ragged("completion_mask")
        self._require_turns(chunk.keys, turn_end.lengths)
        turns = find_turns(turn_end, mask, chunk.keys)
        all_keys = chunk.keys.expand(self._max_turns)
        is_taken = np.zeros(len(all_keys), dtype=bool)
        is_taken[turns.row * self._max_turns + turns.turn] = True
        self._give_up(all_keys.take(~is_taken))
        if not is_taken.any():
            return
        columns = self._make_columns(episodes, chunk.keys, turns)
        schema = Transition
        if "sampler_mass" in columns:
            schema = TruncatedTransition
        yield Batch.make(all_keys.take(is_taken), columns, schema)

    def close(self) -> None:
        """Nothing to close."""

    def _require_turns(self, keys: Keys, counts: np.ndarray) -> None:
        most = int(counts.max(initial=0))
        if most > self._max_turns:
            key = keys.rows()[int(counts.argmax())]
            raise DataError(
                f"{self._node.name}: row (position, sample, attempt) {key}: expected at most"
                f" max_turns={self._max_turns} turns, found {most}. Fix: max_turns={most} or more,"
                " that of the episode's interact."
            )

    def _give_up(self, keys: Keys) -> None:
        for key in keys.rows():
            turn = key[1] % self._max_turns
            message = f"{self._node.name}: the episode has no turn {turn}"
            self._session.tombstone(key, message, failed=False, row_only=True)

    def _make_columns(
        self, episodes: Batch, keys: Keys, turns: TurnPlaces
    ) -> dict[str, Ragged | pa.Array | np.ndarray]:
        """The columns that somebody reads."""
        starts = turns.find_starts(episodes.ragged("completion_mask"))
        lengths = turns.stop - starts

        def take_written(name: str) -> Ragged:
            return take_spans(episodes.ragged(name), starts, lengths)

        # Functions, in the order of the columns: only what somebody reads is computed.
        make: dict[str, Callable[[], Any]] = {
            "prompt_ids": lambda: self._join_before(episodes, turns.row, starts),
            "completion": lambda: self._decode(take_written("completion_ids")),
            "finish": lambda: _finishes(episodes, turns),
            "episode_id": lambda: (keys.position * MOST_SAMPLES + keys.sample)[turns.row],
            "turn": lambda: turns.turn.astype(np.int32),
            "reward": lambda: sum_turn_rewards(episodes, turns).astype(np.float32),
            "done": lambda: turns.is_last.astype(np.uint8),
        }
        names = self._node.returns or (*_BY_TOKEN, *make)
        columns: dict[str, Ragged | pa.Array | np.ndarray] = {}
        for name in names:
            if name in make:
                columns[name] = make[name]()
            elif name in episodes.names:
                columns[name] = take_written(name)
        return columns

    def _join_before(self, episodes: Batch, row: np.ndarray, starts: np.ndarray) -> Ragged:
        """All token ids before each turn, in memory of the session."""
        prompts = episodes.ragged("prompt_ids")
        completions = episodes.ragged("completion_ids")
        lengths = prompts.lengths[row] + starts - completions.offsets[:-1][row]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = self._session.allocate(int(offsets[-1]), np.int32)
        parts: list[np.ndarray] = []
        for episode, start in zip(row.tolist(), starts.tolist(), strict=True):
            begin = int(completions.offsets[episode])
            parts += [prompts[episode], completions.values[begin:start]]
        np.concatenate(parts, out=values)
        return Ragged(values, offsets)

    def _decode(self, ids: Ragged) -> pa.Array:
        return pa.array(self._tokenizer.decode(ids), pa.utf8())


def _finishes(episodes: Batch, turns: TurnPlaces) -> pa.Array:
    """Of each turn how it ended: a turn that was answered ended by itself."""
    of_episodes = episodes.array("finish").take(pa.array(turns.row)).to_pylist()
    finishes = ["stop"] * len(of_episodes)
    for index in np.flatnonzero(turns.is_last).tolist():
        finishes[index] = of_episodes[index]
    return pa.array(finishes, pa.utf8())
