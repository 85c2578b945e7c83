"""The scheduled contract, by gloo between three processes: order, agreement, loss of a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.channels.tensors.collective import CollectiveChannel
from engine.channels.tensors.world import LOCK_STEP, leave, rendezvous, wait_for_all, world
from tests.contracts.ranks import LIMIT, ListeningPlace, RankPool, client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["one host", "several hosts"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Three, by either store."""
    pool = RankPool(3, keyed=request.param == "several hosts")
    yield pool
    pool.close()


def channel(rank: int, size: int, port: int, name: str, timeout: float = 20.0) -> CollectiveChannel:
    return CollectiveChannel(rank, size, client(port), name=name, timeout=timeout)


def error_of(call: Any, *arguments: Any) -> RunError:
    with pytest.raises(RunError) as error:
        call(*arguments)
    return error.value


def messages() -> list[list[Tensor]]:
    """Of many kinds, the large one of 64 MB."""
    draw = torch.Generator().manual_seed(5)
    return [
        [torch.randn(3, 5, generator=draw), torch.arange(7)],
        [
            torch.randn(4, generator=draw).bfloat16(),
            torch.zeros(0, 3),
            torch.tensor(2.5, dtype=torch.float64),
        ],
        [],
        [torch.arange(8 << 20)],
        [torch.randn(6, 4, generator=draw).t(), torch.tensor([True, False])],
    ]


def transfers(rank: int, port: int) -> list[bool]:
    """Rank 0 sends, rank 1 compares; then the other way round, and by broadcast."""
    ends = channel(rank, 2, port, "transfers")
    same = []
    for how, sender in (("send", 0), ("send", 1), ("broadcast", 1)):
        for number, tensors in enumerate(messages()):
            given = [t.contiguous() for t in tensors]
            room = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
            if how == "broadcast":
                ends.broadcast(sender, number, given if rank == sender else room)
            elif rank == sender:
                ends.send(1 - rank, number, tensors)
            else:
                ends.receive(sender, number, room)
            if rank != sender:
                same.append(all(map(torch.equal, room, tensors)))
    ends.close()
    return same


def test_tensors_arrive_in_order_to_the_bit(ranks: RankPool) -> None:
    assert ranks.do(2, transfers) == [[True] * 10, [True] * 5]


def disagreements(rank: int, port: int) -> list[str]:
    """Each in its own world: the errors of both ends for a transfer that only one end makes."""
    said = []
    tensors, other = [torch.zeros(4)], [torch.zeros(2, 2)]
    for name, (mine, theirs) in {
        "sequence": (("send", 1, tensors), ("receive", 0, tensors)),
        "both wrong": (("send", 5, tensors), ("receive", 5, tensors)),
        "shape": (("send", 0, tensors), ("receive", 0, other)),
        "count": (("send", 0, tensors), ("receive", 0, [])),
        "role": (("send", 0, tensors), ("send", 0, tensors)),
    }.items():
        ends = channel(rank, 2, port, name)
        role, sequence, given = mine if rank == 0 else theirs
        first = error_of(getattr(ends, role), 1 - rank, sequence, given)
        assert not isinstance(first, PeerLost), first
        assert error_of(ends.send, 1 - rank, 0, tensors) is first
        said.append(f"{name}: {first}")
        ends.close()
    return said


def test_another_transfer_than_the_peer_means_is_refused_on_both_ends(ranks: RankPool) -> None:
    for said in ranks.do(2, disagreements):
        assert "send 1 (not the next one)" in said[0] or "send -2" in said[0], said
        assert "not the next one" in said[1]
        assert "layout" in said[2]
        assert "of 0 tensors" in said[3]
        assert said[4].count("send 0 of 1 tensors") == 2


def strangers(rank: int, port: int) -> list[str]:
    ends = channel(rank, 2, port, "strangers")
    # An end that closes at once would be gone while the other connects.
    wait_for_all(PrefixStore("strangers", client(port)), rank, 2, 20)
    said = [str(error_of(ends.send, peer, 0, [])) for peer in (rank, 2, -1)]
    said.append(str(error_of(ends.receive, 1 - rank, 0, [torch.zeros(4, 4).t()])))
    ends.close()
    return [*said, str(error_of(ends.send, 1 - rank, 0, []))]


def test_a_rank_that_is_not_there_and_a_closed_channel_are_errors(ranks: RankPool) -> None:
    for said in ranks.do(2, strangers):
        assert all("another of the 2 ranks" in s for s in said[:3])
        assert "contiguous" in said[3]
        assert "closed" in said[4]


def lonely(rank: int, port: int) -> list[str]:
    store = PrefixStore("lonely", client(port))
    names = "t0 on a", "t1 on b", "t2 on c"
    return [
        str(error_of(channel, rank, 3, port, "incomplete", 1.0)),
        str(error_of(wait_for_all, store, rank, 3, 1.0, names)),
    ]


def test_a_rank_that_does_not_come_is_named_with_its_host(ranks: RankPool) -> None:
    for of_channel, of_world in ranks.do(2, lonely):
        assert "none of rank 2" in of_channel
        assert "none of rank 2 (t2 on c)" in of_world


def group_of(rank: int, port: int, place: ListeningPlace) -> tuple[list[float], list[int], str]:
    """The replica's world: at its own meeting place; a mesh of it; twice; another next to it."""
    store = rendezvous(place.end(), timeout=20)
    group = world(rank, 2, store)
    try:
        assert world(rank, 2, store) is group
        limit = group._get_backend(torch.device("cpu")).options._timeout
        assert limit.total_seconds() == LOCK_STEP, "a rank that is late by minutes is not gone"
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value, group=group)
        mesh = DeviceMesh.from_group(group, "cpu")
        return value.tolist(), mesh.mesh.tolist(), str(error_of(world, rank, 3, store))
    finally:
        leave()


def test_the_group_of_a_replica_makes_a_mesh_and_is_one_in_a_process(ranks: RankPool) -> None:
    with closing(ListeningPlace()) as place:
        for value, mesh, refused in ranks.do(2, group_of, place):
            assert (value, mesh) == ([3.0], [0, 1])
            assert "one world in a process" in refused


def grouped(rank: int, port: int, names: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """A world as ranks on several hosts make it: all of it, and a part that has a group."""
    group = world(rank, len(names), client(port), address="127.0.0.2", names=names)
    try:
        one, two = torch.tensor([float(rank + 1)]), torch.tensor([float(rank)])
        dist.all_reduce(one, group=group)
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(two, group=pair)
        return one.tolist(), two.tolist()
    finally:
        leave()


def test_a_world_of_several_hosts(ranks: RankPool) -> None:
    names = ("t0 on a", "t1 on b", "t2 on b")
    assert ranks.do(3, grouped, names) == [([6.0], [1.0]), ([6.0], [1.0]), ([6.0], [2.0])]


def open_sockets() -> set[str]:
    """This process's listening TCP sockets."""
    tables = [Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return listening & {os.readlink(path) for path in files}


def met(rank: int, port: int, place: ListeningPlace) -> tuple[int, str]:
    before = open_sockets()
    descriptor = place.end()
    store = rendezvous(descriptor, timeout=20)
    wait_for_all(store, rank, 2, 20)
    return len(open_sockets() - before), os.readlink(f"/proc/self/fd/{descriptor}")


def test_ranks_meet_where_nobody_else_can_come(ranks: RankPool) -> None:
    """Not at a port, nor in a named file: only holders of a descriptor get in."""
    with closing(ListeningPlace()) as place:
        for listening, name in ranks.do(2, met, place):
            assert listening == 0
            assert name == "/memfd:dataflow-rendezvous (deleted)"


def exchanged(rank: int, port: int, size: int) -> list[float]:
    """From the first device to the others, of which each rank has its own."""
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    store, name = client(port), f"devices {size}"
    ends = CollectiveChannel(rank, size, store, name=name, device=device, timeout=20)
    numbers = torch.arange(5.0, device=device).bfloat16() * (rank == 0)
    given = [numbers, torch.zeros(0, 3, device=device)]
    ends.broadcast(0, 0, given)
    value = torch.full((1000,), float(rank), device=device)
    if size > 1:
        (ends.send if rank == 0 else ends.receive)(1 - rank, 0, [value])
    ends.close()
    return [*given[0].tolist(), float(value.sum())]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_payloads_on_devices_go_by_nccl(ranks: RankPool, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    assert ranks.do(size, exchanged, size) == [[0.0, 1.0, 2.0, 3.0, 4.0, 0.0]] * size


def is_there(rank: int, port: int) -> bool:
    """Import torch and this module first, which takes longer than the limits below."""
    return True


def chain(rank: int, port: int, name: str, timeout: float) -> tuple[str, str, float]:
    """Rank 2 waits for rank 1, which waits for rank 0, which waits for rank 2."""
    ends = channel(rank, 3, port, name, timeout)
    client(port).set(f"{name} {rank}", "1")
    start = time.monotonic()
    error = error_of(ends.receive, (rank - 1) % 3, 0, [torch.zeros(1)])
    again = error_of(ends.send, 0, 0, [])
    ends.close()
    assert again is error
    return type(error).__name__, str(error), time.monotonic() - start


def start_chain(ranks: RankPool, name: str, timeout: float) -> None:
    for rank in range(3):
        ranks.tell(rank, chain, name, timeout)
    ranks.store.wait([f"{name} {rank}" for rank in range(3)], timedelta(seconds=LIMIT))


@pytest.mark.parametrize(("how", "timeout"), [(signal.SIGSTOP, 1.0), (signal.SIGKILL, LIMIT)])
def test_a_rank_that_is_gone_or_stopped_fences_the_world(
    ranks: RankPool, how: signal.Signals, timeout: float
) -> None:
    assert ranks.do(3, is_there) == [True] * 3
    start_chain(ranks, how.name, timeout)
    ranks.signal(0, how)
    kinds, said, took = zip(*ranks.answers((1, 2)), strict=True)
    assert kinds == ("PeerLost", "PeerLost"), said
    assert "rank 0: receive 0" in said[0]
    assert "rank 1: receive 0" in said[1]
    assert max(took) < LIMIT / 2
    if how == signal.SIGSTOP:
        ranks.signal(0, signal.SIGCONT)
        assert ranks.answers([0])[0][0] == "PeerLost"
    else:
        assert isinstance(ranks.answers([0])[0], EOFError)
