"""The records of what flows: their files, sums, and the sentences that name who waits for whom."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.coordinator.run_settings import Settings
from engine.keep.flow import segments
from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.fold import FlowFold
from engine.keep.flow.records import (
    Began,
    CutFlow,
    EdgeFlow,
    Flow,
    Lost,
    Record,
    ReplicaFlow,
    WorkerFlow,
)
from engine.keep.flow.segments import LiveSegments, StepSegments, read_live, read_steps
from engine.keep.flow.writer import FlowWriter
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, Opened, RunEvent, WritingBegan
from engine.protocol.reports import Doing
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.simulation import Simulation
from engine.watch.waits import sentences
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed


def flow(step: int, **fields: Any) -> Flow:
    return Flow(step=step, start=float(step - 1), end=float(step), wall=float(step), **fields)


RECORDS = st.lists(
    st.sampled_from(
        [
            lambda step: flow(step, nodes={"a@w": ReplicaFlow(busy=1.0, blames={"b": 0.5})}),
            lambda step: flow(step, edges={"a->b": EdgeFlow(rows=step)}, workers={}),
            lambda step: Lost(step=step, wall=1.0, worker="w", error="x"),
            lambda step: Began(step=step, wall=2.0),
        ]
    ),
    max_size=30,
).map(lambda makes: [make(step) for step, make in enumerate(makes, start=1)])


def written(folder: Path, records: list[Record]) -> None:
    file = StepSegments(folder)
    for record in records:
        file.write(record)
    file.close()


@given(records=RECORDS, data=st.data())
def test_a_torn_tail_is_dropped(
    records: list[Record], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    written(folder, records)
    whole = [path.read_bytes() for path in segments.step_segments(folder)]
    for path, text in zip(segments.step_segments(folder), whole, strict=True):
        cut = data.draw(st.integers(0, len(text)))
        path.write_bytes(text[:cut])
    found = list(read_steps(folder))
    assert found == records[: len(found)]
    written(folder, [flow(99)])
    assert list(read_steps(folder)) == [*found, flow(99)]


@given(records=RECORDS, step=st.integers(0, 31))
def test_a_resume_drops_what_comes_again(
    records: list[Record], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    written(folder, records)
    file = StepSegments(folder)
    file.truncate_after(step)
    file.write(flow(step + 1))
    file.close()
    kept = [record for record in records if record.step <= step]
    assert list(read_steps(folder)) == [*kept, flow(step + 1)]


@given(flip=st.integers(min_value=0))
def test_a_changed_byte_ends_a_segment(flip: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("events")
    records = [flow(step) for step in range(1, 6)]
    written(folder, records)
    (path,) = segments.step_segments(folder)
    text = bytearray(path.read_bytes())
    text[flip % len(text)] ^= 0x40
    path.write_bytes(text)
    found = list(read_steps(folder))
    assert found == records[: len(found)] != records


def test_segments_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_LARGEST", 200)
    records = [flow(step) for step in range(1, 40)]
    written(tmp_path, records[:20])
    written(tmp_path, records[20:])
    assert len(segments.step_segments(tmp_path)) > 3
    assert list(read_steps(tmp_path)) == records
    file = StepSegments(tmp_path)
    file.truncate_after(7)
    file.close()
    assert list(read_steps(tmp_path)) == records[:7]


def test_the_last_minute_is_kept(tmp_path: Path) -> None:
    live = LiveSegments(tmp_path)
    for second in range(1, 400):
        live.write(flow(second))
    live.close()
    found = [each.step for each in read_live(tmp_path)]
    assert found == list(range(found[0], 400))
    assert 60 <= len(found) <= 120


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    aim = tmp_path / "aim"
    aim.write_bytes(b"precious")
    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "steps-000001.seg").symlink_to(aim)
    with pytest.raises(RunError, match="found a link to"):
        StepSegments(folder)
    assert aim.read_bytes() == b"precious"


def test_a_disk_that_fails_ends_the_records_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    writer = FlowWriter(tmp_path / "events", after=0)
    writer.step(flow(1))
    writer.second(flow(1))
    writer.close()
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "The run goes on without events." in told[0]


def test_several_stretches_are_one() -> None:
    first = flow(
        1,
        nodes={"a@w": ReplicaFlow(busy=0.5, for_rows=0.5, blames={"b": 0.5}, rows=3, version=0)},
        edges={"a->b": EdgeFlow(rows=3, bytes=30, waiting_rows=9, age=1.0)},
        cuts={"p": CutFlow(ready=4, lags=[1, 2])},
        workers={"w": WorkerFlow(memory=5)},
    )
    second = flow(
        2,
        nodes={"a@w": ReplicaFlow(busy=0.25, for_rows=0.75, blames={"c": 0.75}, rows=1, version=1)},
        edges={"a->b": EdgeFlow(rows=1, bytes=10)},
        cuts={"p": CutFlow(ready=0, lags=[0, 0, 7])},
        workers={"w": WorkerFlow(memory=6)},
    )
    whole = sum_flows([first, second])
    assert (whole.start, whole.end, whole.step) == (0.0, 2.0, 2)
    blames = {"b": 0.5, "c": 0.75}
    replica = ReplicaFlow(busy=0.75, for_rows=1.25, blames=blames, rows=4, version=1)
    assert whole.nodes["a@w"] == replica
    assert whole.edges["a->b"] == EdgeFlow(rows=4, bytes=40)
    assert whole.cuts["p"] == CutFlow(ready=0, lags=[1, 2, 7])
    assert whole.workers["w"].memory == 6


# --- planted bottlenecks, in simulated time -------------------------------------------------------


def simulated(plan: Plan, folder: Path, *, steps: int = 6, **durations: Any) -> None:
    """Write the events of a run in simulated time."""
    writer = FlowWriter(folder, after=0)
    runs: list[Simulation] = []
    fold = FlowFold(plan, writer, lambda: runs[0].coordinator.cuts(), wall=lambda: runs[0].now)
    run = Simulation(
        plan,
        Settings(steps=steps),
        rows={source.name: 1000 for source in plan.sources},
        durations=Durations(tail=0.0, **durations),
        outcomes=Outcomes(),
        watchers=[fold],
    )
    runs.append(run)
    run.run()
    fold.fold()
    writer.close()


def test_events_that_are_folded_later_make_the_same_records(tmp_path: Path) -> None:
    """In simulated time whole Steps take less than the second for which events are kept."""
    plan, now = placed(grpo_graph(batch=4, n=4, max_lag=1)), tmp_path / "now"
    runs: list[Simulation] = []
    writers = [FlowWriter(now, after=0), FlowWriter(tmp_path / "later", after=0)]
    folds = [
        FlowFold(plan, writer, lambda: runs[0].coordinator.cuts(), wall=lambda: runs[0].now)
        for writer in writers
    ]
    row = {"prompts": 0.0, "advantage": 0.0, "rollout": 0.01, "score": 0.02, "train_policy": 0.01}
    runs.append(
        Simulation(
            plan,
            Settings(steps=6),
            rows={"prompts": 1000},
            durations=Durations(tail=0.0, row=row, train=0.1, load=0.01),
            outcomes=Outcomes(),
            watchers=[AtOnce(folds[0]), folds[1]],
        )
    )
    runs[0].run()
    folds[1].fold()
    for writer in writers:
        writer.close()
    records = list(read_steps(now))
    assert len(records) > 6
    assert list(read_steps(tmp_path / "later")) == records


def told_of_a_long_reward(folder: Path, looks: Sequence[float]) -> tuple[Flow, list[Flow]]:
    """A Step in which score takes 25 seconds, and the seconds that were told before it ended.
    looks: when the flow's thread looks meanwhile.
    """
    fold = FlowFold(placed(grpo_graph(batch=4, n=4)), FlowWriter(folder, after=0), dict)
    fold.take(Opened(at=0.0))
    chunk = m.RunChunk(id=1, worker="main", node="score", step=1, keys=Keys.of([0]))
    fold.take(InstructionTold(at=0.5, instruction=chunk))
    for now in looks:
        fold.meanwhile(now, [Doing(worker="main", node="score", what="run", since=0.5)])
    before = read_live(folder)
    fold.take(EventHeard(at=25.5, event=m.ChunkDone(id=1, node="score"), worker="main"))
    fold.take(InstructionTold(at=25.5, instruction=m.StepClosed(step=1, metrics={})))
    fold.fold()
    (step,) = (record for record in read_steps(folder) if isinstance(record, Flow))
    return step, before


def test_what_goes_on_is_told_while_nothing_is_heard(tmp_path: Path) -> None:
    """As in a run of one process, whose loop carries out the kernel itself."""
    looks = [1.5, *(second + 0.5 for second in range(2, 25))]
    step, seconds = told_of_a_long_reward(tmp_path / "looked", looks)
    ends = [each.end for each in seconds]
    assert ends == looks[1:], "at the first look something had just come"
    plan = json.loads(placed(grpo_graph(batch=4, n=4)).to_json())
    waits, computes, *_ = sentences(seconds[-1], plan, live=True)
    assert waits == "train_policy waits 100 % for score"
    assert computes == "score has computed for 24 s"
    assert computes not in sentences(seconds[-1], plan), "which may be of long ago"
    worker = seconds[-1].workers["main"]
    assert (worker.doing, worker.doing_for) == ("score", 24.0)
    alone, nothing = told_of_a_long_reward(tmp_path / "alone", [])
    assert not nothing
    assert step.nodes["score@main"].busy == alone.nodes["score@main"].busy == 25.0
    assert step.nodes["train_policy@main"].for_rows == alone.nodes["train_policy@main"].for_rows


def test_a_clock_that_was_read_before_a_look_counts_no_second_twice(tmp_path: Path) -> None:
    step, _ = told_of_a_long_reward(tmp_path, [1.5, 26.0])
    assert (step.start, step.end) == (0.0, 26.0)
    assert step.nodes["score@main"].busy == 25.5


class AtOnce:
    """Folds each event as it comes."""

    takes = FlowFold.takes

    def __init__(self, fold: FlowFold) -> None:
        self._fold = fold

    def take(self, event: RunEvent) -> None:
        self._fold.take(event)
        self._fold.fold()


def test_records_are_there_before_a_checkpoint_that_a_resume_begins_at(tmp_path: Path) -> None:
    plan = placed(grpo_graph(batch=4, n=4))
    fold = FlowFold(plan, FlowWriter(tmp_path, after=0), dict)
    fold.take(Opened(at=0.0))
    fold.take(InstructionTold(at=0.5, instruction=m.StepClosed(step=1, metrics={})))
    assert [record.step for record in read_steps(tmp_path)] == [0]
    checkpoint = m.Checkpoint(step=1, sources={}, rows={})
    fold.take(WritingBegan(of=checkpoint, at=0.5))
    assert [record.step for record in read_steps(tmp_path)] == [0, 1]


def told(plan: Plan, folder: Path, **durations: Any) -> list[str]:
    """The sentences of a simulated run, without its first Step."""
    simulated(plan, folder, **durations)
    flows = [record for record in read_steps(folder) if isinstance(record, Flow)]
    return sentences(sum_flows(flows[1:]), json.loads(plan.to_json()))


@pytest.mark.parametrize(
    ("slow", "row", "train", "max_lag"),
    [
        ("score", {"rollout": 0.2, "score": 0.4, "train_policy": 0.1}, 2.0, 0),
        ("rollout", {"rollout": 3.0, "score": 0.01, "train_policy": 0.01}, 1.0, 1),
    ],
)
def test_whom_a_trainer_waits_for_is_named(
    slow: str, row: dict[str, float], train: float, max_lag: int, tmp_path: Path
) -> None:
    plan = placed(grpo_graph(batch=4, n=4, max_lag=max_lag))
    row = {"prompts": 0.01, "advantage": 0.0} | row
    first, *_ = told(plan, tmp_path, row=row, train=train, load=0.1)
    assert re.fullmatch(rf"train_policy waits \d+ % for {slow}", first)


SLOW_REWARD = {"prompts": 0.01, "advantage": 0.0, "rollout": 0.05, "score": 1.6}


def test_who_does_not_work_at_all_in_a_second_waits_in_it(tmp_path: Path) -> None:
    """A reward of 25 s: in nearly all seconds nobody else works."""
    plan = placed(grpo_graph(batch=4, n=4))
    simulated(plan, tmp_path, steps=2, row=SLOW_REWARD, train=0.5, load=0.1)
    raw = json.loads(plan.to_json())
    live = read_live(tmp_path)
    of_score = [f for f in live if f.nodes["score@main"].busy > 0.99 * (f.end - f.start)]
    assert len(of_score) > 8
    for each in of_score:
        assert not each.nodes["train_policy@main"].busy
        assert sentences(each, raw)[0] == "train_policy waits 100 % for score"


def test_of_a_run_that_its_trainer_bounds_the_greatest_wait_comes_first(tmp_path: Path) -> None:
    """As with many minibatches; all nodes in one Worker, which is where a small run has them."""
    plan = placed(grpo_graph(batch=4, n=4))
    row = {"prompts": 0.01, "advantage": 0.0, "rollout": 0.6, "score": 0.01}
    first, second, *_ = told(plan, tmp_path, row=row, train=6.0, load=0.1)
    assert re.match(r"rollout waits [678]\d % for train_policy", first)
    assert re.match(r"train_policy waits [123]\d % for rollout", second)


def waits_of(seconds: float, **replicas: ReplicaFlow) -> list[str]:
    """The sentences of a stretch; replicas: by node, or node__worker."""
    works = {"rollout": "decode", "reference": "forward", "score": "host", "train_policy": "train"}
    nodes = [{"name": name, "work": work, "workers": ["w"]} for name, work in works.items()]
    named = {name.replace("__", "@"): replica for name, replica in replicas.items()}
    whole = {name if "@" in name else f"{name}@w": replica for name, replica in named.items()}
    found = Flow(step=1, start=0.0, end=seconds, wall=seconds, nodes=whole)
    return sentences(found, {"nodes": nodes})


def test_waits_are_in_the_order_of_their_shares() -> None:
    assert waits_of(
        10.0,
        train_policy=ReplicaFlow(busy=9.0, for_rows=1.0, blames={"rollout": 1.0}),
        reference=ReplicaFlow(for_rows=10.0, blames={"rollout": 3.0, "train_policy": 7.0}),
        rollout=ReplicaFlow(busy=2.0, for_room=8.0, blames={"train_policy": 8.0}),
    ) == [
        "rollout waits 80 % for train_policy (no room for more prompts)",
        "reference waits 70 % for train_policy",
        "reference waits 30 % for rollout",
        "train_policy waits 10 % for rollout",
    ]


@pytest.mark.parametrize(("rollout", "first"), [(9.2, "train_policy"), (9.7, "rollout")])
def test_of_waits_for_one_node_that_are_alike_the_train_nodes_comes_first(
    rollout: float, first: str
) -> None:
    found = waits_of(
        10.0,
        train_policy=ReplicaFlow(busy=1.0, for_rows=9.0, blames={"score": 9.0}),
        rollout=ReplicaFlow(busy=10 - rollout, for_room=rollout, blames={"score": rollout}),
    )
    assert found[0].startswith(f"{first} waits 9")


def test_a_nodes_replicas_are_blamed_together() -> None:
    blames = {"score": 3.0, "rollout@a": 2.0, "rollout@b": 2.0, "rollout@c": 2.0}
    waiting = ReplicaFlow(busy=1.0, for_rows=9.0, blames=blames)
    assert waits_of(10.0, train_policy=waiting) == [
        "train_policy waits 60 % for rollout",
        "train_policy waits 30 % for score",
    ]


def test_the_nodes_of_another_phase_do_not_count() -> None:
    first = flow(1, phase=1, nodes={"pretrain@w": ReplicaFlow(busy=1.0)})
    second = flow(2, phase=2, nodes={"train_policy@w": ReplicaFlow(busy=1.0)})
    assert sum_flows([first, second]) == second


def test_a_slow_replica_is_named(tmp_path: Path) -> None:
    replicas = {
        "rollout@gen0": ReplicaFlow(busy=1.0, idle=2.0, rows=40),
        "rollout@gen1": ReplicaFlow(busy=3.0, rows=40),
        "rollout@gen2": ReplicaFlow(busy=1.2, idle=1.8, rows=40),
        "train_policy@train": ReplicaFlow(
            busy=0.5, for_rows=2.5, blames={"rollout@gen1": 2.0, "rollout": 0.5}
        ),
    }
    nodes = [
        {"name": "rollout", "work": "decode", "workers": ["gen0", "gen1", "gen2"], "layout": {}},
        {"name": "train_policy", "work": "train", "workers": ["train"], "layout": {}},
    ]
    found = sentences(Flow(step=1, start=0.0, end=3.0, wall=3.0, nodes=replicas), {"nodes": nodes})
    assert found == [
        "train_policy waits 67 % for rollout@gen1",
        "rollout@gen1 is 2.7 times slower than the other replicas of rollout",
    ]
