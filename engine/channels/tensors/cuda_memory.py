"""Memory of a GPU that several processes of one host use: CUDA's IPC, by its driver.

Owns: allocating such memory, its handle, mapping another process's. Does not own: who maps what and
how long (shared_memories.py), what is in it (engine/weights).

Not torch's own sharing (`UntypedStorage._share_cuda_`): that shares a whole segment of torch's
allocator, with the file of a counter and an event for each time, and not with expandable segments.
Memory of the driver's own has one handle for all its life, whatever the allocator does.

What holds of the driver (CUDA Driver API, "Memory Management", cuIpc*):

- A handle is of a whole block of the driver, out of which it may cut several allocations, but not
  those of multiples of 2 MiB: all here are.
- A process cannot open its own handle.
- Freeing memory that others have open is undefined, so it is freed only with its process.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dataflow.errors import RunError

HANDLE_BYTES = 64
_GRANULE = 2 << 20
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
"""The one flag that opening takes."""

_outside = 0


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Pointer:
    """Bytes on a GPU by their address, which torch takes without a copy and keeps alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def allocate_on_gpu(size: int, device: torch.device) -> tuple[Tensor, bytes]:
    """uint8 [at least size] that other processes can map, and its handle. Raises RunError where
    there is no room. It is never freed.
    """
    global _outside
    size = -(-size // _GRANULE) * _GRANULE
    _bind_context(device)
    address = ctypes.c_uint64()
    call = _driver().cuMemAlloc_v2
    status = call(ctypes.byref(address), ctypes.c_size_t(size))
    if status == _OUT_OF_MEMORY:
        # torch keeps what it freed; the driver cannot take it from there.
        torch.cuda.empty_cache()
        status = call(ctypes.byref(address), ctypes.c_size_t(size))
    if status == _OUT_OF_MEMORY:
        free, _ = torch.cuda.mem_get_info(device)
        problem = f"expected room for {size >> 20} MiB on {device}, found {free >> 20} MiB"
        fix = "weights=pull, whose copies are in the host's memory"
        raise RunError(f"weights for other processes: {problem}. Fix: {fix}.")
    _require(status, "cuMemAlloc")
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    _outside += size
    return _as_tensor(_Pointer(address.value, size), device), bytes(handle)


def map_gpu_handle(handle: bytes, size: int, device: torch.device) -> Tensor:
    """uint8 [size] of another process's memory, until the last view of it is gone. Raises RunError
    where that process is gone or has another GPU.
    """
    if len(handle) != HANDLE_BYTES:
        problem = f"expected a handle of {HANDLE_BYTES} bytes, found {len(handle)}"
        raise RunError(f"{problem}. Fix: writer and reader need the same version of this package.")
    _bind_context(device)
    address = ctypes.c_uint64()
    copied_handle = _Handle.from_buffer_copy(handle)
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied_handle, flags)
    pointer = _Pointer(address.value, size)
    # At the end of the process the driver closes it, and may be gone before Python is.
    weakref.finalize(pointer, _close, address.value, device).atexit = False
    return _as_tensor(pointer, device)


def bytes_outside_torch() -> int:
    """Bytes of the GPU that this process allocated here: torch's allocator does not count them."""
    return _outside


def _close(address: int, device: torch.device) -> None:
    # Work on views of it may still be queued.
    _bind_context(device)
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _as_tensor(pointer: _Pointer, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(pointer, device=device)
    expected = pointer.__cuda_array_interface__["data"][0]
    assert tensor.data_ptr() == expected, "torch copied memory that it was to view"
    return tensor


def _bind_context(device: torch.device) -> None:
    """Make torch's context this thread's: any call of the runtime does. Waits for the device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        problem = f"expected the driver's libcuda.so.1, found: {error}"
        raise RunError(f"weights for other processes: {problem}. Fix: weights=pull.") from error


def _call(name: str, *arguments: Any) -> None:
    _require(getattr(_driver(), name)(*arguments), name)


def _require(status: int, name: str) -> None:
    """Raises RunError with the driver's own name of an error."""
    if not status:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(text))
    error = (text.value or b"an unknown error").decode()
    fix = "weights=pull, which needs no memory that processes share"
    problem = f"expected {name} to succeed, found {error} ({status})"
    raise RunError(f"weights for other processes: {problem}. Fix: {fix}.")
