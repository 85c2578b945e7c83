"""The cut: the state of all rows in a checkpoint, exact at a Step boundary.

Owns: the state of every prompt at that boundary, its JSON form, the files of finished untrained
rows. Does not own: the directory (store.py), weights and optimizers (the kernels' save), gathering
the states (coordinator).

Every position of a source is retired (trained or given up for good), finished (its rows wait to be
trained), running (admitted, not finished) or not yet made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as pa

from dataflow.batch import KEYS, Batch
from dataflow.errors import CheckpointError
from dataflow.storage import writing
from engine.checkpoint.provenance import ProvenanceRecord
from engine.coordinator.refs import Key, SourceCut

FORMAT = 1
CUT = "cut.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A run after Step `step`. graph: a digest of the graph with its paths. evaluated: the version
    at which each evaluate node last ran. Older cuts have neither evaluated nor record.
    """

    step: int
    seed: int
    graph: str
    sources: Mapping[str, SourceCut] = field(default_factory=dict)
    evaluated: Mapping[str, int] | None = None
    record: ProvenanceRecord | None = None
    format: int = FORMAT

    def to_json(self) -> bytes:
        """The same bytes for equal cuts. Raises CheckpointError for a contradictory cut."""
        _refuse("cut", self)
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> Cut:
        """The inverse. Raises CheckpointError for other bytes, or a contradictory cut."""
        try:
            cut = msgspec.json.decode(data, type=Cut)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"cut: expected format {FORMAT}: {error}. Fix: an earlier checkpoint."
            ) from error
        _refuse("cut", cut)
        return cut

    def must_continue(self, *, seed: int) -> None:
        """Raises CheckpointError for another seed."""
        if self.seed != seed:
            raise CheckpointError(
                f"cut of Step {self.step}: expected seed {seed}, found {self.seed}. Fix:"
                f" seed={self.seed}."
            )


def read_cut(folder: Path, step: int) -> Cut:
    """The cut in the folder of this Step's checkpoint. Raises CheckpointError."""
    try:
        cut = Cut.from_json((folder / CUT).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: its cut cannot be read: {error}. Fix: an earlier checkpoint."
        ) from error
    if cut.step != step:
        raise CheckpointError(
            f"{folder}: expected the cut of Step {step}, found that of Step {cut.step!s:.20}. "
            "Fix: an earlier checkpoint."
        )
    return cut


def faults(cut: SourceCut) -> list[str]:
    """Contradictions: a prompt that is lost, or that would be trained twice."""
    rows = (*cut.running, *cut.finished)
    live, retired = {key[0] for key in rows}, set(cut.retired)
    known = live | retired
    low, high = min(known, default=cut.watermark), max(known, default=cut.next - 1)
    checks = (
        (
            not 0 <= cut.watermark <= cut.next,
            f"watermark {cut.watermark} is not within 0..{cut.next}",
        ),
        (not all(a < b for a, b in pairwise(cut.retired)), "retired positions do not ascend"),
        (low < cut.watermark, "a position below the watermark is listed again"),
        (high >= cut.next, f"a position at or above next={cut.next} is listed"),
        (bool(live & retired), "a retired position has running or finished rows"),
        (_repeats(cut.running) or _repeats(cut.finished), "a row is listed twice"),
        (any(min(key) < 0 for key in rows), "a key has a negative part"),
    )
    lost = cut.next - cut.watermark - len(known)
    found = [problem for wrong, problem in checks if wrong]
    return found or (
        [f"{lost} made positions are neither retired, running nor finished"] if lost else []
    )


def _refuse(what: str, cut: Cut) -> None:
    if cut.format != FORMAT:
        raise CheckpointError(
            f"{what}: expected format {FORMAT}, found {cut.format}. Fix: resume with its release."
        )
    if cut.step < 0:
        raise CheckpointError(
            f"{what}: expected step >= 0, found {cut.step}. Fix: an earlier checkpoint."
        )
    for name, source in cut.sources.items():
        for fault in faults(source):
            raise CheckpointError(
                f"{what} of Step {cut.step}, source {name!r}: {fault}. Fix: an earlier checkpoint."
            )


def _repeats(keys: Iterable[Key]) -> bool:
    rows = [key[:2] for key in keys]
    return len(set(rows)) != len(rows)


def write_rows(path: Path, rows: Batch) -> None:
    """Write rows with their keys as one Arrow IPC file, without fsync. Raises StorageError."""
    keyed = rows.with_keys()
    with (
        writing("finished rows that are not trained yet", path, keyed.nbytes),
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, keyed.schema) as writer,
    ):
        writer.write_batch(keyed)


def positions_of(path: Path) -> frozenset[int]:
    """The positions of the rows in a file; reads nothing else."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return frozenset(
            position for batch in batches for position in batch.column(KEYS[0]).to_pylist()
        )


def read_rows(path: Path) -> Batch:
    """The rows that `write_rows` wrote, fully validated. Raises CheckpointError."""
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            keyed = pa.concat_batches(
                [reader.get_batch(i) for i in range(reader.num_record_batches)]
            )
        keyed.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(
            f"{path}: expected rows as an Arrow file: {error}. Fix: an earlier checkpoint."
        ) from error
    wanted = (
        Batch.from_keyed(keyed).with_keys().schema if set(KEYS) <= set(keyed.schema.names) else None
    )
    if (
        wanted is None
        or wanted.types != keyed.schema.types
        or any(keyed.column(name).null_count for name in KEYS)
    ):
        raise CheckpointError(
            f"{path}: expected rows with keys {', '.join(KEYS)}, found columns"
            f" {', '.join(keyed.schema.names)}. Fix: an earlier checkpoint."
        )
    return Batch.from_keyed(keyed)
