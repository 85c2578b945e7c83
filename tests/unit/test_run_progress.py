"""What a watcher is told of a streamed Step's parts, and of rows that wait for slots."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from engine.keep.flow.fold import FlowFold
from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_steps
from engine.keep.flow.writer import FlowWriter
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import InstructionTold, Opened
from engine.protocol.progress import (
    PartProgress,
    PartState,
    PoolProgress,
    RunProgress,
    StreamProgress,
)
from engine.watch.top.part_tables import pool_table, stream_table
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed
from tests.kit.streamed_world import StreamedWorld
from tests.unit.test_late_binding import LateRun
from tests.unit.test_streamed_steps import BATCH, SAMPLES, length, streamed_plan

ORDER: tuple[PartState, ...] = ("made", "ready", "training", "summed")


class WatchedWorld(StreamedWorld):
    """Keeps the progress after each event."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.progress: list[tuple[int, StreamProgress]] = []
        super().__init__(plan, steps, length)

    def _hear(self, event: m.Event) -> None:
        super()._hear(event)
        streams = self._coordinator.progress().streams
        self.progress.append((self._coordinator.version, streams["prompts"]))


@pytest.fixture(scope="module")
def first_step() -> list[StreamProgress]:
    world = WatchedWorld(streamed_plan(), 2)
    world.run()
    return [stream for version, stream in world.progress if version == 0]


def test_rows_end_and_the_watermark_rises(first_step: list[StreamProgress]) -> None:
    ended = [stream.ended_rows for stream in first_step]
    assert ended == sorted(ended)
    assert {stream.rows for stream in first_step} <= {0, BATCH * SAMPLES}
    watermarks = [stream.watermark for stream in first_step if stream.ended_rows < stream.rows]
    assert watermarks == sorted(watermarks)
    assert watermarks[-1] > 0


def test_a_group_that_ended_waits_or_is_in_a_part(first_step: list[StreamProgress]) -> None:
    for stream in first_step:
        groups = stream.waiting_groups + sum(part.groups for part in stream.parts)
        assert groups * SAMPLES <= stream.ended_rows
        assert (stream.waiting_groups == 0) == (stream.waiting_tokens == 0)
    last = max(first_step, key=lambda stream: len(stream.parts))
    tokens = sum(length(p, s) for p in range(BATCH) for s in range(SAMPLES))
    assert sum(part.tokens for part in last.parts) == tokens


def test_parts_go_through_their_states_and_one_is_trained_at_a_time(
    first_step: list[StreamProgress],
) -> None:
    states: set[str] = set()
    for before, after in pairwise(first_step):
        for one, other in zip(before.parts, after.parts, strict=False):
            assert ORDER.index(one.state) <= ORDER.index(other.state)
        now = [part.state for part in after.parts]
        assert now.count("training") <= 1
        states |= set(now)
    assert {"training", "summed"} <= states


def test_the_units_that_wait_and_the_credit_that_is_used() -> None:
    run = LateRun("ab", slots=8)
    run.admit(range(21))
    (credit,) = run.dispatch.late.credits.values()
    assert credit.progress() == PoolProgress(
        waiting_rows=3, slots=8, credit=9, under_way={"a": 9, "b": 9}
    )


PARTS = [
    PartProgress(groups=2, tokens=4000, state="summed"),
    PartProgress(groups=1, tokens=4096, state="training"),
    PartProgress(groups=1, tokens=5000, state="made"),
]
STREAM = StreamProgress(
    watermark=312, ended_rows=40, rows=64, waiting_groups=3, waiting_tokens=1200, parts=PARTS
)
POOL = PoolProgress(waiting_rows=5, slots=8, credit=9, under_way={"gen0": 9, "gen1": 7})


def test_the_record_of_a_step_has_its_parts_as_it_made_its_update(tmp_path: Path) -> None:
    """A Step may take less than a second: no stretch ends in its midst."""
    progress = RunProgress(streams={"p": STREAM})
    plan, writer = placed(grpo_graph(batch=4, n=4)), FlowWriter(tmp_path, after=0)
    fold = FlowFold(plan, writer, dict, lambda: progress)
    finish = m.FinishStep(id=1, node="train_policy", worker="main", step=1, parts=3)
    fold.take(Opened(at=0.0))
    fold.take(InstructionTold(at=0.1, instruction=finish))
    progress = RunProgress(streams={"p": StreamProgress()})
    for step in (1, 2):
        closed = m.StepClosed(step=step, metrics={})
        fold.take(InstructionTold(at=0.2 * step, instruction=closed))
    fold.fold()
    writer.close()
    steps = [record for record in read_steps(tmp_path) if isinstance(record, Flow)]
    assert [step.streams["p"] for step in steps] == [STREAM, StreamProgress()]


def test_top_names_the_watermark_the_parts_and_the_credit() -> None:
    flow = Flow(
        step=1, start=0.0, end=1.0, wall=1.0, streams={"prompts": STREAM}, pools={"rollout": POOL}
    )
    text = "\n".join(line.plain for line in stream_table(flow, 100))
    for words in ("40/64", "312", "1,200", "part 2, 4,096", "1 summed, 1 training, 1 made"):
        assert words in text
    text = "\n".join(line.plain for line in pool_table(flow, 100))
    for words in ("rollout gen0", "9/8", "7/8"):
        assert words in text
