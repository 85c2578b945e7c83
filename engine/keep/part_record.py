"""Into which parts the groups of streamed Steps were cut as they came: a line for each part.

    {"step": 3, "source": "prompts", "part": 0, "positions": [12, 14]}

Owns: parts.jsonl, which a Step that is repeated is cut by: after a rollback, and after a resume.
Does not own: the cut (engine/coordinator/part_cut.py).

A line takes the place of all earlier ones of its Step from its part on. Lines are on their way to
the disk before a train node is told of the part; a last one that a kill tore does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from dataflow.errors import DataError
from dataflow.storage import replacing, writing
from engine.keep.append_log import AppendLog
from engine.keep.metrics.metric_lines import whole_lines
from engine.keep.own_files import open_own_file
from engine.plan.plan import Plan
from engine.protocol.events import InstructionTold
from engine.protocol.messages import PartFormed

_decode = msgspec.json.Decoder(PartFormed).decode


class PartRecord:
    """Subscribes to an attempt's events, and writes its parts."""

    takes = (PartFormed,)

    def __init__(self, plan: Plan, path: Path, *, after: int) -> None:
        """Read what earlier attempts have recorded; Steps up to `after` are dropped, as they are
        not repeated. Raises StorageError, and DataError for a damaged file.
        """
        self._first = plan.first
        arriving_sources = [source for source in plan.sources if source.stream == "arrival"]
        self._sources = {source.name for source in arriving_sources}
        """Those whose cut does not follow from their rows."""
        self._parts: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self._log: AppendLog | None = None
        if not self._sources:
            return
        for formed in _read(path):
            if formed.step > after:
                self._add(formed)
        what = "the parts of Steps"
        with replacing(what, path) as file:
            lines = _lines(self._parts)
            file.writelines(lines)
        with writing(what, path):
            self._log = AppendLog(path)

    def parts(self) -> dict[str, dict[int, list[tuple[int, ...]]]]:
        """As in the coordinator's Settings."""
        by_source: dict[str, dict[int, list[tuple[int, ...]]]] = {}
        for (source, step), parts in self._parts.items():
            by_source.setdefault(source, {})[step - self._first] = list(parts)
        return by_source

    def take(self, event: InstructionTold) -> None:
        """See `engine.protocol.events`."""
        formed = event.instruction
        assert isinstance(formed, PartFormed)
        if self._log is None or formed.source not in self._sources:
            return
        formed = replace(formed, step=self._first + formed.step)
        # What is cut as it was before stands in the file.
        if self._add(formed):
            with writing(f"the parts of step {formed.step}", self._log.path):
                self._log.append(_line(formed))

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()

    def _add(self, formed: PartFormed) -> bool:
        """Add a part; returns whether it was not there."""
        of_step = formed.source, formed.step
        parts = self._parts.setdefault(of_step, [])
        number = formed.part
        if number < len(parts) and parts[number] == formed.positions:
            return False
        del parts[number:]
        parts.append(formed.positions)
        return True


def _read(path: Path) -> Iterable[PartFormed]:
    """The parts of a file, in order; none if there is none."""
    if not path.is_file():
        return
    with open(path, "rb", opener=open_own_file) as file:
        for start, line in whole_lines(file):
            try:
                yield _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"expected a part of a Step at byte {start}, found {error}"
                fix = "delete the file; the next Step is then cut anew"
                raise DataError(f"{path}: {problem}. Fix: {fix}.") from error


def _lines(parts: Mapping[tuple[str, int], Iterable[tuple[int, ...]]]) -> Iterable[bytes]:
    for (source, step), of_step in parts.items():
        for part, positions in enumerate(of_step):
            formed = PartFormed(step=step, source=source, part=part, positions=positions)
            yield _line(formed)


def _line(formed: PartFormed) -> bytes:
    line = msgspec.json.encode(formed)
    return line + b"\n"
