"""The columns of Episode, made of the rows of episodes that are over.

Owns: each column's form. Does not own: what happened in an episode (episodes.py), which rows leave
together (interacting.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Ragged
from operators.kernels.episodes import EpisodeRow, EpisodeTurn

Pack = Callable[[list[np.ndarray], np.dtype[Any]], Ragged]
"""Packs arrays to a list column, in the session's memory."""

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class EpisodeColumns:
    """Makes columns, each only if it is asked for. decode: ids of rows to texts. numbers: int64
    [rows], which of its prompt's episodes each row belongs to.
    """

    def __init__(
        self,
        rows: Sequence[EpisodeRow],
        pack: Pack,
        decode: Callable[[Ragged], list[str]],
        numbers: np.ndarray,
    ) -> None:
        self._rows = rows
        self._numbers = numbers
        self._pack = pack
        self._decode = decode

    def make(self, names: Iterable[str]) -> dict[str, Any]:
        """The columns of these names, in the order of the schema."""
        wanted = set(names)
        makers = {
            "prompt_ids": lambda: self._tokens(lambda row: row.episode.prompt, _INT32),
            "completion_ids": lambda: self._tokens(lambda row: row.tokens, _INT32),
            "completion_mask": lambda: self._tokens(EpisodeRow.make_mask, np.dtype(np.uint8)),
            "completion": self._texts,
            "sampler_logprobs": lambda: self._tokens(lambda row: row.logprobs, _FLOAT32),
            "version": lambda: self._tokens(lambda row: row.versions, _INT32),
            "finish": lambda: self._strings(lambda row: str(row.episode.finish)),
            "sampler_mass": lambda: self._tokens(_mass_of, _FLOAT32),
            "turn": lambda: self._tokens(EpisodeRow.make_turn_numbers, np.dtype(np.uint16)),
            "turn_end": lambda: self._turns(lambda turn: turn.end, pa.int32()),
            "turn_reward": lambda: self._turns(lambda turn: turn.reward, pa.float32()),
            "model_seconds": lambda: self._turns(lambda turn: turn.model_seconds, pa.float32()),
            "environment_seconds": lambda: self._turns(
                lambda turn: turn.environment_seconds, pa.float32()
            ),
            "final_reward": self._final_rewards,
            "messages": lambda: self._strings(lambda row: _dump(row.episode.messages)),
            "environment_state": lambda: self._strings(lambda row: _dump(dict(row.episode.state))),
            "episode": lambda: pa.array(self._numbers.astype(np.int32)),
            "segment": lambda: pa.array([row.episode.segment for row in self._rows], pa.int32()),
        }
        return {name: makers[name]() for name in makers if name in wanted}

    def _tokens(self, values_of: Callable[[EpisodeRow], np.ndarray], dtype: np.dtype) -> Ragged:
        return self._pack([values_of(row) for row in self._rows], dtype)

    def _texts(self) -> pa.Array:
        if not self._rows:
            return pa.array([], pa.utf8())
        ids = self._tokens(lambda row: row.tokens, _INT32)
        return pa.array(self._decode(ids), pa.utf8())

    def _strings(self, text_of: Callable[[EpisodeRow], str]) -> pa.Array:
        return pa.array([text_of(row) for row in self._rows], pa.utf8())

    def _turns(self, number_of: Callable[[EpisodeTurn], float | None], kind: pa.DataType) -> Any:
        rows: list[list[float | None]] = []
        for row in self._rows:
            rows.append([number_of(turn) for turn in row.episode.turns])
        return pa.array(rows, pa.large_list(kind))

    def _final_rewards(self) -> pa.Array:
        return pa.array([row.episode.final_reward for row in self._rows], pa.float32())


def _mass_of(row: EpisodeRow) -> np.ndarray:
    assert row.mass is not None, "asked for by a node whose sampler truncates nothing"
    return row.mass


def _dump(json_value: Any) -> str:
    return json.dumps(json_value, ensure_ascii=False)
