"""The chunks that one `run` of a kernel writes, and which of their rows have not come.

Owns: counting rows by their keys. Does not own: running kernels (chunk_runs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dataflow.batch import Keys
from dataflow.kernel import Chunk
from engine.protocol import messages as m
from engine.protocol.refs import Key


@dataclass(slots=True, eq=False)
class ChunkUnderWay:
    """A chunk in a run. version: of the trained weights that it began with. expand: rows for each
    of its keys; 0: nobody counts them, and it is over with its run.
    """

    message: m.RunChunk
    described: Chunk
    version: int | None
    expand: int = 0
    joined: bool = False
    """Whether rows of another chunk were written with its own."""
    seconds: float = 0.0
    """In which its kernel computed, while it was under way."""
    _left: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.expand:
            keys = self.message.keys.expand_spans(self.expand, self.message.spans)
            self._left.update(keys.rows())

    @property
    def is_over(self) -> bool:
        """Whether it is known that all of its rows have come, or were given up."""
        return bool(self.expand) and not self._left

    @property
    def seconds_alone(self) -> float:
        """The seconds, if all of them were for its rows; else 0."""
        return 0.0 if self.joined else self.seconds

    def awaits(self, key: Key) -> bool:
        """Whether this row is one of its, and has not come."""
        return key in self._left

    def note_rows(self, keys: Keys) -> None:
        """These rows have come."""
        self._left.difference_update(keys.rows())

    def list_rows_of(self, key: Key) -> list[Key]:
        """Its rows of a key of the chunk that have not come."""
        position, sample, attempt = key
        first = sample * self.expand
        rows = [(position, each, attempt) for each in range(first, first + self.expand)]
        return [row for row in rows if row in self._left]

    def give_up(self, key: Key, *, row_only: bool) -> None:
        """A row will not come; without row_only no row of this key of the chunk will."""
        if row_only:
            self._left.discard(key)
        else:
            self._left.difference_update(self.list_rows_of(key))


class ChunksUnderWay:
    """The chunks of one run, in the order in which they began."""

    def __init__(self, first: ChunkUnderWay) -> None:
        self._chunks = {first.message.id: first}
        self._last = first

    def __iter__(self) -> Iterator[ChunkUnderWay]:
        return iter(list(self._chunks.values()))

    def note_seconds(self, seconds: float) -> None:
        """The kernel has computed so long for those that are under way."""
        for chunk in self._chunks.values():
            chunk.seconds += seconds

    def describe(self) -> str:
        """What is under way, in words."""
        rows = sum(len(chunk.message.keys) for chunk in self)
        if len(self._chunks) == 1:
            return f"chunk {next(iter(self._chunks))}, {rows} rows"
        return f"{len(self._chunks)} chunks, {rows} rows"

    def add(self, chunk: ChunkUnderWay) -> None:
        """A chunk has joined."""
        others = self._chunks.values()
        chunk.joined = bool(others)
        for other in others:
            other.joined = True
        self._chunks[chunk.message.id] = self._last = chunk

    def remove(self, chunk: ChunkUnderWay) -> None:
        """A chunk is over."""
        del self._chunks[chunk.message.id]

    def oldest(self) -> ChunkUnderWay:
        """The one that began first; the last one where all are over."""
        return next(iter(self._chunks.values()), self._last)

    def find(self, keys: Keys) -> ChunkUnderWay:
        """The chunk that these rows, at least one, are of."""
        if len(self._chunks) > 1:
            first = keys.rows()[0]
            for chunk in self._chunks.values():
                if chunk.awaits(first):
                    return chunk
        return self.oldest()

    def find_given_up(self, key: Key, *, row_only: bool) -> ChunkUnderWay:
        """The chunk that a row was given up of."""
        for chunk in self._chunks.values():
            rows = [key] if row_only else chunk.list_rows_of(key)
            if any(chunk.awaits(row) for row in rows):
                return chunk
        return self.oldest()
