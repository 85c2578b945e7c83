"""Worlds of ranks: how they find each other, and the group that a kernel gets.

Owns: the rendezvous (a store in a file without a name, whose descriptor was handed over), the
replica's process group. Does not own: transfers between ranks
(collective.py), who is a rank (plan), who starts it (engine/launch).

What works on torch 2.13 (found by experiment, gloo, 2 processes):

- A ProcessGroup that is not torch's default group does carry all_reduce, fully_shard and
  full_tensor where its DeviceMesh is put together by hand (`_init_backend=False, _rank=`), but
  DeviceMesh.from_group, init_device_mesh and distribute_tensor ask for the default group and fail
  without one.
- Two meshes of equal ranks count as equal to DTensor, whose caches then take one's group, or place
  in it, for the other's: full_tensor of a second world with other rank numbers came out with its
  rows in the wrong order.

So a process has at most one world that DTensor sees, and it is the default group: `world`. With it
`DeviceMesh.from_group(group, "cpu")` and `init_device_mesh("cpu", (group.size(),))` both work.
Collective channels use bare backends, which torch's registers never see, so they may be many.
"""

from __future__ import annotations

import os
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from dataflow.errors import RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

TIMEOUT = 60.0
"""Seconds for all ranks to come, and for a silent peer until a transfer counts it as lost."""
LOCK_STEP = 1800.0
"""The same for what the ranks of a node do together: one may still be at another node's rows for
minutes when the others have come. That one is dead or stands still is noticed elsewhere
(engine/launch), and ends its group.
"""


def meeting_place() -> int:
    """A file of memory that has no name, where ranks meet: who has a descriptor of it can, and
    nobody else on the host. It is gone with the last of them, however they end.
    """
    return os.memfd_create("dataflow-rendezvous", os.MFD_CLOEXEC)


def rendezvous(descriptor: int, *, timeout: float = TIMEOUT) -> Store:
    """The store by which the ranks of worlds find each other, kept in the file that each has a
    descriptor of.

    The descriptor is the store's from then on, and stays open as long as the process: the store
    opens the file anew by its number whenever it looks, at its own end too, and must never find
    another file there.
    """
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"/proc/self/fd/{descriptor}", -1)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def world(
    rank: int, size: int, store: Store, *, host: str = "127.0.0.1", timeout: float = LOCK_STEP
) -> ProcessGroup:
    """This process's world, torch's default group: gloo for tensors on the CPU, NCCL for those on
    GPUs.

    Train nodes of one Worker, whose ranks are the same Workers, share it: called again with the
    same rank and size it returns the group that there is. timeout: seconds for one collective.
    Raises RunError for another rank or size, and where a rank does not come.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if dist.is_initialized():
        group = _default()
        if (group.rank(), group.size()) != (rank, size):
            raise RunError(
                f"expected one world in a process, found rank {group.rank()} of {group.size()}"
                f" beside rank {rank} of {size}. Fix: pin nodes with other ranks to other Workers."
            )
        return group
    _stay_on(host)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    wait_for_all(PrefixStore("world", store), rank, size, timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    return _default()


def leave() -> None:
    """Let this process's world go, if it has one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def loopback(host: str) -> bool:
    """Whether an address is this host's own."""
    return (
        host == "localhost"
        or (host.replace(".", "").isdigit() and ip_address(host).is_loopback)
        or host == "::1"
    )


def wait_for_all(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks have come, a minute at most. Raises RunError naming those missing."""
    timeout = min(timeout, TIMEOUT)
    store.set(f"here/{rank}", "1")
    try:
        store.wait([f"here/{r}" for r in range(size)], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} of {size}: expected all ranks within {timeout:g} s, found none of"
            f" {_missing(store, size)}: {_first(error)}. Fix: look at what those Workers say."
        ) from error


def agreed_device(store: Store, rank: int, size: int) -> str:
    """The device of this rank's payloads: the first that it sees, where each rank has one of its
    own, which is what NCCL is for; else the host's memory, by gloo. All ranks come to the same.
    """
    import torch

    mine = "cpu"
    if torch.cuda.is_available():
        mine = str(torch.cuda.get_device_properties(0).uuid)
    store.set(f"device/{rank}", mine)
    all_ = [store.get(f"device/{other}").decode() for other in range(size)]
    return "cpu" if "cpu" in all_ or len(set(all_)) < size else "cuda:0"


def _missing(store: Store, size: int) -> str:
    try:
        left = [str(r) for r in range(size) if not store.check([f"here/{r}"])]
    except RuntimeError:
        return "those that the store cannot name"
    return f"rank {', '.join(left)}"


def _stay_on(host: str) -> None:
    """On one host gloo listens on the loopback, not on whatever address the host's name has."""
    if loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _default() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
