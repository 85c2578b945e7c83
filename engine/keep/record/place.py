"""Where a run records its rows and assignments, and which nodes it records.

Owns: the layout of the folder `recorded/`, the names of its files, the choice of nodes. Does not
own: the files' content (recorder.py, assignments.py), nor reading them (stored_rows.py,
stored_assignments.py).

    recorded/
        rollout/1-12-14-gen.parquet              rows: life, first and last chunk, Worker
        _assignments/step_000012.parquet         what was told and made up to the end of a Step
        _life                                    how often the run has begun or gone on

A life is one attempt at the run: ids of chunks are unique within one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from dataflow.errors import PlanError, RunError, nearest_or_all
from dataflow.storage import replace_text, writing
from engine.keep.run_folder import RECORDED
from engine.plan.options import RunOptions
from engine.plan.plan import Decisions, Plan

ASSIGNMENTS = "_assignments"
ALL = "all"
_LIFE = "_life"
_LAST_LIFE = 2**31 - 2
"""Files of assignments and rows have it as an int32."""
_ROWS = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)-(.+)\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlace:
    """The folder `recorded` of a run, the nodes that are recorded, and the life that records."""

    folder: Path
    nodes: tuple[str, ...]
    life: int

    @staticmethod
    def of(plan: Plan, run: Path, options: RunOptions) -> RecordPlace | None:
        """Say where a run, or a Worker of it, is to record; None if it records nothing."""
        if not options.record:
            return None
        folder = run / RECORDED
        nodes = nodes_to_record(plan, asked_for(options.record))
        return RecordPlace(folder=folder, nodes=nodes, life=life_of(folder))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RowFile:
    """A file of rows of one node, by its name. first, last: ids of the chunks that it may have."""

    life: int
    first: int
    last: int
    worker: str
    path: Path

    def has(self, life: int, chunk: int, worker: str) -> bool:
        """Whether rows of this chunk may be in it."""
        return (self.life, self.worker) == (life, _quote(worker)) and (
            self.first <= chunk <= self.last
        )


def asked_for(text: str) -> tuple[str, ...]:
    """The names of `--record rollout,score`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def recordable(plan: Decisions) -> list[str]:
    """The nodes that make rows."""
    return [n.name for n in plan.nodes if n.work not in ("train", "evaluate")]


def nodes_to_record(plan: Decisions, names: Iterable[str]) -> tuple[str, ...]:
    """The nodes of this plan which make rows and are among the names, in running order."""
    asked = set(names)
    return tuple(name for name in recordable(plan) if ALL in asked or name in asked)


def require_recordable(plans: Iterable[Plan], text: str) -> None:
    """Raises PlanError for a name in `--record` that is no node of a plan, or makes no rows."""
    known: set[str] = set()
    every: set[str] = set()
    for plan in plans:
        known.update(recordable(plan))
        every.update(node.name for node in plan.nodes)
    for name in asked_for(text):
        if name in known or name == ALL:
            continue
        if name in every:
            problem = f"{name!r} makes no rows; how it was told to run is recorded in any case"
            fix = "leave it out"
        else:
            problem, fix = f"no node {name!r}", nearest_or_all(name, sorted(known))
        raise PlanError(f"options: --record: {problem}. Fix: {fix}.")


def node_folder(recorded: Path, node: str) -> Path:
    """Where the rows of a node are."""
    return recorded / _quote(node)


def nodes_in(recorded: Path) -> list[str]:
    """The nodes of which there are rows, by name."""
    if not recorded.is_dir():
        return []
    folders = [p.name for p in recorded.iterdir() if p.is_dir() and p.name != ASSIGNMENTS]
    return sorted(unquote(name) for name in folders)


def row_file(recorded: Path, node: str, *, life: int, first: int, last: int, worker: str) -> Path:
    """The path of a file of rows."""
    return node_folder(recorded, node) / f"{life}-{first}-{last}-{_quote(worker)}.parquet"


def row_files(recorded: Path, node: str) -> list[RowFile]:
    """The complete files of a node's rows, in the order in which they were made."""
    folder = node_folder(recorded, node)
    if folder.is_dir():
        paths = folder.iterdir()
    else:
        paths = ()
    row_files: list[RowFile] = []
    for path in paths:
        match = _ROWS.fullmatch(path.name)
        if match:
            life, first, last = (int(number) for number in match.group(1, 2, 3))
            row_file = RowFile(life=life, first=first, last=last, worker=match[4], path=path)
            row_files.append(row_file)
    return sorted(row_files)


def life_of(recorded: Path) -> int:
    """The life that records now. Raises RunError if none has begun."""
    fix = f'--record "" goes on without recording; or {recorded} moved away'
    expected = f"{recorded / _LIFE}: expected the number of the run's life, found"
    try:
        life = int((recorded / _LIFE).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise RunError(f"{expected} {type(error).__name__}: {error!s:.80}. Fix: {fix}.") from error
    if not 1 <= life <= _LAST_LIFE:
        raise RunError(f"{expected} {life}. Fix: {fix}.")
    return life


def begin_life(recorded: Path) -> int:
    """Begin the next one, and return it. Raises StorageError."""
    with writing("the folder of recorded rows", recorded):
        (recorded / ASSIGNMENTS).mkdir(parents=True, exist_ok=True)
    if (recorded / _LIFE).is_file():
        life = life_of(recorded) + 1
    else:
        life = 1
    replace_text("the number of the run's life", recorded / _LIFE, f"{life}\n")
    return life


def _quote(name: str) -> str:
    """A name as a part of a path. No two names have the same; none begins with `_` or `.`."""
    quoted = quote(name, safe="")
    if quoted[:1] in ("_", "."):
        return f"%{ord(quoted[0]):02X}{quoted[1:]}"
    return quoted
