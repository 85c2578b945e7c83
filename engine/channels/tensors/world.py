"""Worlds of ranks: how they find each other, and the group that a kernel gets.

Owns: the rendezvous of one host (a store in a nameless file, by its descriptor), the replica's
process group. Does not own: the rendezvous of several hosts (keyed_store.py), transfers
(collective.py), which ranks there are (plan), their start (engine/run/launch).

Experiments with torch 2.13 (gloo, 2 processes):

- DeviceMesh.from_group, init_device_mesh and distribute_tensor need torch's default group.
- DTensor confuses two meshes of equal ranks: full_tensor of a second world with other rank numbers
  had its rows in the wrong order.

So a process has at most one world that DTensor sees, the default group: `world`. Collective
channels use bare backends outside torch's registries, and there may be many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dataflow.errors import RunError
from engine.channels.tensors.interfaces import LOOPBACK, interface_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

TIMEOUT = 60.0
"""Seconds for all ranks to come, and until a silent peer counts as lost."""
LOCK_STEP = 1800.0
"""Seconds for the ranks of a node: one may still process another node's rows for minutes."""


def meeting_place() -> int:
    """A memory file without a name: only those who are given its descriptor can meet there."""
    return os.memfd_create("dataflow-rendezvous", os.MFD_CLOEXEC)


def rendezvous(descriptor: int, *, timeout: float = TIMEOUT) -> Store:
    """The store, in this descriptor's file, by which the ranks of worlds find each other. It owns
    the descriptor, never closed: it opens the file again by that number at every access.
    """
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"/proc/self/fd/{descriptor}", -1)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def world(
    rank: int,
    size: int,
    store: Store,
    *,
    timeout: float = LOCK_STEP,
    address: str = "",
    names: Sequence[str] = (),
) -> ProcessGroup:
    """This process's world, torch's default group, which its train nodes share: gloo, and NCCL on
    GPUs. timeout: of one collective. address: of this host, if ranks are on several. names: of the
    ranks, for errors. Raises RunError for another rank or size, or a missing rank.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if not dist.is_initialized():
        # Without this gloo listens at the address of the host's name.
        interface = LOOPBACK
        if address:
            interface = interface_of(address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
        wait_for_all(PrefixStore("world", store), rank, size, timeout, names)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    group: Any = dist.group.WORLD
    if (group.rank(), group.size()) != (rank, size):
        both = f"rank {group.rank()} of {group.size()} and rank {rank} of {size}"
        problem = f"expected one world in a process, found {both}"
        raise RunError(f"{problem}. Fix: pin nodes with other ranks to other Workers.")
    return group


def leave() -> None:
    """Destroy this process's world, if it has one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all(
    store: Store, rank: int, size: int, timeout: float, names: Sequence[str] = ()
) -> None:
    """Wait until all ranks have come, a minute at most. Raises RunError naming those missing."""
    timeout = min(timeout, TIMEOUT)
    store.set(f"here/{rank}", "1")
    try:
        everyone = [f"here/{other}" for other in range(size)]
        store.wait(everyone, timedelta(seconds=timeout))
    except RuntimeError as error:
        first, *_ = str(error).strip().splitlines()
        first = first.rstrip(".")
        raise RunError(
            f"rank {rank} of {size}: expected all ranks within {timeout:g} s, found none of"
            f" {_missing(store, size, names)}: {first}. Fix: look at what those Workers say."
        ) from error


def agreed_device(store: Store, rank: int, size: int) -> str:
    """The device of payloads: `cuda:0` (NCCL) if each rank has its own GPU, else `cpu` (gloo)."""
    from torch import cuda

    mine = "cpu"
    if cuda.is_available():
        mine = str(cuda.get_device_properties(0).uuid)
    store.set(f"device/{rank}", mine)
    devices = {store.get(f"device/{other}").decode() for other in range(size)}
    # Fewer devices than ranks: two ranks have one GPU between them.
    if "cpu" in devices or len(devices) < size:
        return "cpu"
    return "cuda:0"


def _missing(store: Store, size: int, names: Sequence[str]) -> str:
    missing: list[str] = []
    for rank in range(size):
        try:
            if store.check([f"here/{rank}"]):
                continue
        except RuntimeError:
            return "those that the store cannot name"
        missing.append(f"{rank} ({names[rank]})" if names else str(rank))
    return f"rank {', '.join(missing)}"
