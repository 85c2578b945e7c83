"""One Worker with recording kernels: weights, ranks, losses, turns."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.schema import Rollout
from engine.api import plan
from engine.channels.contract import BlockRequest, Channel, PeerLost
from engine.channels.inproc import InprocChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.tensors.row_broadcast import RowBroadcast, join
from engine.plan.options import RunOptions
from engine.protocol import messages as m
from engine.protocol.refs import Gather
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.worker import Worker
from tests.kit.run_graphs import evaluated, rolled_out, small
from tests.kit.scripted_kernels import SOON, HeldChannel, Joining, PeersAreGone, Scripted

PIN = {"rollout": "gen", "train_policy": "train"}
OFFERED = m.Offered(id=1, worker="train", block=0, digest="")


def opened(
    graph: Graph,
    name: str,
    channel: Channel | None = None,
    cast: RowBroadcast | None = None,
    kernel: type[Scripted] = Scripted,
    **options: Any,
) -> tuple[Worker, Any]:
    """The Worker of this name, and its kernels by node."""
    planned = plan(graph, RunOptions(threads=1, **options))
    nodes = tuple(
        replace(n, kernel=f"{kernel.__module__}:{kernel.__name__}") for n in planned.nodes
    )
    channel = InprocChannel() if channel is None else channel
    worker = Worker(name, replace(planned, nodes=nodes), channel=channel, cast=cast)
    list(worker.open())
    return worker, worker.kernels.by_node


def chunk(count: int = 3) -> m.RunChunk:
    keys = Keys.of(range(count))
    return m.RunChunk(id=7, node="rollout", worker="gen", step=0, keys=keys, inputs={})


def offered(worker: Worker, version: int) -> m.Offered:
    """What it offers of its policy."""
    asked = m.Offer(
        id=1, model="policy", writer="train_policy", worker=worker.name, version=version
    )
    told = next(worker.execute(asked))
    assert isinstance(told, m.Offered)
    return told


def publish(offer: m.Offered, reader: str = "rollout", version: int = 3) -> m.Load:
    """That offer to a reader in the Worker `gen`."""
    return m.Load(
        id=2, model="policy", writer="train_policy", reader=reader, version=version,
        worker="gen", source="train", block=offer.block, digest=offer.digest,
    )  # fmt: skip


@pytest.fixture
def lagging(tiny_folder: Path) -> tuple[Worker, Any, m.Offered]:
    """A Worker that generates and one that trains, in one channel; the latter's version 3."""
    channel, graph = InprocChannel(), small(tiny_folder, max_lag=1)
    worker, kernels = opened(graph, "gen", channel, pin=PIN)
    writer, _ = opened(graph, "train", channel, pin=PIN)
    return worker, kernels, offered(writer, 3)


def kinds(events: Iterable[m.Event]) -> list[type]:
    return [type(event) for event in events]


def test_new_weights_come_between_two_rows_of_a_running_chunk(
    lagging: tuple[Worker, Any, m.Offered],
) -> None:
    worker, kernels, offer = lagging
    message = publish(offer)
    assert not worker.delivery.interrupt_with(message), "nothing runs"
    events = worker.execute(chunk())
    assert isinstance(next(events), m.Produced)
    other = replace(message, reader="reference")
    assert not worker.delivery.interrupt_with(other), "another node does not run"
    assert worker.delivery.interrupt_with(message)
    assert isinstance(next(events), m.Loaded)
    assert kernels["rollout"].asked == ["interrupt", (3, ["a", "b"])]
    assert kinds(events) == [m.Produced, m.Produced, m.ChunkDone]
    assert not worker.delivery.interrupt_with(message)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_chunk_goes_on_while_weights_are_fetched(tiny_folder: Path, is_gone: bool) -> None:
    channel, graph = HeldChannel(), small(tiny_folder, max_lag=1)
    worker, kernels = opened(graph, "gen", channel, pin=PIN)
    writer, _ = opened(graph, "train", channel, pin=PIN)
    message, passed = publish(offered(writer, 3)), SimpleQueue()
    events = worker.execute(chunk())
    assert isinstance(next(events), m.Produced)
    assert worker.delivery.fetch_beside(message, passed.put, passed.put)
    assert isinstance(next(events), m.Produced), "decoding goes on"
    assert not kernels["rollout"].asked
    channel.is_gone = is_gone
    channel.may_go_on.set()
    assert passed.get(timeout=SOON) == message
    assert worker.delivery.interrupt_with(message)
    end = next(events)
    if is_gone:
        assert end == m.FetchFailed(id=2, worker="gen", peer="train")
        assert kernels["rollout"].asked == ["interrupt"]
    else:
        assert isinstance(end, m.Loaded)
        assert kernels["rollout"].asked == ["interrupt", (3, ["a", "b"])]
        names = {name for name, _, _ in worker.reports()}
        assert {"weights/policy/fetch", "weights/policy/load"} <= names
    assert kinds(events) == [m.Produced, m.ChunkDone]


def test_who_keeps_what_it_fetched_says_so_at_once(tiny_folder: Path) -> None:
    channel, graph = HeldChannel(), small(tiny_folder, max_lag=1)
    channel.may_go_on.set()
    worker, _ = opened(graph, "gen", channel, pin=PIN)
    writer, _ = opened(graph, "train", channel, pin=PIN)
    offer = offered(writer, 3)
    message, said = replace(publish(offer), keeps=True), SimpleQueue()
    assert worker.delivery.fetch_beside(message, said.put, said.put)
    fetched = said.get(timeout=SOON)
    assert isinstance(fetched, m.Fetched)
    assert said.get(timeout=SOON) == message
    (first,) = channel.fetch([BlockRequest(worker="gen", block=fetched.block)])
    (original,) = channel.fetch([BlockRequest(worker="train", block=offer.block)])
    assert first.equals(original)
    assert list(worker.execute(message)) == [m.Loaded(id=2, worker="gen")]


@pytest.mark.parametrize("kind", ["alias", "here", "ipc"])
def test_what_is_here_is_not_fetched(tiny_folder: Path, kind: str) -> None:
    route: dict[str, Any] = {"weights": "ipc"} if kind == "ipc" else {}
    worker, _ = opened(small(tiny_folder, max_lag=1), "gen", pin=PIN, **route)
    message = publish(OFFERED)
    if kind != "ipc":
        message = replace(message, alias=kind == "alias", source="gen")
    assert not worker.delivery.fetch_beside(message, print, print)


def test_weights_that_come_at_the_end_of_a_chunk_are_not_forgotten(
    lagging: tuple[Worker, Any, m.Offered],
) -> None:
    worker, kernels, offer = lagging
    events = worker.execute(chunk(1))
    assert kinds([next(events), next(events)]) == [m.Produced, m.ChunkDone]
    assert worker.delivery.interrupt_with(publish(offer))
    assert kinds(events) == [m.Loaded]
    assert kernels["rollout"].asked[-1] == (3, ["a", "b"])


@pytest.mark.parametrize("how", [{"max_lag": 0}, {"max_lag": 1, "on_update": "drain"}])
def test_at_lag_0_and_where_rows_are_drained_nothing_is_interrupted(
    tiny_folder: Path, how: dict[str, Any]
) -> None:
    graph = small(tiny_folder).replace(rollout=rolled_out(tiny_folder, 4, **how)[1])
    worker, _ = opened(graph, "gen", pin={"rollout": "gen"})
    events = worker.execute(chunk())
    next(events)
    assert not worker.delivery.interrupt_with(publish(OFFERED))


@pytest.mark.parametrize("on_update", ["interrupt", "drain"])
def test_no_chunk_joins_rows_that_are_drained_while_weights_wait(
    tiny_folder: Path, on_update: str
) -> None:
    channel = InprocChannel()
    rollout = rolled_out(tiny_folder, 4, max_lag=1, on_update=on_update)[1]
    graph = small(tiny_folder).replace(rollout=rollout)
    worker, kernels = opened(graph, "gen", channel, pin=PIN, kernel=Joining)
    writer, _ = opened(graph, "train", channel, pin=PIN)
    workers = InprocWorkers(worker)
    second, third = (replace(chunk(), id=id, keys=Keys.of([id])) for id in (8, 9))
    for each in (chunk(), second, publish(offered(writer, 3)), third):
        workers.tell(each)
    ends: list[m.Event] = []
    while (event := workers.next()) is not None:
        if isinstance(event, m.ChunkDone | m.Loaded):
            ends.append(event)
    asked = [each for each in kernels["rollout"].asked if each != "interrupt"]
    loaded = (3, ["a", "b"])
    if on_update == "interrupt":
        assert asked == [("join", 8), loaded, ("join", 9)]
    else:
        assert asked == [("join", 8), loaded]
        assert kinds(ends) == [m.ChunkDone, m.ChunkDone, m.Loaded, m.ChunkDone]


def test_a_module_is_loaded_once_for_all_of_its_nodes(tiny_folder: Path) -> None:
    readers = ("greedy_rollout", "rollout", "sampled_rollout")
    pin, channel = dict.fromkeys(readers, "gen") | PIN, InprocChannel()
    worker, kernels = opened(evaluated(tiny_folder), "gen", channel, pin=pin)
    writer, _ = opened(evaluated(tiny_folder), "train", channel, pin=pin)
    for version in (1, 2):
        offer = offered(writer, version)
        for reader in readers:
            (told,) = worker.execute(publish(offer, reader, version))
            assert told == m.Loaded(id=2, worker="gen")
    assert kernels["greedy_rollout"].asked == [(1, ["a", "b"]), (2, ["a", "b"])]
    assert kernels["rollout"].asked == kernels["sampled_rollout"].asked == [(1, []), (2, [])]


def test_kernels_build_columns_in_the_memory_of_the_workers_channel(
    tiny_folder: Path, tmp_path: Path
) -> None:
    def alone(peer: str) -> NoReturn:
        raise PeerLost(peer, "is not there")

    channel = ShmChannel("gen", 0, alone, directory=tmp_path)
    worker, kernels = opened(small(tiny_folder, max_lag=1), "gen", channel, pin=PIN)
    ids = kernels["rollout"].session.allocate(100, np.int32)
    ids[:] = np.arange(100)
    columns = {"completion_ids": Ragged(ids, np.array([0, 40, 100]))}
    batch = Batch.make(Keys.of(range(2)), columns, Rollout)
    ref = worker.rows.keep("rollout", batch)
    (fetched,) = channel.fetch([BlockRequest(worker="gen", block=ref.block)])
    assert fetched.column("completion_ids").values.buffers()[1].address == ids.ctypes.data
    assert fetched.equals(batch.records)
    worker.release([ref.block])
    worker.close()
    channel.close()


def gather(producer: str, column: str, worker: str, block: int, row: np.ndarray) -> Gather:
    """Rows of one block."""
    at = {"block": np.zeros(len(row), int), "row": row}
    return Gather(producer=producer, columns=(column,), refs=((worker, block),), **at)


def test_what_a_dead_peer_kept_cannot_be_fetched(tiny_folder: Path) -> None:
    worker, kernels = opened(small(tiny_folder, max_lag=1), "gen", PeersAreGone(), pin=PIN)
    inputs = {"prompt": (gather("prompts", "prompt", "data", 0, np.arange(3)),)}
    for task in (replace(chunk(), inputs=inputs), publish(OFFERED)):
        lost = m.FetchFailed(worker="gen", peer="data", id=task.id)
        assert list(worker.execute(task)) == [lost]
    assert kernels["rollout"].asked == []


def test_metrics_of_a_chunk_come_with_its_rows_and_not_of_those_that_are_made_again(
    tiny_folder: Path,
) -> None:
    worker, kernels = opened(small(tiny_folder), "gen", pin={"rollout": "gen"})
    session = kernels["rollout"].session
    events: list[Any] = []
    for event in worker.execute(chunk(2)):
        events.append(event)
        session.metric("rollout/seen", 1.0)
    assert kinds(events)[-2:] == [m.Reported, m.ChunkDone]
    assert (events[-2].id, events[-2].worker) == (7, "gen")
    session.reports()
    for event in worker.execute(replace(chunk(2), again=True)):
        session.metric("rollout/seen", 1.0)
        assert not isinstance(event, m.Reported)
    assert "rollout/seen" not in {name for name, _, _ in worker.reports()}


def train_step(name: str, task: int, **fields: Any) -> m.TrainStep:
    """Rows 1 and 4 of 6."""
    mine = np.array([1, 4])
    usual = {"node": "train_policy", "step": 2, "keys": Keys.of(mine), "inputs": {}}
    return m.TrainStep(id=task, worker=name, mine=mine, total=6, **usual | fields)


def trained(worker: Worker, *messages: m.TrainStep) -> None:
    """Tell a rank to train, and to go with the last message; what it says is asserted."""
    usual = {"node": "train_policy", "worker": worker.name}
    for message in messages:
        prepared = m.Prepared(id=message.id, **usual)
        assert list(worker.execute(message)) == [prepared]
    assert worker.kernels.by_node["train_policy"].asked == []
    go = m.Go(id=messages[-1].id, **usual)
    assert list(worker.execute(go)) == [m.Stepped(id=go.id, step=2, **usual)]


@pytest.mark.parametrize("name", ["main", "main-1"])
def test_a_rank_waits_for_go_and_forgets_what_was_told_before(tiny_folder: Path, name: str) -> None:
    worker, kernels = opened(small(tiny_folder), name, ranks={"train_policy": 2})
    kernel, first = kernels["train_policy"], name == "main"
    assert (kernel.session.rank, kernel.session.world) == (0 if first else 1, 2)
    trained(worker, train_step(name, 4), train_step(name, 5))
    (assignment,) = kernel.asked
    assert assignment.sequence == 5
    assert assignment.keys.position.tolist() == [1, 4]
    assert (assignment.mine.tolist(), assignment.total) == ([1, 4], 6)
    reported = {name for name, _, _ in worker.reports()}
    wanted = {"train/of_the_step", "train/of_the_session", "time/train_policy"}
    assert reported & wanted == (wanted if first else set()), "the first speaks for all"
    offer = offered(worker, 2)
    assert (offer.block >= 0, bool(offer.digest)) == (first, first)
    assert kernel.asked[-1] == "pieces", "every rank takes part to the end"


def rank_with_rows(folder: Path, name: str, rank: int, port: int) -> tuple[list[Any], float]:
    """The second of two ranks with the same rows: what its kernel is told, and broadcast bytes."""
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    cast = join(store, 0, rank, ("main", "main-1"), timeout=30.0)
    worker, kernels = opened(small(folder), name, cast=cast, tensor={"train_policy": 2})
    rows: tuple[Gather, ...] = ()
    if rank == 0:
        ids = Ragged(np.arange(9, dtype=np.int32), np.array([0, 2, 3, 9]))
        batch = Batch.make(Keys.of(range(3)), {"completion_ids": ids}, Rollout)
        block = worker.rows.keep("rollout", batch).block
        rows = (gather("rollout", "completion_ids", "main", block, np.array([1, 4]) % 3),)
    trained(worker, train_step(name, 4, giver="main", inputs={"rows": rows}))
    came = sum(value for metric, value, _ in worker.reports() if metric == "edge/broadcast/bytes")
    asked = kernels["train_policy"].asked
    worker.close()
    cast.close()
    return asked, came


def test_ranks_with_the_same_rows_are_given_them_after_go(tiny_folder: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(rank_with_rows, tiny_folder, name, rank, store.port)
            for rank, name in enumerate(("main", "main-1"))
        ]
        (first, none), (second, came) = (rank.result(60.0) for rank in ranks)
    for assignment in (*first, *second):
        assert assignment.keys.position.tolist() == [1, 4]
        assert assignment.inputs["rows"].records.column("completion_ids").to_pylist() == [[2], [2]]
    assert none == 0
    assert came == 2 * 4 + 3 * 8, "two tokens and the offsets of two rows"


def test_a_worker_gives_its_devices_back_and_takes_them_up(tiny_folder: Path) -> None:
    worker, kernels = opened(small(tiny_folder), "gen", pin={"rollout": "gen"})
    assert list(worker.execute(m.Sleep(worker="gen"))) == [m.Slept(worker="gen")]
    assert list(worker.execute(m.Wake(worker="gen"))) == [m.Woken(worker="gen")]
    assert kernels["rollout"].asked == ["sleep", "wake"]


# --- Steps that are trained part by part ----------------------------------------------------------


def train_part(worker: Worker, part: int, task: int, step: int = 2) -> m.TrainPart:
    """Two rows of this part."""
    keys = Keys.of([2 * part, 2 * part + 1])
    return m.TrainPart(
        id=task, node="train_policy", worker=worker.name, step=step, part=part, keys=keys, inputs={}
    )


def finish(worker: Worker, parts: int, task: int) -> m.FinishStep:
    return m.FinishStep(id=task, node="train_policy", worker=worker.name, step=2, parts=parts)


def usual_answer(worker: Worker, task: int) -> dict[str, Any]:
    return {"id": task, "node": "train_policy", "worker": worker.name}


def test_parts_are_trained_in_their_order_and_each_once(tiny_folder: Path) -> None:
    worker, kernels = opened(small(tiny_folder), "main")
    for task, part in enumerate([0, 1, 0, 1, 2]):
        trained_part = m.PartTrained(step=2, **usual_answer(worker, task))
        assert list(worker.execute(train_part(worker, part, task))) == [trained_part]
    assert not {"train/of_the_step"} & {name for name, _, _ in worker.reports()}
    stepped = m.Stepped(step=2, **usual_answer(worker, 9))
    assert list(worker.execute(finish(worker, 3, 9))) == [stepped]
    assert kernels["train_policy"].asked == ["forget", [0, 1], [2, 3], [4, 5], "finish"]
    reported = {name: value for name, value, _ in worker.reports()}
    assert reported["train/of_the_step"] == 2.0


@pytest.mark.parametrize(
    ("parts", "wrong", "found"),
    [
        ([0], ("part", 2), "expected 2 parts of step 2 .*found 1 of step 2"),
        ([0, 1], ("finish", 3), "expected 3 parts of step 2 .*found 2 of step 2"),
        ([], ("finish", 1), "expected 1 parts of step 2 .*found 0 of step 2"),
        ([0], ("other step", 1), "expected 1 parts of step 3 .*found 1 of step 2"),
    ],
    ids=str,
)
def test_a_part_that_is_left_out_is_an_error(
    tiny_folder: Path, parts: list[int], wrong: tuple[str, int], found: str
) -> None:
    worker, kernels = opened(small(tiny_folder), "main")
    for part in parts:
        list(worker.execute(train_part(worker, part, part)))
    before = len(kernels["train_policy"].asked)
    kind, number = wrong
    message = finish(worker, number, 9)
    if kind != "finish":
        message = train_part(worker, number, 9, step=2 if kind == "part" else 3)
    with pytest.raises(RunError, match=found):
        list(worker.execute(message))
    assert len(kernels["train_policy"].asked) == before


def test_a_step_at_once_ends_what_came_in_parts(tiny_folder: Path) -> None:
    worker, _ = opened(small(tiny_folder), "main")
    list(worker.execute(train_part(worker, 0, 1)))
    whole = m.TrainStep(step=2, keys=Keys.of([0]), inputs={}, **usual_answer(worker, 2))
    list(worker.execute(whole))
    with pytest.raises(RunError, match="found 0 of step 2"):
        list(worker.execute(train_part(worker, 1, 3)))


@pytest.mark.parametrize("split", ["rows", "weights", "matrices"])
def test_ranks_wait_for_each_other_where_they_compute_together(
    tiny_folder: Path, split: str
) -> None:
    """With whole weights only at the end of a Step."""
    options: dict[str, Any] = {"ranks": {"train_policy": 2}}
    if split == "matrices":
        options = {"tensor": {"train_policy": 2}}
    worker, kernels = opened(small(tiny_folder), "main-1", **options)
    if split == "weights":
        node = worker.kernels.nodes["train_policy"]
        layout = replace(node.layout, shard=True)
        worker.kernels.nodes["train_policy"] = replace(node, layout=layout)
    asked = kernels["train_policy"].asked
    prepared = m.Prepared(**usual_answer(worker, 1))
    trained_part = m.PartTrained(step=2, **usual_answer(worker, 1))
    answers = list(worker.execute(train_part(worker, 0, 1)))
    if split != "rows":
        assert (answers, asked) == ([prepared], [])
        answers = list(worker.execute(m.Go(**usual_answer(worker, 1))))
    assert (answers, asked) == ([trained_part], ["forget", [0, 1]])
    assert list(worker.execute(finish(worker, 1, 2))) == [m.Prepared(**usual_answer(worker, 2))]
    stepped = m.Stepped(step=2, **usual_answer(worker, 2))
    assert list(worker.execute(m.Go(**usual_answer(worker, 2)))) == [stepped]
    assert asked[-1] == "finish"
