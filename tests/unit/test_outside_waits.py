"""What a kernel waits for outside of the run: how it is reported, folded, shown and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.errors import KernelError
from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.fold import FlowFold
from engine.keep.flow.outside import OutsideSeconds
from engine.keep.flow.records import Flow, ReplicaFlow, WorkerFlow
from engine.keep.flow.segments import read_live, read_steps
from engine.keep.flow.writer import FlowWriter
from engine.keep.metrics.step_accounts import StepAccounts
from engine.keep.reader.open_folder import FileMark
from engine.keep.trace.timeline import Trace, read_trace
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, Opened, WorkersMeasured
from engine.protocol.reports import Doing, Report, SpanOf
from engine.run.worker.kernel_session import NodeSession
from engine.run.worker.outside_waits import OutsideWaits
from engine.run.worker.timing import Timing
from engine.watch.critical_path import critical_path
from engine.watch.lanes import lane_part
from engine.watch.waits import sentences
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed


class SetClock:
    """One that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def session_of(
    clock: SetClock, *, counted: bool = True
) -> tuple[NodeSession, OutsideWaits, Timing]:
    timing = Timing("gen")
    waits = OutsideWaits(timing, clock)
    node_waits = waits.of_node("rollout", counted=counted)
    return NodeSession("rollout", 0, {}, {}, waits=node_waits), waits, timing


def test_a_wait_is_reported_while_it_lasts_and_each_second_once() -> None:
    clock = SetClock()
    session, waits, timing = session_of(clock)
    with session.waiting("environments"):
        clock.now = 12.0
        assert waits.reports() == [("flow/outside/rollout@gen/environments", 2.0, 1.0)]
        assert (timing.doing.waits_for, timing.doing.waits_since) == ("environments", 10.0)
        clock.now = 13.0
    assert timing.doing.waits_for == ""
    assert waits.reports() == [("flow/outside/rollout@gen/environments", 1.0, 1.0)]
    assert waits.reports() == []
    assert timing.reports() == [("time/rollout/environments", 3.0, 1.0)]


def test_rows_in_flight_are_reported_where_they_changed() -> None:
    session, waits, _ = session_of(SetClock())
    session.flight(8)
    session.flight(5)
    assert waits.reports() == [("flow/in_flight/rollout@gen", 5.0, 1.0)]
    assert waits.reports() == []


def test_a_rank_that_does_not_count_has_no_metric_of_its_waits() -> None:
    clock = SetClock()
    session, waits, timing = session_of(clock, counted=False)
    with session.waiting("environments"):
        clock.now += 1.0
    assert timing.reports() == []
    assert len(waits.reports()) == 1


@pytest.mark.parametrize("reason", ["", "a/b", "two words"])
def test_a_reason_is_one_word(reason: str) -> None:
    session, *_ = session_of(SetClock())
    with pytest.raises(KernelError, match="rollout: waiting: expected a name and no other wait"):
        session.waiting(reason).__enter__()


def test_a_wait_within_a_wait_is_refused_and_the_first_goes_on() -> None:
    clock = SetClock()
    session, waits, _ = session_of(clock)
    with session.waiting("environments"):
        with pytest.raises(KernelError, match="'judge' and 'rollout@gen/environments'"):
            session.waiting("judge").__enter__()
        clock.now += 2.0
    assert waits.reports() == [("flow/outside/rollout@gen/environments", 2.0, 1.0)]


def test_a_wait_that_raises_is_counted() -> None:
    clock = SetClock()
    session, waits, timing = session_of(clock)

    def wait() -> None:
        with session.waiting("environments"):
            clock.now += 2.0
            raise TimeoutError

    with pytest.raises(TimeoutError):
        wait()
    assert [seconds for _, seconds, _ in waits.reports()] == [2.0]
    assert timing.doing.waits_for == ""


def test_a_session_without_a_worker_takes_waits() -> None:
    session = NodeSession("rollout", 0, {}, {})
    with session.waiting("environments"):
        session.flight(1)
    assert session.reports() == []


# --- folded ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=20))
def test_a_stretch_has_at_most_its_busy_seconds_and_the_rest_comes_later(
    stretches: list[tuple[float, float]],
) -> None:
    seconds = OutsideSeconds()
    taken = 0.0
    for reported, busy in stretches:
        seconds.add("rollout@gen/environments", reported)
        of_stretch = sum(seconds.take("rollout@gen", busy).values())
        assert of_stretch <= busy + 1e-9
        taken += of_stretch
    taken += sum(seconds.take("rollout@gen", 1e3).values())
    assert taken == pytest.approx(sum(reported for reported, _ in stretches))


def told_of_a_long_chunk(folder: Path) -> tuple[Flow, list[Flow]]:
    """A Step of which rollout takes 9 seconds, in 6 of which it waits for environments, and the
    seconds that were told meanwhile, as in a run of one process.
    """
    fold = FlowFold(placed(grpo_graph(batch=4, n=4)), FlowWriter(folder, after=0), dict)
    fold.take(Opened(at=0.0))
    chunk = m.RunChunk(id=1, worker="main", node="rollout", step=1, keys=Keys.of([0]))
    fold.take(InstructionTold(at=0.0, instruction=chunk))
    waits = Doing(worker="main", node="rollout", waits_for="environments", waits_since=1.0)
    fold.meanwhile(1.0, [waits])  # which only sees that something has come
    for second in range(2, 7):
        reports: list[Report] = [
            ("flow/outside/rollout@main/environments", 1.0, 1.0),
            ("flow/in_flight/rollout@main", 9.0 - second, 1.0),
        ]
        fold.meanwhile(float(second), [waits], lambda reports=reports: reports)
    seconds = read_live(folder)
    last: Report = ("flow/outside/rollout@main/environments", 1.0, 1.0)
    fold.take(WorkersMeasured(at=9.0, reports=[last], spans=[], doing=[]))
    fold.take(EventHeard(at=9.0, event=m.ChunkDone(id=1, node="rollout"), worker="main"))
    fold.take(InstructionTold(at=9.0, instruction=m.StepClosed(step=1, metrics={})))
    fold.fold()
    (step,) = (record for record in read_steps(folder) if isinstance(record, Flow))
    return step, seconds


def test_a_node_that_waits_outside_is_not_busy_meanwhile(tmp_path: Path) -> None:
    step, seconds = told_of_a_long_chunk(tmp_path)
    replica = step.nodes["rollout@main"]
    assert (replica.busy, replica.for_outside) == (3.0, 6.0)
    assert replica.outside == {"environments": 6.0}
    newest = seconds[-1]
    assert newest.nodes["rollout@main"].for_outside == 1.0
    assert newest.nodes["rollout@main"].in_flight == 3
    worker = newest.workers["main"]
    assert (worker.waits_for, worker.doing_for) == ("environments", 5.0)


def test_the_wait_is_told_and_bounds_the_run(tmp_path: Path) -> None:
    step, _ = told_of_a_long_chunk(tmp_path)
    plan = json.loads(placed(grpo_graph(batch=4, n=4)).to_json())
    wait_sentences = sentences(step, plan)
    assert "rollout waits 67 % for environments" in wait_sentences
    assert wait_sentences[0] == "train_policy waits 100 % for rollout"
    assert critical_path(step, ["train_policy"]) == ["rollout", "train_policy"]


def test_a_long_wait_is_told_while_it_lasts() -> None:
    worker = WorkerFlow(doing="rollout", waits_for="environments", doing_for=40.0)
    flow = Flow(step=1, start=0.0, end=1.0, wall=1.0, workers={"gen": worker})
    plan = {"nodes": [{"name": "rollout", "work": "decode"}]}
    assert sentences(flow, plan, live=True) == ["rollout has waited for environments for 40 s"]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_sums_and_lanes_keep_each_second(parts: list[tuple[float, float]]) -> None:
    flows: list[Flow] = []
    for step, (busy, outside) in enumerate(parts, start=1):
        waited = {"environments": outside}
        replica = ReplicaFlow(busy=busy, for_outside=outside, outside=waited, in_flight=step)
        nodes = {"rollout@gen": replica}
        flows.append(Flow(step=step, start=0.0, end=busy + outside, wall=float(step), nodes=nodes))
    whole = sum_flows(flows).nodes["rollout@gen"]
    assert whole.for_outside == pytest.approx(sum(outside for _, outside in parts))
    assert whole.outside["environments"] == pytest.approx(whole.for_outside)
    assert whole.in_flight == len(parts)
    lane = lane_part(FileMark(inode=0, size=0, mtime=0), flows).seconds["gen"]
    assert lane["rollout"].sum() == pytest.approx(whole.busy, abs=1e-5)
    assert lane["/waits"].sum() == pytest.approx(whole.for_outside, abs=1e-5)


# --- metrics and the trace ------------------------------------------------------------------------


def test_a_wait_is_a_part_of_its_nodes_time() -> None:
    steps = StepAccounts(("main",))
    steps.begin(0.0)
    reports = [("time/rollout", 3.0, 1.0), ("time/rollout/environments", 1.0, 1.0)]
    spans = [
        SpanOf(track="main/rollout", name="waits", start=1.0, end=2.0, computes=False, waits=True),
        SpanOf(track="main/rollout", name="rollout", start=0.0, end=3.0),
    ]
    steps.add([*reports, ("time/rollout/environments", 0.5, 1.0)], spans)
    row = steps.close(m.StepClosed(step=1, metrics={}), 4.0, [], again=False)
    assert row["time/rollout/environments"] == 1.5
    assert row["time/engine"] == 1.0


def test_a_wait_is_in_no_workers_busy_time_twice() -> None:
    steps = StepAccounts(("gen", "train"))
    steps.begin(0.0)
    wait = SpanOf(track="gen/rollout", name="waits", start=0.0, end=2.0, waits=True)
    steps.add([], [wait, SpanOf(track="gen/rollout", name="rollout", start=0.0, end=2.0)])
    row = steps.close(m.StepClosed(step=1, metrics={}), 4.0, [], again=False)
    assert row["worker/gen/busy"] == 0.5


def test_a_wait_is_a_span_within_the_chunks(tmp_path: Path) -> None:
    clock = SetClock()
    session, _, timing = session_of(clock)
    spans: list[SpanOf] = []
    timing.span = spans.append
    for seconds in (0.0001, 2.0):
        with session.waiting("environments"):
            clock.now += seconds
    trace = Trace(tmp_path / "trace.json")
    trace.take(WorkersMeasured(at=13.0, reports=[], spans=spans, doing=[]))
    trace.close()
    named = [event for event in read_trace(tmp_path / "trace.json") if event.get("ph") == "X"]
    assert [(event["name"], event["dur"]) for event in named] == [("waits for environments", 2e6)]
