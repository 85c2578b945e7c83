"""Checkpoints on disk, whole or absent even after a kill or a power cut.

Owns: the commit protocol of a checkpoint directory, its manifest, which checkpoint is trusted. Does
not own: its contents (cut.py, the kernels' save), when one is made (the loop).

Commit: everything is written into `.tmp-step_N` and fsynced, the manifest last, and one rename
makes it `step_N`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import CheckpointError, StorageError
from dataflow.storage import sync_folder, writing
from engine.keep.checkpoint.step_folders import TEMP, delete_folder, steps_of_names, temp_of

_log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_REPLACED = ".replaced-"
_TIMED = "timed"
"""Meta key of a checkpoint that only the clock made due."""
_KEPT = "kept"
"""Meta key of a checkpoint that stays as long as the run does (`--keep-every`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint whose every byte is as it was written."""

    step: int
    path: Path
    meta: Mapping[str, Any]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    step: int
    meta: dict[str, Any]
    files: dict[str, _File]
    sha256: str = ""
    """Of this manifest with an empty sha256."""

    def digest(self) -> str:
        return hashlib.sha256(_encode(msgspec.structs.replace(self, sha256=""))).hexdigest()


class CheckpointStore:
    """A run's newest `keep` checkpoints, as many timed ones, and all that were written to be kept,
    for the holder of its lock.

    pinned: Steps whose checkpoints stay beside them, since they have weights that no other has.
    """

    def __init__(self, directory: Path, keep: int = 2, pinned: Collection[int] = ()) -> None:
        """Open or create the directory, and clean up after a killed writer."""
        if keep < 1:
            raise ValueError(f"expected keep >= 1, found {keep}")
        self._directory = directory
        self._keep = keep
        self._pinned = frozenset(pinned)
        with writing("the folder of the checkpoints", directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._recover()
            sync_folder(directory.parent)

    def steps(self) -> list[int]:
        """The Steps that have a checkpoint, ascending; reads no checkpoint."""
        return steps_of_names(path.name for path in self._directory.iterdir())

    def write(
        self,
        step: int,
        fill: Callable[[Path], None],
        meta: Mapping[str, Any],
        *,
        timed: bool = False,
        for_good: bool = False,
    ) -> StoredCheckpoint:
        """Make the checkpoint of a Step: `fill` writes its files into a directory. meta: small JSON
        values, returned by `latest`. timed: it displaces only other timed ones. for_good: none
        later displaces it, nor does it displace any.

        Replaces one of the same Step, then deletes those of later Steps (the run was rolled back)
        and those that are no longer kept. Raises StorageError if the disk is full or fails; on any
        error the earlier checkpoints stay as they were.
        """
        final, what = self._path(step), f"the checkpoint of step {step}"
        marked_meta = dict(meta)
        if timed:
            marked_meta[_TIMED] = True
        if for_good:
            marked_meta[_KEPT] = True
        temp = temp_of(final)
        needed = self._nbytes()
        try:
            with writing(what, final, needed):
                shutil.rmtree(temp, ignore_errors=True)
                temp.mkdir()
                fill(temp)
                _seal(temp, step, marked_meta)
                self._commit(temp, final)
        except BaseException as error:
            shutil.rmtree(temp, ignore_errors=True)
            if isinstance(error, StorageError) and str(final) not in str(error):
                raise StorageError(f"{what} was not made: {error}") from error
            raise
        self._prune(step)
        return StoredCheckpoint(step=step, path=final, meta=marked_meta)

    def _nbytes(self) -> int:
        """Bytes of the newest checkpoint, an estimate of the next one's; 0 if there is none."""
        with contextlib.suppress(OSError):
            steps = self.steps()
            if steps:
                paths = self._path(steps[-1]).rglob("*")
                return sum(path.stat().st_size for path in paths if path.is_file())
        return 0

    def latest(self) -> StoredCheckpoint | None:
        """The newest intact checkpoint; None if there are no checkpoints. Reads every file.

        Skips a damaged checkpoint with a warning. Raises CheckpointError if all are damaged
        (starting over would hide the loss), or if one is of a newer format.
        """
        steps = self.steps()
        reasons: list[str] = []
        for step in reversed(steps):
            examined = _examine(self._path(step), step)
            if isinstance(examined, StoredCheckpoint):
                return examined
            reasons.append(f"step_{step}: {examined}")
            _log.warning("checkpoint %s is damaged and not used: %s", self._path(step), examined)
        if reasons:
            examined = f"found only damaged ones ({'; '.join(reasons)})"
            problem = f"{self._directory}: expected an intact checkpoint, {examined}"
            raise CheckpointError(f"{problem}. Fix: restore one from a copy, or start a new run.")
        return None

    def read(self, step: int) -> StoredCheckpoint:
        """The checkpoint of this Step. Raises CheckpointError if it is absent or damaged."""
        return read_checkpoint(self._directory, step)

    def truncate_after(self, step: int) -> None:
        """Delete the checkpoints of later Steps: the run resumes from this one."""
        for later in self.steps():
            if later > step:
                delete_folder(self._path(later))

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}"

    def _commit(self, temp: Path, final: Path) -> None:
        """Give the directory its final name; one that it replaces stays whole until then."""
        replaced = self._directory / f"{_REPLACED}{final.name}"
        if final.exists():
            os.rename(final, replaced)
        try:
            os.rename(temp, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        sync_folder(self._directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Delete checkpoints that are no longer kept. A failure costs space, not safety."""
        try:
            self.truncate_after(step)
            steps_by_marks: dict[tuple[str, ...], list[int]] = {(): [], (_TIMED,): []}
            for loose in self.steps():
                if loose not in self._pinned:
                    steps_by_marks.setdefault(_marks(self._path(loose)), []).append(loose)
            # Those that were made to be kept have their mark, and stay.
            for kind in ((), (_TIMED,)):
                for old in steps_by_marks[kind][: -self._keep]:
                    delete_folder(self._path(old))
        except OSError as error:
            _log.warning("an old checkpoint in %s was not deleted: %s", self._directory, error)

    def _recover(self) -> None:
        """Finish or undo what a killed writer was doing."""
        for path in sorted(self._directory.iterdir()):
            if path.name.startswith(_REPLACED):
                final = self._directory / path.name.removeprefix(_REPLACED)
                if not final.exists():  # killed between the two renames of a replacement
                    os.rename(path, final)
                    continue
                _remove(path)
            elif path.name.startswith(TEMP):
                _remove(path)


def read_checkpoint(directory: Path, step: int) -> StoredCheckpoint:
    """The checkpoint of this Step, also where a run holds the folder. Raises CheckpointError if it
    is absent or damaged.
    """
    steps, path = (
        steps_of_names(each.name for each in directory.iterdir()),
        directory / f"step_{step}",
    )
    if step in steps:
        examined = _examine(path, step)
    else:
        examined = "it does not exist"
    if isinstance(examined, StoredCheckpoint):
        return examined
    fix = f"another Step; there are: {', '.join(map(str, steps)) or 'none'}"
    raise CheckpointError(f"{path}: cannot be used: {examined}. Fix: {fix}.")


def _remove(path: Path) -> None:
    """Delete a folder with its contents, or a file; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _seal(directory: Path, step: int, meta: Mapping[str, Any]) -> None:
    """Checksum and fsync every file, write the manifest, fsync every directory, deepest first."""
    files: dict[str, _File] = {}
    folders: list[Path] = []
    for where, inner, names in os.walk(directory, topdown=False):
        folders.append(Path(where))
        for path in (Path(where) / name for name in [*inner, *names]):
            if path.is_symlink():  # its target would have no checksum
                problem = f"{path}: expected a file, found a link"
                raise CheckpointError(f"{problem}. Fix: copy what it points to.")
        for path in (Path(where) / name for name in names):
            files[path.relative_to(directory).as_posix()] = _seal_file(path)
    if MANIFEST in files:
        problem = f"{directory / MANIFEST}: the name is the store's own"
        raise CheckpointError(f"{problem}. Fix: write another file name.")
    manifest = _Manifest(format=FORMAT, step=step, meta=dict(meta), files=files)
    manifest.sha256 = manifest.digest()
    with open(directory / MANIFEST, "wb") as file:
        file.write(msgspec.json.format(_encode(manifest)))
        file.flush()
        os.fsync(file.fileno())
    for folder in folders:
        sync_folder(folder)


def _seal_file(path: Path) -> _File:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _File(bytes=file.tell(), sha256=digest)


def _read(path: Path) -> _Manifest:
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Manifest)


def _examine(path: Path, step: int) -> StoredCheckpoint | str:
    """The checkpoint, or what is wrong with it. Raises CheckpointError for a newer format."""
    try:
        manifest = _read(path)
        faults = (_file_fault(path / n, f) for n, f in manifest.files.items())
        problem = _manifest_fault(manifest, path, step) or next(filter(None, faults), None)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    except OSError as error:
        return f"cannot be read ({error})"
    return problem or StoredCheckpoint(step=step, path=path, meta=manifest.meta)


def _marks(path: Path) -> tuple[str, ...]:
    """Which marks a checkpoint's manifest has: timed, kept; none if it cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        meta = _read(path).meta
        return tuple(mark for mark in (_TIMED, _KEPT) if meta.get(mark) is True)
    return ()


def _manifest_fault(manifest: _Manifest, path: Path, step: int) -> str | None:
    if manifest.digest() != manifest.sha256:
        return f"{MANIFEST} differs from its checksum"
    if manifest.format > FORMAT:
        problem = f"{path}: expected format {FORMAT} or less, found {manifest.format}"
        raise CheckpointError(f"{problem}. Fix: resume with the newer release.")
    for name in manifest.files:
        if name.startswith("/") or ".." in name.split("/"):
            return f"{MANIFEST} names {name!r}, which is outside of it"
    if manifest.step != step:
        return f"{MANIFEST} is of Step {manifest.step}"
    return None


def _file_fault(path: Path, wanted: _File) -> str | None:
    if path.is_symlink() or not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != wanted.bytes:
        return f"{path.name} has {size} bytes, its manifest says {wanted.bytes}"
    with open(path, "rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
    if same:
        return None
    return f"{path.name} differs from its checksum"


def _encode(manifest: _Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted")
