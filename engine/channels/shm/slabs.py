"""Slabs: pooled memory that other processes of the host can map.

Owns: memfds of sealed size, faulted in once and reused; regions in them; files on disk beyond the
limit. Does not own: a region's contents (engine/channels/frames.py), when it is released (the
coordinator), how a descriptor gets to a peer (server.py).

Page faults make a new slab for each batch cost several times the copy into it, so slabs stay until
the pool is over its limit. Small regions share a slab; a large one has its own. Callers lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataflow.errors import StorageError
from engine.channels.descriptors import more_files

ALIGNMENT = 64
SHARED = 8 << 20
"""Bytes, at most, of a slab that small regions share."""
FIRST = 256 << 10
"""Bytes of the first of them. Each further one has twice as many, so that a Worker with few rows
takes little: of hundreds on a host that counts.
"""
SMALL = 1 << 20
"""The largest region that shares a slab."""
POISON = 0xA5

F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: no new writable mapping, no write(); the mapping that the pool has stays writable."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slab:
    """Memory with a descriptor. `number` never repeats within a pool; `on_disk`: spilled."""

    __slots__ = ("_memory", "buffer", "descriptor", "live", "number", "on_disk", "size", "used")

    def __init__(self, number: int, size: int, directory: Path | None = None) -> None:
        self.number = number
        self.size = size
        self.on_disk = directory is not None
        if directory is None:
            self.descriptor, self._memory = sealed_memory(size)
        else:
            self.descriptor, self._memory = _unlinked_file(size, directory)
        self.buffer = pa.py_buffer(self._memory)
        self.used = 0
        self.live = 0

    def bytes(self, offset: int, length: int) -> np.ndarray:
        """uint8 [length], writable; any view of it keeps the mapping alive."""
        return np.frombuffer(self._memory, np.uint8, length, offset)

    def close(self) -> None:
        """Close the descriptor; the memory goes with its last view."""
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class Region:
    """A part of a slab. holds: a reference count."""

    slab: Slab
    offset: int
    length: int
    holds: int = 1

    def bytes(self) -> np.ndarray:
        """uint8 [length], writable."""
        return self.slab.bytes(self.offset, self.length)


class SlabPool:
    """Allocates regions. limit: bytes of memory, beyond which slabs are files in `directory`."""

    def __init__(self, *, limit: int, directory: Path | None = None, poison: bool = False) -> None:
        self.limit = limit
        self.spilled = 0
        """Bytes in files."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called for each slab that is returned to the system."""
        self._directory = directory or Path(tempfile.gettempdir())
        self._poison = poison
        self._slabs: dict[int, Slab] = {}
        self._idle: list[Slab] = []
        self._shared: Slab | None = None
        self._growing = FIRST
        """Bytes of the next new slab that small regions share."""
        self._next = 0
        self._gone: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs in memory; from any thread."""
        slabs = list(self._slabs.values())  # which another thread may change meanwhile
        return sum(slab.size for slab in slabs if not slab.on_disk)

    @property
    def live(self) -> int:
        """Regions that are held."""
        return sum(s.live for s in self._slabs.values())

    def gone(self) -> list[int]:
        """Numbers of slabs returned to the system since the last call."""
        numbers, self._gone = self._gone, []
        return numbers

    def allocate(self, length: int) -> Region:
        """A region of so many bytes, held once. Raises StorageError without memory."""
        if length <= SMALL:
            slab = self._for_small(length)
        else:
            slab = self._take(_size_class(length))
        region = Region(slab, slab.used, length)
        slab.used += -(-length // ALIGNMENT) * ALIGNMENT
        slab.live += 1
        return region

    def let_go(self, region: Region) -> None:
        """Drop one hold of a region; with the last one its memory is free."""
        region.holds -= 1
        if region.holds:
            return
        slab = region.slab
        if self._poison:
            region.bytes()[:] = POISON
        slab.live -= 1
        if slab.live:
            return
        slab.used = 0
        if slab.on_disk:
            self.spilled -= slab.size
            self._drop(slab)
        elif slab is not self._shared:
            self._idle.append(slab)

    def close(self) -> None:
        """Close every descriptor; existing views stay readable."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
        self._idle.clear()
        self._shared = None

    def _for_small(self, length: int) -> Slab:
        """The shared slab if it has room, else a free or new one in its place."""
        if self._shared is None or self._shared.used + length > self._shared.size:
            self._shared = None  # the old one is free once its last region goes
            self._shared = self._another_shared(length)
        return self._shared

    def _another_shared(self, length: int) -> Slab:
        """The largest free slab that is not too large, else a new one, larger than those before."""
        fitting = [s for s in self._idle if length <= s.size <= 2 * SHARED]
        if fitting:
            slab = max(fitting, key=lambda s: s.size)
            self._idle.remove(slab)
            return slab
        size = max(self._growing, _size_class(length))
        self._growing = min(2 * size, SHARED)
        return self._make(size)

    def _take(self, size: int) -> Slab:
        """The smallest free slab of at most twice the size, else a new one."""
        fitting = [s for s in self._idle if size <= s.size <= 2 * size]
        if not fitting:
            return self._make(size)
        slab = min(fitting, key=lambda s: s.size)
        self._idle.remove(slab)
        return slab

    def _make(self, size: int) -> Slab:
        while self._idle and self.nbytes + size > self.limit:
            self._idle.sort(key=lambda s: s.size)
            self._drop(self._idle.pop())
        on_disk = self.nbytes + size > self.limit
        try:
            slab = Slab(self._next, size, self._directory if on_disk else None)
        except OSError as error:
            raise self._make_storage_error(error, size, on_disk) from error
        self._next += 1
        self._slabs[slab.number] = slab
        if on_disk:
            self.spilled += size
        return slab

    def _drop(self, slab: Slab) -> None:
        del self._slabs[slab.number]
        if slab is self._shared:
            self._shared = None
        self._gone.append(slab.number)
        slab.close()
        self.on_gone()

    def _make_storage_error(self, error: OSError, size: int, on_disk: bool) -> StorageError:
        memory, disk = self.nbytes >> 20, self.spilled >> 20
        have = f"{len(self._slabs)} slabs, {memory} MiB in memory and {disk} on disk"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = more_files()
        elif on_disk:
            fix = f"free space in {self._directory}, another folder by TMPDIR, or a smaller batch"
        else:
            fix = "a smaller batch or max_lag, or a machine with more memory"
        wanted = f"expected room for {size >> 20} MiB"
        return StorageError(
            f"outbox: {wanted}, found: {error.strerror}; it has {have}. Fix: {fix}."
        )


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can shrink this descriptor's memory; False for an ordinary file."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _size_class(length: int) -> int:
    """The next (8 to 15) * 2**n: at most an eighth is wasted, and slabs fit other regions later."""
    step = max(1 << max(length.bit_length() - 4, 0), mmap.PAGESIZE)
    return -(-length // step) * step


def sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """A mapped memfd with its pages faulted in, sealed in size, read-only for later mappings."""
    descriptor = os.memfd_create("dataflow-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)  # an error now, not a signal later
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        with contextlib.suppress(OSError):  # before Linux 5.1 there is no such seal
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, memory


def _unlinked_file(size: int, directory: Path) -> tuple[int, mmap.mmap]:
    """A mapped file without a name, its blocks reserved."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:  # the file system may have no O_TMPFILE
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, name = tempfile.mkstemp(prefix="dataflow-spill-", dir=directory)
        os.unlink(name)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return descriptor, mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError:
        os.close(descriptor)
        raise
