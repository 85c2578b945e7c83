"""Chunks that join one that runs, in a Worker's process and in the loop's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Keys
from engine.channels.contract import BlockRequest, PeerLost
from engine.channels.inproc import InprocChannel
from engine.protocol import messages as m
from engine.protocol.refs import Ref
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.worker import Worker
from tests.kit import flowing_kernels, host_plans
from tests.kit.flowing_kernels import QueueingRows, RowsInParts
from tests.kit.supervisors import Start

pytestmark = pytest.mark.timeout(120)
Begin = Callable[..., Any]
HERE = "host"
"""The Worker that has both nodes."""


@contextmanager
def in_process(channel: InprocChannel | None = None, **how: Any) -> Iterator[InprocWorkers]:
    channel = InprocChannel() if channel is None else channel
    worker = Worker(HERE, flowing_kernels.plan(**how), channel=channel)
    with closing(InprocWorkers(worker)) as workers:
        list(workers.open())
        yield workers


@pytest.fixture(params=["in_process", "processes"])
def begin(request: pytest.FixtureRequest, start: Start) -> Begin:
    """Opens Workers of a plan of flowing_kernels.py."""
    if request.param == "in_process":
        return in_process
    return lambda **how: start(flowing_kernels.plan(**how))


def source_chunk(number: int, *positions: int, worker: str = HERE) -> m.RunChunk:
    keys = Keys.of(positions)
    return m.RunChunk(id=number, node="numbers", worker=worker, step=1, keys=keys)


def block_of(workers: Any, number: int, *positions: int, worker: str = HERE) -> Ref:
    """Have the source make these rows."""
    workers.tell(source_chunk(number, *positions, worker=worker))
    events = host_plans.until(workers, m.ChunkDone)
    assert events[-1].node == "numbers"
    return next(event.ref for event in events if isinstance(event, m.Produced))


def ends(events: list[Any]) -> list[int]:
    """The ids of the chunks that ended, in order."""
    return [event.id for event in events if isinstance(event, m.ChunkDone)]


def rows(events: list[Any]) -> dict[int, list[int]]:
    """By chunk, the positions of its rows, in the order in which they came."""
    positions: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, m.Produced) and event.node == "doubled":
            positions.setdefault(event.id, []).extend(event.ref.keys.position.tolist())
    return positions


def hear(workers: Any, chunks: int) -> list[Any]:
    """All events until so many chunks have ended."""
    events: list[Any] = []
    while len(ends(events)) < chunks:
        events += host_plans.until(workers, m.ChunkDone)
    return events


def test_a_chunk_joins_one_that_runs_and_ends_by_itself(begin: Begin) -> None:
    with begin() as workers:
        positions = ((1, 3, 6), (4, 5, 7), (9,), (0, 2))
        blocks = [block_of(workers, number, *each) for number, each in enumerate(positions)]
        workers.spans()
        chunks = [host_plans.chunk_of(11 + place, ref) for place, ref in enumerate(blocks)]
        workers.tell(chunks[0])
        (early,) = host_plans.until(workers, m.Produced)
        assert rows([early]) == {11: [1, 3]}, "three rows have come"
        workers.tell(chunks[1])
        events = hear(workers, 1)
        for each in chunks[2:]:
            workers.tell(each)
        events += hear(workers, 3)
        assert rows(events) == {11: [6], 12: [4, 5, 7], 13: [9], 14: [0, 2]}
        assert ends(events) == [11, 12, 13, 14]
        for number in ends(events):
            *_, last = (event for event in events if event.id == number)
            assert isinstance(last, m.ChunkDone), "nothing comes behind it"
        assert workers.next(0.1) is None
        assert not workers.busy
        spans = [span for span in workers.spans() if span.track == "host/doubled"]
    assert {span.task for span in spans if span.rows} == {11, 12, 13, 14}
    assert {span.task for span in spans if "joins" in span.what} == {12, 13, 14}
    assert all(one.end <= other.start for one, other in pairwise(spans))


def test_inputs_of_a_chunk_that_joins_are_fetched_beside_the_run(start: Start) -> None:
    with start(flowing_kernels.plan()) as supervisor:
        here, elsewhere = (
            block_of(supervisor, 1, 1, 4),
            block_of(supervisor, 2, 2, 3, worker="source"),
        )
        supervisor.tell(host_plans.chunk_of(11, here))
        host_plans.until(supervisor, m.Produced)
        supervisor.tell(host_plans.chunk_of(12, elsewhere))
        assert rows(hear(supervisor, 2)) == {11: [4], 12: [2, 3]}
        fetches = [span for span in supervisor.spans() if span.track == "host/fetches inputs"]
    assert [(span.name, span.what, span.beside) for span in fetches] == [
        ("fetch for doubled", "2 rows", True)
    ]


def test_a_chunk_that_was_told_before_the_run_began_joins_it(begin: Begin) -> None:
    with begin() as workers:
        first, second = block_of(workers, 1, 4), block_of(workers, 2, 3, 2, 1)
        workers.tell(source_chunk(3, 10))
        workers.tell(host_plans.chunk_of(11, first))
        workers.tell(host_plans.chunk_of(12, second))
        assert sorted(ends(hear(workers, 3))) == [3, 11, 12]


def test_a_run_in_parts_is_asked_for_its_watermark_with_each_heartbeat(start: Start) -> None:
    with start(flowing_kernels.plan(kernel=RowsInParts, lag=0, part_tokens=1)) as supervisor:
        block = block_of(supervisor, 1, 4, 2)
        supervisor.tell(host_plans.chunk_of(11, block))
        made = [event for event in hear(supervisor, 1) if isinstance(event, m.Produced)]
    positions = [(event.watermark, event.ref.keys.position.tolist()) for event in made]
    assert positions == [(3, []), (7, []), (0, [4, 2])]


@pytest.mark.parametrize("how", [{"kernel": QueueingRows}, {"lag": 0}])
def test_without_a_lag_or_the_ability_chunks_queue(begin: Begin, how: dict[str, Any]) -> None:
    with begin(**how) as workers:
        first, second = block_of(workers, 1, 0, 2), block_of(workers, 2, 1)
        workers.tell(host_plans.chunk_of(11, first))
        workers.tell(host_plans.chunk_of(12, second))
        events = hear(workers, 2)
        assert ends(events) == [11, 12]
        if isinstance(workers, InprocWorkers):
            refs = [event.ref for event in events if isinstance(event, m.Produced)]
            batches = [workers._worker.rows.of("doubled", ref) for ref in refs]
            rewards = [batch.array("reward").to_pylist() for batch in batches]
            assert rewards == [[1.0, 1.0], [2.0]], "a run of each"


def test_nothing_starves_behind_a_run_that_goes_on(begin: Begin) -> None:
    with begin() as workers:
        workers.tell(host_plans.chunk_of(11, block_of(workers, 1, 1, 4)))
        host_plans.until(workers, m.Produced)
        block = block_of(workers, 2, 2, 3)  # the same Worker makes it, meanwhile
        workers.tell(m.Record(id=5, worker=HERE, step=1, keys={}, inputs={}))
        assert host_plans.until(workers, m.Recorded) == [m.Recorded(id=5)]
        workers.tell(host_plans.chunk_of(12, block))
        events = hear(workers, 2)
        assert rows(events) == {11: [4], 12: [2, 3]}


def test_what_has_to_wait_for_the_end_of_a_run_lets_no_chunk_pass(begin: Begin) -> None:
    with begin() as workers:
        first, second = block_of(workers, 1, 1, 3), block_of(workers, 2, 0)
        third = block_of(workers, 3, 1)
        workers.tell(host_plans.chunk_of(11, first))
        host_plans.until(workers, m.Produced)
        workers.tell(host_plans.chunk_of(12, second))
        workers.tell(m.Sleep(worker=HERE))
        workers.tell(host_plans.chunk_of(13, third))
        kinds = [(type(event), getattr(event, "id", 0)) for event in hear(workers, 3)]
        last = [(m.Slept, 0), (m.Produced, 13), (m.ChunkDone, 13)]
        assert kinds[-3:] == last, "it is a run of its own"


def test_a_row_that_is_given_up_counts_for_its_chunk(begin: Begin) -> None:
    with begin() as workers:
        first, second = block_of(workers, 1, 1, 6), block_of(workers, 2, 60, 50)
        third = block_of(workers, 3, 3, 70)
        workers.tell(host_plans.chunk_of(11, first))
        host_plans.until(workers, m.Produced)
        workers.tell(host_plans.chunk_of(12, second))
        lost = hear(workers, 1)
        assert [event.key[0] for event in lost[:-1]] == [60, 50]
        assert {(type(event), event.id) for event in lost[:-1]} == {(m.Tombstoned, 12)}
        assert ends(lost) == [12]
        workers.tell(host_plans.chunk_of(13, third))
        events = hear(workers, 2)
        assert rows(events) == {11: [6], 13: [3]}


class WithoutAPeer(InprocChannel):
    """Whatever another Worker keeps is gone."""

    def fetch(self, requests: Sequence[BlockRequest]) -> list[pa.RecordBatch]:
        for request in requests:
            if request.worker != HERE:
                raise PeerLost(request.worker, "its process is gone")
        return super().fetch(requests)


def test_a_chunk_whose_rows_are_gone_fails_alone(start: Start) -> None:
    with start(flowing_kernels.plan()) as supervisor:
        lost = block_of(supervisor, 1, 7, worker="source")
        require_that_it_fails_alone(supervisor, lost, supervisor)


def test_a_chunk_whose_rows_are_gone_fails_alone_in_one_process() -> None:
    with in_process(WithoutAPeer()) as workers:
        ref = block_of(workers, 1, 7)
        lost = Ref(
            worker="source",
            block=ref.block,
            keys=ref.keys,
            lengths=ref.lengths,
            version=ref.version,
        )
        require_that_it_fails_alone(workers, lost, None)


def require_that_it_fails_alone(workers: Any, lost: Ref, supervisor: Any) -> None:
    first, second = block_of(workers, 2, 1, 4), block_of(workers, 3, 2, 3)
    workers.tell(host_plans.chunk_of(11, first))
    host_plans.until(workers, m.Produced)
    if supervisor is not None:
        os.kill(supervisor.pids()["source"], signal.SIGKILL)
        host_plans.until(workers, m.WorkerLost)
    workers.tell(host_plans.chunk_of(12, lost))
    failed = host_plans.until(workers, m.FetchFailed)
    assert failed == [m.FetchFailed(id=12, worker=HERE, peer="source")]
    workers.tell(host_plans.chunk_of(13, second))
    assert rows(hear(workers, 2)) == {11: [4], 13: [2, 3]}


def test_a_run_that_is_given_up_leaves_the_worker_as_it_was() -> None:
    with in_process() as workers:
        first, second = block_of(workers, 1, 9), block_of(workers, 2, 1)
        workers.tell(host_plans.chunk_of(11, first))
        workers.tell(source_chunk(3, 5))
        *_, within = host_plans.until(workers, m.Produced)
        assert within.node == "numbers"
        running, workers._under_way = workers._under_way, None
        assert running is not None
        running.close()
        workers.tell(host_plans.chunk_of(12, second))
        assert rows(hear(workers, 1)) == {12: [1]}
