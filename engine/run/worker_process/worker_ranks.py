"""How a Worker that is a rank meets the others: in a file, or on several hosts at the first rank.

Owns: the store by which they meet, who is missing, what a Worker gets as a rank. Does not own: that
file (ranks.py), the stores and worlds (engine/channels), where the first rank is (AddressBook).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.plan.plan import Plan, PlannedNode
from engine.run.control.control import Open, Seat
from engine.run.worker_process.worker_channel import WorkerChannel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from engine.channels.tensors.row_broadcast import RowBroadcast


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """What a Worker has as a rank. group: of all ranks. replica_group: of those with equal rows, if
    nodes that do not train have such. broadcast: its end of broadcasts to these.
    """

    group: Any = None
    replica_group: Any = None
    broadcast: RowBroadcast | None = None


def join_ranks(
    opened: Open, plan: Plan, descriptors: tuple[int, ...], channel: WorkerChannel
) -> JoinedRanks:
    """Meet the other ranks. Raises RunError for one that does not come."""
    if (seat := opened.seat) is None:
        return JoinedRanks()
    from engine.channels.tensors.row_broadcast import join
    from engine.channels.tensors.world import rendezvous, world

    node = _find_largest_group(plan, opened.worker)
    names = [f"{worker} on {plan.host_of(worker)}" for worker in seat.names]
    if names:  # ranks on several hosts, which have no file in common to meet in
        assert opened.network is not None
        store, address = far_store(opened, channel, names), opened.network.address
    else:
        store, address = rendezvous(descriptors[0]), ""
    group = world(seat.rank, seat.world, store, address=address, names=names)
    rank = node.rank_of(opened.worker)
    members = node.share_of(opened.worker)
    if len(members) == 1:
        return JoinedRanks(group)
    content = opened.verify == "content"
    broadcast = join(store, rank.share, rank.part, members, content=content)
    replica_group = None
    if _has_replicas(plan, node):
        replica_group = _make_replica_group(group, len(members))
    return JoinedRanks(group, replica_group, broadcast)


def _find_largest_group(plan: Plan, worker: str) -> PlannedNode:
    """The node by which a Worker is in a world: a replica may be a share of what trains there."""
    ranked_nodes = [n for n in plan.nodes if n.ranks > 1 and worker in n.workers]
    return max(ranked_nodes, key=lambda n: n.ranks)


def _has_replicas(plan: Plan, world: PlannedNode) -> bool:
    """Whether a node that does not train has ranks in a world; the same for all of its ranks."""
    for node in plan.nodes:
        if node.work != "train" and node.ranks > 1 and set(node.workers) & set(world.workers):
            return True
    return False


def _make_replica_group(group: Any, size: int) -> Any:
    """The group of the consecutive ranks with equal rows; all ranks make all of them, in order."""
    import torch.distributed as dist

    if group.size() == size:
        return group
    limit = group._get_backend(_default_device()).options._timeout
    own_group = None
    for first in range(0, group.size(), size):
        made_group = dist.new_group(list(range(first, first + size)), timeout=limit)
        if first <= group.rank() < first + size:
            own_group = made_group
    return own_group


def _default_device() -> Any:
    """Where the backend is whose time limit counts."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def far_store(
    opened: Open, channel: WorkerChannel, names: list[str], timeout: float | None = None
) -> Store:
    """The store of ranks on several hosts, once the first one of this life has said where it is.
    names: with their hosts. Raises RunError if that one does not come.
    """
    from engine.channels.tensors.keyed_store import KeyedStore
    from engine.channels.tensors.world import TIMEOUT
    from engine.channels.zmq.rendezvous_client import MeetingClient

    limit = TIMEOUT if timeout is None else timeout
    seat, book = opened.seat, channel.book
    assert seat is not None
    assert book is not None
    first = seat.names[0]
    try:
        book.meeting(first, opened.epoch, limit)
    except PeerLost as lost:
        raise RunError(_missing(seat, names, limit, lost)) from lost
    find = partial(book.meeting, first, opened.epoch, 0.0)
    return KeyedStore(MeetingClient(names[0], find, book.wait, channel.keys), timeout=limit)


def _missing(seat: Seat, names: list[str], limit: float, lost: PeerLost) -> str:
    me = f"rank {seat.rank} of {seat.world} ({names[seat.rank]})"
    return f"{me}: expected rank 0 ({names[0]}) within {limit:g} s, found none: {lost}"
