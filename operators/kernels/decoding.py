"""What every decode loop is asked and what it answers: rows to write, and what has been written.

Owns: the task, the tokens with their numbers, when a row ends. Does not own: any decode loop
(torch/decode.py, vllm/decode.py), which rows are in one (task_rows.py), columns (generating.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dataflow.batch import Ragged

if TYPE_CHECKING:
    from operators.kernels.torch.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTask:
    """What to write: n rows for each prompt, one after another; or so many as `counts` says, int64
    [prompts]. weights: float32 [prompts], heavier ones' rows first; None: in their order.

    seeds: uint64 [rows], the random stream of each row. ends: the ids that end a row. stopped:
    given the tails of some rows as int32 ids, tells which of them contain a stop string (None if
    there are no stop strings); window: how many of the last tokens it needs. slots: rows decoded
    at once. budget: the most tokens in one prefill. sampler: `keyed`, or the name of the kernel
    whose own sampler draws.
    """

    prompts: Ragged
    n: int
    seeds: np.ndarray
    max_tokens: int
    how: Sampling
    ends: np.ndarray
    slots: int
    budget: int
    parked: int = 0
    """Keys, in tokens, that rows between two turns may keep; 0: any number. What is beyond goes,
    that of the row that was parked first before others, and is computed again."""
    stopped: Callable[[list[np.ndarray]], np.ndarray] | None = None
    window: int = 0
    sampler: str = "keyed"
    counts: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def row_counts(self) -> np.ndarray:
        """How many rows each prompt has: int64 [prompts]."""
        if self.counts is None:
            return np.full(len(self.prompts), self.n, np.int64)
        return self.counts

    @property
    def row_weights(self) -> np.ndarray | None:
        """The weight of each row's prompt: float32 [rows]."""
        return None if self.weights is None else np.repeat(self.weights, self.row_counts)

    def find_ended(self, written: Written, rows: np.ndarray) -> np.ndarray:
        """Find which of these rows ended with their last token: bool [rows]. Sets
        `written.stop` of these rows: whether they ended with a stop.
        """
        lengths = written.length[rows]
        last_tokens = written.tokens[rows, lengths - 1]
        stop = (last_tokens[:, None] == self.ends).any(1)
        if self.stopped is not None:
            tails: list[np.ndarray] = []
            for row, begin, end in zip(rows, written.begin[rows], lengths, strict=True):
                tails.append(written.tokens[row, max(begin, end - self.window) : end])
            stop |= self.stopped(tails)
        written.stop[rows] = stop
        return stop | (lengths >= written.limit[rows])


@dataclass(slots=True)
class Written:
    """The result so far: tokens, versions int32, logprobs float32 [rows, room]; length int32, stop
    bool [rows]; mass float32 [rows, room] if the sampler truncates, else None. begin, limit int32
    [rows]: where the row's turn began, and the length at which it ends in any case.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    length: np.ndarray
    stop: np.ndarray
    begin: np.ndarray
    limit: np.ndarray
    mass: np.ndarray | None = None

    @staticmethod
    def empty(rows: int, *, limit: int, truncates: bool = False) -> Written:
        """Nothing written yet, for this many rows of at most `limit` tokens."""
        return Written(
            tokens=np.zeros((rows, 0), np.int32),
            logprobs=np.zeros((rows, 0), np.float32),
            versions=np.zeros((rows, 0), np.int32),
            length=np.zeros(rows, np.int32),
            stop=np.zeros(rows, bool),
            begin=np.zeros(rows, np.int32),
            limit=np.full(rows, limit, np.int32),
            mass=np.zeros((rows, 0), np.float32) if truncates else None,
        )

    def reserve_rows(self, rows: int) -> None:
        """Make room for so many rows."""
        more = rows - len(self.length)
        if more <= 0:
            return
        self.tokens = np.pad(self.tokens, ((0, more), (0, 0)))
        self.logprobs = np.pad(self.logprobs, ((0, more), (0, 0)))
        self.versions = np.pad(self.versions, ((0, more), (0, 0)))
        if self.mass is not None:
            self.mass = np.pad(self.mass, ((0, more), (0, 0)))
        self.length = np.pad(self.length, (0, more))
        self.stop = np.pad(self.stop, (0, more))
        self.begin = np.pad(self.begin, (0, more))
        self.limit = np.pad(self.limit, (0, more))

    def clear(self, rows: np.ndarray, limit: int) -> None:
        """Nothing is written of these rows, which have at most `limit` tokens."""
        self.length[rows] = self.begin[rows] = 0
        self.stop[rows] = False
        self.limit[rows] = limit

    def append(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        mass: np.ndarray | None,
        version: int | np.ndarray,
    ) -> None:
        """Add one token to each of these rows. All [rows]: tokens, log-probs float32, mass float32
        if the sampler truncates; version: one for all, or int32.
        """
        places = self.length[rows]
        self._reserve(int(places.max()) + 1)
        self.tokens[rows, places] = tokens
        self.logprobs[rows, places] = logprobs
        if self.mass is not None and mass is not None:
            self.mass[rows, places] = mass
        self.versions[rows, places] = version
        self.length[rows] = places + 1

    def give(self, row: int, tokens: np.ndarray, limit: int) -> None:
        """Append tokens, int32, that the row did not write: log-prob 0, and the version of the
        token before. Its next turn begins behind them; limit: the length at which that ends.
        """
        start = int(self.length[row])
        end = start + len(tokens)
        self._reserve(end)
        self.tokens[row, start:end] = tokens
        self.logprobs[row, start:end] = 0.0
        if self.mass is not None:
            self.mass[row, start:end] = 0.0
        self.versions[row, start:end] = self.versions[row, start - 1]
        self.length[row] = self.begin[row] = end
        self.limit[row] = limit

    def _reserve(self, length: int) -> None:
        """Make room for rows of so many tokens, at least doubling it, from 16 on: appending stays
        linear in the tokens.
        """
        room = self.tokens.shape[1]
        if length <= room:
            return
        more = ((0, 0), (0, max(16, room, length - room)))
        self.tokens = np.pad(self.tokens, more)
        self.logprobs = np.pad(self.logprobs, more)
        self.versions = np.pad(self.versions, more)
        if self.mass is not None:
            self.mass = np.pad(self.mass, more)


@dataclass(slots=True)
class Counts:
    """What a decode loop has counted. rows, slots: live rows and slots, summed over all decode
    forwards. padded: what these computed besides live rows, likewise. again: tokens whose keys and
    values were computed again because new weights had come.
    """

    rows: int = 0
    padded: int = 0
    slots: int = 0
    again: int = 0

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(
            rows=self.rows - before.rows,
            padded=self.padded - before.padded,
            slots=self.slots - before.slots,
            again=self.again - before.again,
        )
