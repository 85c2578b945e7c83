"""Which rows of which chunk leave a decode loop, and when.

Owns: the rows of each chunk that is in the loop, and the rule by which they leave. Does not own:
their columns (generating.py), the loop (torch/, vllm/).

All rows of a prompt that a chunk has leave together. A chunk that fits the slots leaves in one
batch at its end, a larger one in batches of at least a quarter of the slots. Where rows flow, which
is where a reader need not wait for a chunk, each leaves by itself, as others wait for its slot: all
that have ended, once they are an eighth of the slots. Where a Step is worked on in parts, all that
is ready leaves once it has a share of a part's tokens. A chunk's last rows leave at once, and an
interruption sends out all that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys, Ragged


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkRows:
    """The rows of one chunk in a loop. prompts: [prompts]; counts int64 [prompts]: rows of each;
    keys: [rows], those of a prompt side by side; numbers int64 [rows]: of the rows in the loop.
    tokens: that those have which have left.
    """

    prompts: Ragged
    counts: np.ndarray
    keys: Keys
    numbers: np.ndarray
    tokens: int = 0
    singly: bool = False
    """Whether a row may leave before the others of its prompt."""
    ready: int = 0
    """Rows that may leave."""
    ended_tokens: int = 0
    """Tokens of rows that have ended since rows left last."""
    rows_left: int = field(init=False)
    """Rows that have not left."""
    prompt_of_row: np.ndarray = field(init=False)
    has_ended: np.ndarray = field(init=False)
    """bool [rows]."""
    _unended: np.ndarray = field(init=False)
    _is_ready: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.rows_left = len(self.keys)
        self.prompt_of_row = np.repeat(np.arange(len(self.counts)), self.counts)
        self._unended = self.counts.copy()
        self.has_ended = np.zeros(len(self.keys), bool)
        self._is_ready = np.zeros(len(self.keys), bool)

    def end(self, rows: np.ndarray) -> None:
        """These rows have ended."""
        self.has_ended[rows] = True
        if self.singly:
            self._is_ready[rows] = True
            self.ready += len(rows)
            return
        prompts = self.prompt_of_row[rows]
        np.subtract.at(self._unended, prompts, 1)
        whole = np.unique(prompts[self._unended[prompts] == 0])
        if len(whole):
            self._is_ready |= np.isin(self.prompt_of_row, whole)
            self.ready += int(self.counts[whole].sum())

    def take_ready(self) -> np.ndarray:
        """Let all rows leave that may: their indices, int64 ascending."""
        rows = np.flatnonzero(self._is_ready)
        self._is_ready[rows] = False
        self.rows_left -= len(rows)
        self.ready, self.ended_tokens = 0, 0
        return rows


class LeavingRows:
    """All chunks of a loop. flows: whether rows leave without waiting for their chunk's. tokens: of
    ended rows, with which all that is ready leaves; 0: their number counts alone. lengths: tokens
    of rows by their numbers, int [numbers], as they are when it is called.
    """

    def __init__(
        self,
        slots: int,
        *,
        flows: bool,
        tokens: int = 0,
        lengths: Callable[[], np.ndarray] = lambda: np.zeros(0, np.int32),
    ) -> None:
        self._slots, self._flows = slots, flows
        self._tokens, self._lengths = tokens, lengths
        self._chunks: dict[int, ChunkRows] = {}
        self._chunk_count = 0
        # [numbers]: which chunk a row is of, and where it is among its rows.
        self._chunk_of = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)

    @property
    def chunks(self) -> int:
        """How many chunks have rows that have not left."""
        return len(self._chunks)

    def add(self, chunk: ChunkRows) -> None:
        """Rows of a chunk are in the loop now; there is at least one."""
        chunk.singly = self._flows
        more = int(chunk.numbers.max()) + 1 - len(self._place)
        if more > 0:
            self._chunk_of = np.pad(self._chunk_of, (0, more))
            self._place = np.pad(self._place, (0, more))
        self._chunk_of[chunk.numbers] = self._chunk_count
        self._place[chunk.numbers] = np.arange(len(chunk.numbers))
        self._chunks[self._chunk_count] = chunk
        self._chunk_count += 1

    def gather(self, ended: Iterator[np.ndarray]) -> Iterator[tuple[ChunkRows, np.ndarray]]:
        """Gather the numbers of rows as they end, int64, to rows of one chunk that leave together,
        as their indices there. Where numbers are none, which is an interruption, so may be these.
        """
        for numbers in ended:
            self._end(numbers)
            is_interrupted = not len(numbers)
            leaving = self._find_leaving(is_interrupted)
            if is_interrupted and not leaving:
                yield next(iter(self._chunks.values())), numbers
            for serial in leaving:
                chunk = self._chunks[serial]
                rows = chunk.take_ready()
                if not chunk.rows_left:
                    del self._chunks[serial]
                yield chunk, rows

    def _end(self, numbers: np.ndarray) -> None:
        if len(self._chunks) == 1:
            (chunk,) = self._chunks.values()
            self._end_rows(chunk, numbers)
            return
        chunk_of = self._chunk_of[numbers]
        for serial in np.unique(chunk_of).tolist():
            self._end_rows(self._chunks[serial], numbers[chunk_of == serial])

    def _end_rows(self, chunk: ChunkRows, numbers: np.ndarray) -> None:
        """These rows of a chunk have ended."""
        chunk.end(self._place[numbers])
        if self._tokens:
            chunk.ended_tokens += int(self._lengths()[numbers].sum())

    def find_least_tokens(self, chunk: ChunkRows) -> int:
        """The tokens that each row of a chunk has at least that has not ended."""
        live = self._lengths()[chunk.numbers[~chunk.has_ended]]
        return int(live.min(initial=np.iinfo(np.int32).max)) if len(live) else 0

    def _find_leaving(self, is_interrupted: bool) -> list[int]:
        """The chunks whose ready rows leave now, in the order in which they came."""
        ready = [serial for serial, chunk in self._chunks.items() if chunk.ready]
        if is_interrupted:
            return ready
        if self._flows:
            total = sum(self._chunks[serial].ready for serial in ready)
            if total >= max(1, self._slots // 8):
                return ready
        return [serial for serial in ready if self._is_enough(self._chunks[serial])]

    def _is_enough(self, chunk: ChunkRows) -> bool:
        if chunk.ready == chunk.rows_left:
            return True
        if self._tokens and chunk.ended_tokens >= self._tokens:
            return True
        is_large = len(chunk.keys) > self._slots and not self._flows
        return is_large and chunk.ready >= max(1, self._slots // 4)
