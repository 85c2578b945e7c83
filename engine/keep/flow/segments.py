"""The files of a run's `events/` folder: frames with checksums, in segments.

    steps-000001.seg, steps-000002.seg, ...   records of Steps, in order; none is changed once the
                                              next one is there, except by a resume
    live-0.seg, live-1.seg                    records of seconds: the last minute is in the two

A segment begins with MAGIC. A frame is the length of its body (4 bytes, little-endian), the CRC-32
of the body (4 bytes), and the body: one record as msgpack. A frame whose body is short or has
another checksum ends a segment: a kill tore it, and it is dropped.

Owns: these files, written and read. Does not own: what is in the records (records.py).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dataflow.storage import writing
from engine.keep.append_log import AppendLog, whole_until
from engine.keep.flow.records import Flow, Record
from engine.keep.own_files import open_own_file

MAGIC = b"dataflow events 1\n"
_HEAD = struct.Struct("<II")
_LARGEST = 4 << 20
"""Bytes of a segment, after which the next one begins."""
_LONGEST = 64 << 20
"""Bytes of a body; a length beyond it is a torn or foreign file's."""
LIVE_SECONDS = 60.0
"""The stretch of time that each of the two live files has."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def frame_record(record: Record) -> bytes:
    """A record as a frame."""
    body = _encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedRecord:
    """A record, and where its frame ends in its segment."""

    record: Record
    end: int


def read_frames(path: Path, offset: int = 0) -> Iterator[FramedRecord]:
    """The whole records of a segment from a frame's beginning on (0: all of them). Raises RunError
    for all but a plain file.
    """
    try:
        file = open(path, "rb", opener=open_own_file)  # noqa: SIM115 - closed by the with below
    except FileNotFoundError:
        return
    with file:
        if offset == 0:
            if file.read(len(MAGIC)) != MAGIC:
                return
            offset = len(MAGIC)
        file.seek(offset)
        while (head := file.read(_HEAD.size)) and len(head) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if length <= _LONGEST:
                body = file.read(length)
            else:
                body = b""
            if len(body) < length or zlib.crc32(body) != checksum or not body:
                return
            try:
                record = _decode(body)
            except msgspec.DecodeError:  # of another format: nothing after it is readable either
                return
            offset += _HEAD.size + length
            yield FramedRecord(record=record, end=offset)


def step_segments(folder: Path) -> list[Path]:
    """The segments of Steps in an `events/` folder, in order."""
    return sorted(folder.glob("steps-*.seg"))


def read_steps(folder: Path) -> Iterator[Record]:
    """Read all records of Steps of an `events/` folder; none where there is no such folder."""
    for path in step_segments(folder):
        for each in read_frames(path):
            yield each.record


def read_live(folder: Path) -> list[Flow]:
    """The records of the last seconds, in order; up to two minutes of them."""
    flows: list[Flow] = []
    for path in sorted(folder.glob("live-*.seg")):
        records = (frame.record for frame in read_frames(path))
        flows += [record for record in records if isinstance(record, Flow)]
    return sorted(flows, key=lambda flow: flow.wall)


def _ends(path: Path) -> Iterator[tuple[int, int]]:
    """(end, Step) of each whole frame of a segment."""
    return ((frame.end, frame.record.step) for frame in read_frames(path))


class StepSegments:
    """Appends records of Steps. A torn tail is cut off as it opens. Raises StorageError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendLog | None = None
        self._path = folder / "steps-000001.seg"
        self._size = 0
        with writing("the events", folder):
            folder.mkdir(exist_ok=True)
        if segments := step_segments(folder):
            self._path = segments[-1]
            size, _ = whole_until(_ends(self._path))
            self._cut(size)

    def write(self, record: Record) -> None:
        """Append, for the operating system to write: what a kill tears off is dropped."""
        if self._file is None or self._size > _LARGEST:
            self._next()
        assert self._file is not None
        framed = frame_record(record)
        with writing("the events", self._path, len(framed)):
            self._file.append(framed)
        self._size += len(framed)

    def truncate_after(self, step: int) -> None:
        """Drop the records behind this Step, which a resume makes again."""
        self.close()
        for path in reversed(step_segments(self._folder)):
            self._path = path
            size, _ = whole_until(_ends(path), step)
            self._cut(size)
            if size:
                return
        self._path = self._folder / "steps-000001.seg"
        self._size = 0

    def close(self) -> None:
        """Close the file. A second call does nothing; a further write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, size: int) -> None:
        """Keep so many bytes of the last segment; without any, delete it."""
        with writing("the events", self._path):
            if size == 0:
                self._path.unlink()
            else:
                with AppendLog(self._path) as file:
                    file.cut(size)
        self._size = size

    def _next(self) -> None:
        """Open the segment to append to, or begin the one after it."""
        if self._size > _LARGEST:
            self.close()
            number = int(self._path.stem.removeprefix("steps-")) + 1
            self._path = self._folder / f"steps-{number:06d}.seg"
            self._size = 0
        with writing("the events", self._path):
            self._file = AppendLog(self._path, empty=self._size == 0)
            if self._size == 0:
                self._file.append(MAGIC)
                self._size = len(MAGIC)


class LiveSegments:
    """Appends records of seconds to two files in turn, each of at most a minute."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendLog | None = None
        self._turn = 0
        self._begun = 0.0

    def write(self, record: Flow) -> None:
        """Append; the older file is emptied once the newer one has a minute. StorageError."""
        path = self._folder / f"live-{self._turn}.seg"
        if self._file is None or record.wall - self._begun >= LIVE_SECONDS:
            self.close()
            self._turn = 1 - self._turn
            self._begun = record.wall
            path = self._folder / f"live-{self._turn}.seg"
            with writing("the events", path):
                self._file = AppendLog(path, empty=True)
                self._file.append(MAGIC)
        with writing("the events", path):
            self._file.append(frame_record(record))

    def close(self) -> None:
        """Close the file under way."""
        if self._file is not None:
            self._file.close()
            self._file = None
