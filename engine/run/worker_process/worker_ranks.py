"""How a Worker that is a rank meets the others: in a file, or on several hosts at the first rank.

Owns: the store by which they meet, who is missing, what a Worker gets as a rank. Does not own: that
file (ranks.py), the stores and worlds (engine/channels), where the first rank is (AddressBook).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.plan.plan import Plan
from engine.run.control.control import Open, Seat
from engine.run.worker_process.worker_channel import WorkerChannel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def join_ranks(
    opened: Open, plan: Plan, descriptors: tuple[int, ...], channel: WorkerChannel
) -> tuple[Any, Any]:
    """This Worker's process group; its end of broadcasts to the ranks with equal rows."""
    if (seat := opened.seat) is None:
        return None, None
    from engine.channels.tensors.row_broadcast import join
    from engine.channels.tensors.world import rendezvous, world

    node = next(n for n in plan.nodes if n.ranks > 1 and opened.worker in n.workers)
    names = [f"{worker} on {plan.host_of(worker)}" for worker in seat.names]
    if names:  # ranks on several hosts, which have no file in common to meet in
        assert opened.network is not None
        store, address = far_store(opened, channel, names), opened.network.address
    else:
        store, address = rendezvous(descriptors[0]), ""
    group = world(seat.rank, seat.world, store, address=address, names=names)
    rank = node.rank_of(opened.worker)
    members = next(share for share in node.shares if opened.worker in share)
    if len(members) == 1:
        return group, None
    content = opened.verify == "content"
    return group, join(store, rank.share, rank.part, members, content=content)


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
