"""The cut: the state of all rows in a checkpoint, exact at a Step boundary.

Owns: every prompt's state at that boundary, its JSON form, the files of finished untrained rows.
Does not own: the directory (store.py), weights and optimizers (the kernels' save), gathering the
states (coordinator).

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
from engine.keep.checkpoint.provenance import ProvenanceRecord
from engine.protocol.refs import Key, SourceCut

FORMAT = 1
CUT = "cut.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A run after Step `step`. graph: a digest of the graph with its paths. evaluated: the version
    at which each evaluate node last ran; in a Program, by the Steps of the phase. Older cuts have
    neither evaluated nor record.
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
        _require_consistent(self)
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(content: bytes) -> Cut:
        """The inverse. Raises CheckpointError for other bytes, or a contradictory cut."""
        try:
            cut = msgspec.json.decode(content, type=Cut)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _unusable(f"cut: expected format {FORMAT}: {error}") from error
        _require_consistent(cut)
        return cut

    def must_continue(self, *, seed: int) -> None:
        """Raises CheckpointError for another seed."""
        if self.seed != seed:
            problem = f"cut of Step {self.step}: expected seed {seed}, found {self.seed}"
            raise CheckpointError(f"{problem}. Fix: seed={self.seed}.")


def read_cut(folder: Path, step: int) -> Cut:
    """The cut in the folder of this Step's checkpoint. Raises CheckpointError."""
    try:
        cut = Cut.from_json((folder / CUT).read_bytes())
    except OSError as error:
        raise _unusable(f"{folder}: its cut cannot be read: {error}") from error
    if cut.step != step:
        other_step = f"that of Step {cut.step!s:.20}"
        raise _unusable(f"{folder}: expected the cut of Step {step}, found {other_step}")
    return cut


def faults(cut: SourceCut) -> list[str]:
    """Contradictions: a prompt that is lost, or that would be trained twice."""
    rows = (*cut.running, *cut.finished)
    live, retired = {key[0] for key in rows}, set(cut.retired)
    known = live | retired
    low, high = min(known, default=cut.watermark), max(known, default=cut.next - 1)
    outside = f"watermark {cut.watermark} is not within 0..{cut.next}"
    checks = (
        (not 0 <= cut.watermark <= cut.next, outside),
        (not all(a < b for a, b in pairwise(cut.retired)), "retired positions do not ascend"),
        (low < cut.watermark, "a position below the watermark is listed again"),
        (high >= cut.next, f"a position at or above next={cut.next} is listed"),
        (bool(live & retired), "a retired position has running or finished rows"),
        (_repeats(cut.running) or _repeats(cut.finished), "a row is listed twice"),
        (any(min(key) < 0 for key in rows), "a key has a negative part"),
    )
    lost = cut.next - cut.watermark - len(known)
    problems = [problem for wrong, problem in checks if wrong]
    if lost and not problems:
        problems.append(f"{lost} made positions are neither retired, running nor finished")
    return problems


def _require_consistent(cut: Cut) -> None:
    """Raises CheckpointError for another format, a negative Step, or a contradictory source."""
    if cut.format != FORMAT:
        problem = f"cut: expected format {FORMAT}, found {cut.format}"
        raise CheckpointError(f"{problem}. Fix: resume with its release.")
    if cut.step < 0:
        raise _unusable(f"cut: expected step >= 0, found {cut.step}")
    for name, source in cut.sources.items():
        for fault in faults(source):
            raise _unusable(f"cut of Step {cut.step}, source {name!r}: {fault}")


def _unusable(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}. Fix: an earlier checkpoint.")


def _repeats(keys: Iterable[Key]) -> bool:
    rows = [key[:2] for key in keys]
    return len(set(rows)) != len(rows)


def write_waiting_rows(path: Path, rows: Batch) -> None:
    """Write rows with their keys as one Arrow IPC file, without fsync. Raises StorageError."""
    keyed = rows.with_keys()
    with (
        writing("finished rows that are not trained yet", path, keyed.nbytes),
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, keyed.schema) as writer,
    ):
        writer.write_batch(keyed)


def read_positions(path: Path) -> frozenset[int]:
    """The positions of the rows in a file; reads nothing else."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        positions: set[int] = set()
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(KEYS[0])
            positions.update(column.to_pylist())
        return frozenset(positions)


def read_waiting_rows(path: Path) -> Batch:
    """The rows that `write_waiting_rows` wrote, fully validated. Raises CheckpointError."""
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            keyed = pa.concat_batches(batches)
        keyed.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _unusable(f"{path}: expected rows as an Arrow file: {error}") from error
    names = keyed.schema.names
    if set(KEYS) <= set(names):
        rows, nulls = Batch.from_keyed(keyed), any(keyed.column(key).null_count for key in KEYS)
        if rows.with_keys().schema.types == keyed.schema.types and not nulls:
            return rows
    expected, column_names = ", ".join(KEYS), ", ".join(names)
    raise _unusable(f"{path}: expected rows with keys {expected}, found columns {column_names}")
