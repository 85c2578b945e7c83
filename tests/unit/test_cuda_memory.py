"""Memory that processes share on a GPU: what is asked of CUDA's driver, and what its errors say.

The driver is a stand-in; that the real one does what is asked, tests/contracts shows on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dataflow.errors import RunError
from engine.channels.tensors import cuda_memory
from engine.channels.tensors.cuda_memory import allocate_on_gpu, map_gpu_handle

GPU = torch.device("cuda:0")
MIB = 1 << 20
OUT_OF_MEMORY, MAP_FAILED = 2, 205


class Driver:
    """Answers as CUDA's driver does. room: host memory in the place of the GPU's. statuses: of the
    next calls by name; 0 once there are no more.
    """

    def __init__(self) -> None:
        self.room = (ctypes.c_ubyte * (4 * MIB))()
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: dict[str, deque[int]] = {}

    def _note(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        waiting = self.statuses.get(name)
        return waiting.popleft() if waiting else 0

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        address._obj.value = ctypes.addressof(self.room)
        return self._note("allocate", size.value)

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        ctypes.memset(ctypes.byref(handle._obj), 7, ctypes.sizeof(handle._obj))
        return self._note("handle", address.value == ctypes.addressof(self.room))

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        address._obj.value = ctypes.addressof(self.room)
        return self._note("open", bytes(handle), flags.value)

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        return self._note("close", address.value == ctypes.addressof(self.room))

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_MAP_BUFFER_OBJECT_FAILED"
        return 0


def view_room(pointer: Any, device: torch.device) -> torch.Tensor:
    """What torch makes of a pointer, here of host memory: a view that keeps it alive."""
    interface = pointer.__cuda_array_interface__
    (size,) = interface["shape"]
    raw = (ctypes.c_uint8 * size).from_address(interface["data"][0])
    raw.pointer = pointer  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: stand_in)
    monkeypatch.setattr(cuda_memory, "_bind_context", lambda device: None)
    monkeypatch.setattr(cuda_memory, "_as_tensor", view_room)
    monkeypatch.setattr(cuda_memory, "_outside", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: stand_in._note("empty cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * MIB, 8 * MIB))
    yield stand_in
    gc.collect()  # what a test has mapped is closed by its own driver


def test_allocations_are_whole_blocks_of_the_driver_and_are_counted(driver: Driver) -> None:
    flat, handle = allocate_on_gpu(3 * MIB, GPU)
    assert len(flat) == cuda_memory.bytes_outside_torch() == 4 * MIB
    assert handle == bytes([7]) * 64
    assert driver.calls == [("allocate", 4 * MIB), ("handle", True)]


def test_torch_gives_back_what_it_keeps_before_there_is_no_room(driver: Driver) -> None:
    driver.statuses["allocate"] = deque([OUT_OF_MEMORY])
    allocate_on_gpu(MIB, GPU)
    calls = [name for name, *_ in driver.calls]
    assert calls == ["allocate", "empty cache", "allocate", "handle"]
    driver.statuses["allocate"] = deque([OUT_OF_MEMORY] * 2)
    with pytest.raises(
        RunError, match=r"room for 2 MiB on cuda:0, found 3 MiB\. Fix: weights=pull"
    ):
        allocate_on_gpu(MIB, GPU)


def test_what_is_mapped_is_closed_with_its_last_view(driver: Driver) -> None:
    flat = map_gpu_handle(bytes(range(64)), 2 * MIB, GPU)
    part = flat[5:]
    del flat
    gc.collect()
    assert driver.calls == [("open", bytes(range(64)), 1)]
    del part
    gc.collect()
    assert driver.calls[1:] == [("close", True)]


def test_an_error_has_the_drivers_name(driver: Driver) -> None:
    driver.statuses["open"] = deque([MAP_FAILED])
    problem = r"cuIpcOpenMemHandle_v2 to succeed, found CUDA_ERROR_MAP_BUFFER_OBJECT_FAILED \(205\)"
    with pytest.raises(RunError, match=rf"{problem}\. Fix: weights=pull"):
        map_gpu_handle(bytes(64), MIB, GPU)
    with pytest.raises(RunError, match="expected a handle of 64 bytes, found 3"):
        map_gpu_handle(b"abc", MIB, GPU)


def test_a_handle_goes_by_value_as_the_driver_has_it() -> None:
    assert ctypes.sizeof(cuda_memory._Handle) == cuda_memory.HANDLE_BYTES == 64
