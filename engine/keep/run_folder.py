"""The run folder: where a run keeps everything that outlives it.

Owns: the folder's layout, its lock, and the record of what was run (command, package versions, git
commit). Does not own: the content of any other file.

    runs/<name>/
        graph.json  plan.json  plan.txt     what was planned
        changes.json                        what a resume accepted as changed, from which Step on
        layouts.json                        its layouts, with --relayout (layouts_file.py)
        memory.json                         what memory that ran out has taught it (memory_file.py)
        command.txt  versions.json          what was run: command line; packages, Python, git commit
        metrics.jsonl                       one object a Step
        parts.jsonl                         how Steps were cut, with --stream arrival (part_record)
        ended.json                          how it ended; none while it runs, or if it was killed
        samples/  trace/  checkpoints/      step_000012.parquet, *.json, step_N/
        recorded/                           rows and assignments, with --record (engine/keep/record)
        events/                             what flowed through the graph (engine/keep/flow)
        logs/<worker>.log                   with several Workers also coordinator.log
        tensorboard/  wandb/                views, where asked for
        .lock                               held by the run that writes the folder
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import RunError
from dataflow.storage import replace_text, temporary_path, writing
from engine.keep.own_files import open_own_file, require_plain

FORMAT = 1
LOCK = ".lock"
ENDED = "ended.json"
PARTS = "parts.jsonl"
MEMORY = "memory.json"
FILES = (
    *("graph.json", "plan.json", "plan.txt", "options.json", "changes.json"),
    *("layouts.json", "profile.json", MEMORY),
    *("metrics.jsonl", PARTS, "command.txt", "versions.json", ENDED, LOCK),
)
FOLDERS = ("samples", "trace", "checkpoints", "logs", "events")
RECORDED = "recorded"
"""The folder of recorded rows, which only a run that records some has."""
VIEWS = ("tensorboard", "wandb", "wandb_id.txt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST = 200
"""Longest name of a run: file systems allow 255 characters, and other names are made of it."""

_BEGUN = frozenset(temporary_path(Path(name)).name for name in FILES)
"""What a run that was killed while it made its first records may leave, and nothing else."""

_PID_DIGITS = 10
"""The lock's text has a fixed length, so that it is never truncated."""

_held: set[int] = set()
"""Lock descriptors of this process, for `_forget_locks`."""


class RunFolder:
    """A run's folder, locked by this process (its threads share it) until `close` or its death."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.name = path, path.name
        self.metrics, self.samples = path / "metrics.jsonl", path / "samples"
        self.trace, self.checkpoints = path / "trace", path / "checkpoints"
        self.recorded = path / RECORDED
        self.events = path / "events"
        self.parts = path / PARTS
        self._lock: int | None = lock

    @staticmethod
    def create(name: str, root: Path | str = "runs", *, overwrite: bool = False) -> RunFolder:
        """A new folder `root/name`, with its record of command, versions and commit.

        Raises RunError for an impossible name, a folder that a run holds, is not empty without
        `overwrite`, or holds what no run makes (which is never deleted); StorageError.
        """
        path = Path(root) / _checked_name(name)
        with writing("the run folder", path):
            _refuse_contents(path, overwrite)  # before the lock: no lock file in a foreign folder
            path.mkdir(parents=True, exist_ok=True)
        with _lock_folder(path) as run, writing("the run folder", path):
            # versions.json marks the folder as a run's: it goes last, so that a kill in between can
            # be overwritten again.
            old_names = _refuse_contents(path, overwrite)
            for name in sorted(old_names, key=lambda n: n == "versions.json"):
                _delete(path / name)
            versions = msgspec.json.encode(installation(), order="sorted")
            run.write_text("versions.json", msgspec.json.format(versions).decode())
            run.write_text("command.txt", shlex.join([sys.executable, *sys.argv]) + "\n")
            for folder in FOLDERS:
                _make_folder(path / folder)
        return run

    @staticmethod
    def open_existing(path: Path | str) -> RunFolder:
        """An earlier run's folder. Raises RunError if it is none or held by a run, StorageError."""
        path = Path(path)
        if not is_run(path):
            if path.exists():
                what_is_there = "something else"
            else:
                what_is_there = "none"
            expected = "expected the folder of an earlier run (with versions.json in it)"
            raise RunError(
                f"run folder {path}: {expected}, found {what_is_there}. Fix: check the path."
            )
        with _lock_folder(path) as run:
            require_plain(path, but=VIEWS)
            with writing("the run folder", path):
                for folder in FOLDERS:
                    _make_folder(path / folder)
                for name in FILES:  # what a kill left
                    temporary_path(path / name).unlink(missing_ok=True)
        return run

    @staticmethod
    def open_remote(path: Path) -> RunFolder:
        """The folder of a run on another host, which has the lock: for logs and samples here."""
        return RunFolder(path, -1)

    def log(self, worker: str) -> Path:
        """The log file of a Worker."""
        return self.path / "logs" / f"{worker.replace('/', '_')}.log"

    def write_text(self, name: str, text: str) -> None:
        """Replace one of the folder's records in one step. Raises StorageError."""
        if name not in FILES or name == LOCK:
            files = ", ".join(FILES[:-1])
            raise ValueError(f"{name!r} is not a file of a run folder; those are: {files}")
        replace_text("a record of the run", self.path / name, text)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._lock in _held:  # not in a forked child, whose copy is closed already
            _held.discard(self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for a child that is being forked just now
            os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def _lock_folder(path: Path) -> Iterator[RunFolder]:
    """The folder with its lock, which is released again only where what follows fails."""
    with writing("the run folder", path):
        run = RunFolder(path, _acquire(path))
    try:
        yield run
    except RunError:
        run.close()
        raise


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise RunError(f"{path}: expected a folder, found a file. Fix: move it away.") from None


def _checked_name(name: str) -> str:
    if len(name) > _LONGEST:
        problem = f"expected at most {_LONGEST} characters, found {len(name)}"
        raise RunError(f"run name {name[:40]!r}...: {problem}. Fix: a shorter one.")
    if not _NAME.fullmatch(name):
        fix = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"
        expected = "letters, digits, '.', '_' and '-', the first a letter or digit"
        raise RunError(f"run name {name!r}: expected {expected}. Fix: {fix!r}.")
    return name


def _refuse_contents(path: Path, overwrite: bool) -> list[str]:
    """The names that a new run overwrites, all but the lock. Raises RunError if it may not."""
    if path.exists() and not path.is_dir():
        fix = "choose another name"
        raise RunError(f"run folder {path}: expected a folder, found a file. Fix: {fix}.")
    names = _names_in(path)
    if names and overwrite and path.is_symlink():
        problem = f"overwrite=True deletes only what is in it, found a link to {os.readlink(path)}"
        fix = "choose another name, or delete that folder yourself"
        raise RunError(f"run folder {path}: {problem}. Fix: {fix}.")
    if not names or _is_only_begun(path, names):
        return names
    if not overwrite:
        problem = f"expected no such folder or an empty one, found {_some(names)}"
        fix = "resume that run, choose another --name, or --overwrite it (overwrite=True)"
        raise RunError(f"run folder {path}: {problem}. Fix: {fix}.")
    _refuse_foreign(path, names)
    return names


def _refuse_foreign(path: Path, names: list[str]) -> None:
    foreign = [name for name in names if not _ours(name)]
    if foreign or not is_run(path):
        problem = f"overwrite=True deletes only what a run made, found {_some(foreign or names)}"
        fix = "choose another name, or move that away yourself"
        raise RunError(f"run folder {path}: {problem}. Fix: {fix}.")


def _names_in(path: Path) -> list[str]:
    if path.exists():
        return sorted(p.name for p in path.iterdir() if p.name != LOCK)
    return []


def _is_only_begun(path: Path, names: list[str]) -> bool:
    """Whether the folder, not a link, holds only records that were never complete."""
    if path.is_symlink():
        return False
    return all(name in _BEGUN and not (path / name).is_dir() for name in names)


def _acquire(path: Path) -> int:
    """The folder's lock, by flock: the kernel releases it when this process dies."""
    lock = open_own_file(path / LOCK, os.O_RDWR | os.O_CREAT)
    while not _try_lock(lock, fcntl.LOCK_EX):
        if _try_lock(lock, fcntl.LOCK_SH):  # nobody writes: someone asked (`is_held`) just now
            continue
        holder = os.pread(lock, 64, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        problem = f"another run (process {holder}) is writing it"
        fix = "wait for it, or take another name"
        raise RunError(f"run folder {path}: {problem}. Fix: {fix}.")
    os.pwrite(lock, f"{os.getpid():<{_PID_DIGITS}}\n".encode(), 0)
    _held.add(lock)
    return lock


def is_held(path: Path) -> bool:
    """Whether a run has a folder's lock now. Raises OSError if that cannot be found out.

    It asks by sharing the lock for a moment, after which a run tries again.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _try_lock(lock: int, kind: int) -> bool:
    """Whether the lock could be taken at once, for one (LOCK_EX) or shared (LOCK_SH)."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_locks() -> None:
    """A forked child closes its copy of the lock, which would outlive the parent."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    mark = path / "versions.json"
    return mark.is_file() and not mark.is_symlink()


def _ours(name: str) -> bool:
    temporary_file = name.startswith(".") and name.endswith(".tmp")
    return temporary_file or name in (*FILES, *FOLDERS, RECORDED, *VIEWS)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def installation() -> Mapping[str, Any]:
    """Python, platform, versions of installed packages, and the working directory's git commit."""
    changed = bool(_git("status", "--porcelain", "-uno"))
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _package_versions(),
        "git": {"commit": _git("rev-parse", "HEAD"), "changed": changed},
    }


def _package_versions() -> dict[str, str]:
    """Versions of installed packages by name, from the first lines of their METADATA: importlib
    would parse all of it, with the description, for each field.
    """
    from importlib import metadata  # here: no Worker needs it

    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields: dict[str, str] = {}
        for line in text.partition("\n\n")[0].splitlines():
            name, _, text = line.partition(": ")
            fields.setdefault(name, text)
        if "Name" in fields and "Version" in fields:
            versions[fields["Name"]] = fields["Version"]
    return versions


def _git(*command: str) -> str | None:
    """git's answer for the working directory; None outside a repository, and without a git that can
    be run.
    """
    try:
        # a repository's settings may name a program to run, which the user did not ask for
        git = ["git", "-c", "core.fsmonitor=", *command]
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.strip()
    return None
