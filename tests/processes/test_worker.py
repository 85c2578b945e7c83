"""One Worker with kernels that only write down what was asked of them: weights, ranks, losses,
turns on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
from run_graphs import evaluated, small
from torch._C._distributed_c10d import TCPStore

from dataflow.batch import Batch, Keys, Ragged
from dataflow.graph import Graph
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Piece, Session
from dataflow.model import Model
from dataflow.schema import Rollout
from engine.api import plan
from engine.channels.contract import BlockRequest, Channel, PeerLost
from engine.channels.inproc import InprocChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.tensors.row_broadcast import RowBroadcast, join
from engine.coordinator.messages import (
    ChunkDone,
    Event,
    FetchFailed,
    Go,
    Load,
    Loaded,
    Offer,
    Offered,
    Prepared,
    Produced,
    Reported,
    RunChunk,
    Sleep,
    Slept,
    Stepped,
    TrainStep,
    Wake,
    Woken,
)
from engine.coordinator.refs import Gather
from engine.options import RunOptions
from engine.worker.worker import Worker
from operators.data import prompts
from operators.generate import generate

WEIGHTS = [Piece("a", np.arange(3)), Piece("b", np.ones((2, 2)))]


class Scripted:
    """Answers everything, and remembers it in `asked`."""

    rows = 10

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self.session = session
        self.asked: list[Any] = []

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Each row alone, in a batch of its own; between them one without rows."""
        for row in range(len(chunk.keys)):
            keys = chunk.keys.take(np.array([row]))
            yield Batch.make(
                keys, {"completion_ids": pa.array([[row]], pa.large_list(pa.int32()))}, Rollout
            )
            yield Batch.make(Keys.of([]), {}, Rollout)

    def interrupt(self) -> None:
        self.asked.append("interrupt")

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        self.asked.append((version, [piece.name for piece in pieces]))

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        self.asked.append(assignment)
        self.session.metric("train/of_the_session", 1.0)
        return {"train/of_the_step": 1.0}

    def pieces(self) -> Iterator[Piece]:
        import torch

        for piece in WEIGHTS:
            yield Piece(piece.name, torch.from_numpy(piece.data))
        self.asked.append("pieces")

    def sleep(self) -> None:
        self.asked.append("sleep")

    def wake(self) -> None:
        self.asked.append("wake")

    def close(self) -> None:
        pass


class Gone(InprocChannel):
    """Of a Worker whose peers have died."""

    def fetch(self, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
        raise PeerLost("data", "its process is gone")


def opened(
    graph: Graph,
    name: str,
    channel: Channel | None = None,
    cast: RowBroadcast | None = None,
    **options: Any,
) -> tuple[Worker, Any]:
    """The Worker of this name, and its kernels by node."""
    made = plan(graph, RunOptions(threads=1, **options))
    nodes = tuple(replace(n, kernel=f"{__name__}:Scripted") for n in made.nodes)
    channel = InprocChannel() if channel is None else channel
    worker = Worker(name, replace(made, nodes=nodes), channel=channel, cast=cast)
    list(worker.open())
    return worker, worker._kernels


def chunk(node: str, worker: str, count: int = 3) -> RunChunk:
    return RunChunk(id=7, node=node, worker=worker, step=0, keys=Keys.of(range(count)), inputs={})


def offered(worker: Worker, kernel: str, version: int) -> Offered:
    told = next(
        worker.execute(
            Offer(id=1, model="policy", writer=kernel, worker=worker.name, version=version)
        )
    )
    assert isinstance(told, Offered)
    return told


def publish(offer: Offered, reader: str, worker: str, source: str) -> Load:
    return Load(
        id=2, model="policy", writer="train_policy", reader=reader, version=offer.version,
        worker=worker, source=source, block=offer.block, digest=offer.digest,
    )  # fmt: skip


@pytest.fixture
def lagging(tiny: Path) -> tuple[Worker, Any, Offered]:
    """A Worker that generates and one that trains, in one channel; the latter's version 3."""
    channel, pins = InprocChannel(), {"rollout": "gen", "train_policy": "train"}
    worker, kernels = opened(small(tiny, max_lag=1), "gen", channel, pin=pins)
    writer, _ = opened(small(tiny, max_lag=1), "train", channel, pin=pins)
    return worker, kernels, offered(writer, "train_policy", 3)


def kinds(events: Iterable[Event]) -> list[type]:
    return [type(event) for event in events]


def test_new_weights_come_between_two_rows_of_a_running_chunk(
    lagging: tuple[Worker, Any, Offered],
) -> None:
    worker, kernels, offer = lagging
    message = publish(offer, "rollout", "gen", "train")
    assert not worker.interrupt_with(message), "nothing runs"
    events = worker.execute(chunk("rollout", "gen"))
    assert isinstance(next(events), Produced)
    assert not worker.interrupt_with(replace(message, reader="reference")), (
        "another node does not run"
    )
    assert worker.interrupt_with(message)
    assert isinstance(next(events), Loaded)
    assert kernels["rollout"].asked == ["interrupt", (3, ["a", "b"])]
    assert kinds(events) == [Produced, Produced, ChunkDone]
    assert not worker.interrupt_with(message)


def test_weights_that_come_at_the_end_of_a_chunk_are_not_forgotten(
    lagging: tuple[Worker, Any, Offered],
) -> None:
    worker, kernels, offer = lagging
    events = worker.execute(chunk("rollout", "gen", 1))
    assert kinds([next(events), next(events)]) == [Produced, ChunkDone]
    assert worker.interrupt_with(publish(offer, "rollout", "gen", "train"))
    assert kinds(events) == [Loaded]
    assert kernels["rollout"].asked[-1] == (3, ["a", "b"])


def rolled_out(folder: Path, **how: Any) -> Graph:
    policy = Model("policy", str(folder / "model"), trainable=True)
    asked = prompts(str(folder / "train.parquet"), batch=4)
    return small(folder).replace(
        rollout=generate(policy, asked, n=4, max_tokens=6, name="rollout", **how)
    )


@pytest.mark.parametrize("how", [{"max_lag": 0}, {"max_lag": 1, "on_update": "drain"}])
def test_at_lag_0_and_where_rows_are_drained_nothing_is_interrupted(
    tiny: Path, how: dict[str, Any]
) -> None:
    worker, _ = opened(rolled_out(tiny, **how), "gen", pin={"rollout": "gen"})
    events = worker.execute(chunk("rollout", "gen"))
    next(events)
    offer = Offered(id=1, model="policy", version=3, worker="train", block=0, digest="")
    assert not worker.interrupt_with(publish(offer, "rollout", "gen", "train"))


def test_a_module_is_loaded_once_for_all_of_its_nodes(tiny: Path) -> None:
    pins = {
        "rollout": "gen",
        "greedy_rollout": "gen",
        "sampled_rollout": "gen",
        "train_policy": "train",
    }
    channel = InprocChannel()
    worker, kernels = opened(evaluated(tiny), "gen", channel, pin=pins)
    writer, _ = opened(evaluated(tiny), "train", channel, pin=pins)
    for version in (1, 2):
        offer = offered(writer, "train_policy", version)
        for reader in ("greedy_rollout", "rollout", "sampled_rollout"):
            (told,) = worker.execute(publish(offer, reader, "gen", "train"))
            assert told == Loaded(id=2, node=reader, model="policy", version=version, worker="gen")
    assert kernels["greedy_rollout"].asked == [(1, ["a", "b"]), (2, ["a", "b"])]
    assert kernels["rollout"].asked == kernels["sampled_rollout"].asked == [(1, []), (2, [])]


def test_kernels_build_columns_in_the_memory_of_the_workers_channel(
    tiny: Path, tmp_path: Path
) -> None:
    def alone(peer: str) -> NoReturn:
        raise PeerLost(peer, "is not there")

    channel = ShmChannel("gen", 0, alone, directory=tmp_path)
    worker, kernels = opened(
        small(tiny, max_lag=1), "gen", channel, pin={"rollout": "gen", "train_policy": "train"}
    )
    ids = kernels["rollout"].session.allocate(100, np.int32)
    ids[:] = np.arange(100)
    made = Batch.make(
        Keys.of(range(2)), {"completion_ids": Ragged(ids, np.array([0, 40, 100]))}, Rollout
    )
    ref = worker.keep("rollout", made)
    (found,) = channel.fetch([BlockRequest(worker="gen", block=ref.block)])
    assert found.column("completion_ids").values.buffers()[1].address == ids.ctypes.data
    assert found.equals(made.records)
    worker.release([ref.block])
    worker.close()
    channel.close()


def test_what_a_dead_peer_kept_is_unfetched(tiny: Path) -> None:
    pins = {"rollout": "gen", "train_policy": "train"}
    worker, kernels = opened(small(tiny, max_lag=1), "gen", Gone(), pin=pins)
    gather = Gather(
        producer="prompts",
        columns=("prompt",),
        refs=(("data", 0),),
        block=np.zeros(3, int),
        row=np.arange(3),
    )
    told = list(worker.execute(replace(chunk("rollout", "gen"), inputs={"prompt": (gather,)})))
    assert told == [FetchFailed(worker="gen", peer="data", id=7)]
    offer = Offered(id=1, model="policy", version=3, worker="train", block=0, digest="")
    assert list(worker.execute(publish(offer, "rollout", "gen", "train"))) == [
        FetchFailed(id=2, worker="gen", peer="data")
    ]
    assert kernels["rollout"].asked == []


def test_metrics_of_a_chunk_come_with_its_rows_and_not_of_those_that_are_made_again(
    tiny: Path,
) -> None:
    worker, kernels = opened(small(tiny), "gen", pin={"rollout": "gen"})
    session = kernels["rollout"].session
    events: list[Any] = []
    for number, event in enumerate(worker.execute(chunk("rollout", "gen", 2))):
        events.append(event)
        session.metric("rollout/seen", float(number))
    told = [event for event in events if isinstance(event, Reported)]
    assert {(each.id, each.worker) for each in told} == {(7, "gen")}
    assert [type(each) for each in events][-2:] == [Reported, ChunkDone]
    session.reports()
    for _ in worker.execute(replace(chunk("rollout", "gen", 2), again=True)):
        session.metric("rollout/seen", 1.0)
        assert not isinstance(_, Reported)
    assert "rollout/seen" not in {name for name, _, _ in worker.reports()}


@pytest.mark.parametrize("name,rank", [("main", 0), ("main-1", 1)])
def test_a_rank_waits_for_go_and_forgets_what_was_told_before(
    tiny: Path, name: str, rank: int
) -> None:
    worker, kernels = opened(small(tiny), name, ranks={"train_policy": 2})
    assert (kernels["train_policy"].session.rank, kernels["train_policy"].session.world) == (
        rank,
        2,
    )
    for task in (4, 5):
        message = TrainStep(
            id=task, node="train_policy", worker=name, step=2, keys=Keys.of(range(6)), inputs={},
            mine=np.array([1, 4]),
        )  # fmt: skip
        assert list(worker.execute(message)) == [
            Prepared(node="train_policy", worker=name, id=task)
        ]
    assert kernels["train_policy"].asked == []
    told = list(worker.execute(Go(node="train_policy", worker=name, id=5)))
    assert told == [Stepped(id=5, node="train_policy", step=2, worker=name)]
    (assignment,) = kernels["train_policy"].asked
    assert assignment.sequence == 5
    assert assignment.keys.position.tolist() == [1, 4]
    assert assignment.whole.position.tolist() == list(range(6))
    reported = {name for name, _, _ in worker.reports()}
    wanted = {"train/of_the_step", "train/of_the_session", "time/train_policy"}
    assert wanted <= reported if rank == 0 else not wanted & reported, "the first speaks for all"
    offer = offered(worker, "train_policy", 2)
    assert (offer.block >= 0, bool(offer.digest)) == (rank == 0, rank == 0)
    assert kernels["train_policy"].asked[-1] == "pieces", "every rank takes part to the end"


def rank_with_rows(folder: Path, name: str, rank: int, port: int) -> tuple[Any, list[Any], float]:
    """One of two ranks with the same rows, of which the first fetches them: what it says, and is
    said to its kernel.
    """
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    cast = join(store, rank, 2, ("main", "main-1"), timeout=30.0)
    worker, kernels = opened(small(folder), name, cast=cast, tensor={"train_policy": 2})
    mine = np.array([1, 4])
    ids = Ragged(np.arange(9, dtype=np.int32), np.array([0, 2, 3, 9]))
    block = worker.keep(
        "rollout", Batch.make(Keys.of(range(3)), {"completion_ids": ids}, Rollout)
    ).block
    gather = Gather(
        producer="rollout",
        columns=("completion_ids",),
        refs=(("main", block),),
        block=np.zeros(2, int),
        row=mine % 3,
    )
    message = TrainStep(
        id=4, node="train_policy", worker=name, step=2, keys=Keys.of(range(6)), mine=mine, giver="main",
        inputs={"rows": (gather,) if rank == 0 else ()},
    )  # fmt: skip
    assert list(worker.execute(message)) == [Prepared(node="train_policy", worker=name, id=4)]
    told = list(worker.execute(Go(node="train_policy", worker=name, id=4)))
    came = sum(value for metric, value, _ in worker.reports() if metric == "edge/broadcast/bytes")
    asked = kernels["train_policy"].asked
    worker.close()
    cast.close()
    return told, asked, came


def test_ranks_with_the_same_rows_are_given_them_after_go(tiny: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(rank_with_rows, tiny, name, rank, store.port)
            for rank, name in enumerate(("main", "main-1"))
        ]
        (told, first, none), (told_too, second, came) = (rank.result(60.0) for rank in ranks)
    assert told == [Stepped(id=4, node="train_policy", step=2, worker="main")]
    assert told_too == [Stepped(id=4, node="train_policy", step=2, worker="main-1")]
    for assignment in (*first, *second):
        assert assignment.keys.position.tolist() == [1, 4]
        assert assignment.inputs["rows"].records.column("completion_ids").to_pylist() == [[2], [2]]
    assert none == 0
    assert came == 2 * 4 + 3 * 8, "two tokens and the offsets of two rows"


def test_a_worker_gives_its_devices_back_and_takes_them_up(tiny: Path) -> None:
    worker, kernels = opened(small(tiny), "gen", pin={"rollout": "gen"})
    assert list(worker.execute(Sleep(worker="gen"))) == [Slept(worker="gen")]
    assert list(worker.execute(Wake(worker="gen"))) == [Woken(worker="gen")]
    assert kernels["rollout"].asked == ["sleep", "wake"]
