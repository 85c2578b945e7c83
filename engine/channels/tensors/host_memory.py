"""Host memory that several processes of one host map: files without a name, by their descriptors.

Owns: allocating such memory, its handle, mapping another process's. Does not own: who maps what and
how long (shared_memories.py). It is what cuda_memory.py is on a GPU, where there is none.

A handle is a process and its descriptor, whose file only the same user can open (proc(5),
/proc/PID/fd). Nothing is left behind when both processes are gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import RunError
from engine.channels.shm.slabs import is_sealed, sealed_memory

_HANDLE = struct.Struct("<II")


def allocate_on_host(size: int) -> tuple[Tensor, bytes]:
    """uint8 [size] that other processes can map, and its handle. Raises OSError without room."""
    descriptor, memory = sealed_memory(size)
    array = np.frombuffer(memory, dtype=np.uint8)
    # Whoever has mapped it keeps its memory.
    weakref.finalize(array, os.close, descriptor).atexit = False
    return torch.from_numpy(array), _HANDLE.pack(os.getpid(), descriptor)


def map_host_handle(handle: bytes, size: int) -> Tensor:
    """uint8 [size] of another process's memory, not for writing. Raises RunError where that process
    is gone, or what it has there is no memory of that size.
    """
    try:
        process, number = _HANDLE.unpack(handle)
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, struct.error) as error:
        problem = f"expected memory of {size} bytes of another process, found: {error}"
        raise RunError(f"{problem}. Fix: see its log for why it ended.") from error
    try:
        # Reading memory that its owner has cut off would kill this process (SIGBUS).
        length = os.fstat(descriptor).st_size
        if length != size or not is_sealed(descriptor):
            problem = f"expected sealed memory of {size} bytes, found {length} bytes"
            raise RunError(f"{problem}. Fix: writer and reader need the same version.")
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    # torch warns of read-only memory; it takes a ctypes array and keeps it and its owner alive.
    array = np.frombuffer(memory, dtype=np.uint8)
    raw = (ctypes.c_uint8 * size).from_address(array.ctypes.data)
    raw.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8)
