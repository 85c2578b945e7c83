"""How many prompts are admitted as answers grow: by what memory holds, never less than a Step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.admission import Admission
from engine.coordinator.blocks import Blocks
from engine.coordinator.coordinator import Settings
from engine.coordinator.live_tokens import LiveTokens
from engine.coordinator.prompt_table import PromptTable
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.planned_source import LiveRoom, PlannedSource
from engine.protocol.refs import Ref
from engine.run.simulated_workers.simulation import Simulation
from tests.kit.plans import learning_nodes, plan_of, planned_node
from tests.kit.simulations import simulation
from tests.kit.turns import example_count

BATCH, ROWS = 4, 2


def rollout() -> PlannedNode:
    decode = planned_node("rollout", work="decode", relation="expand", source="prompts")
    return replace(decode, rows=ROWS)


def source_of(room: LiveRoom | None = None, *, max_lag: int = 3, asked: int = 0) -> PlannedSource:
    return PlannedSource(name="prompts", batch=BATCH, max_lag=max_lag, room=room, live_tokens=asked)


def live_of(room: LiveRoom | None = None, *, max_lag: int = 3, asked: int = 0) -> LiveTokens:
    return LiveTokens(source_of(room, max_lag=max_lag, asked=asked), [rollout()])


def note_steps(live: LiveTokens, means: Sequence[float]) -> None:
    for mean in means:
        rows = BATCH * ROWS
        live.note("rollout", round(mean * rows), rows)


def test_until_a_step_was_measured_the_longest_rows_count() -> None:
    live = live_of(LiveRoom(prompts=6, tokens=6 * (2 * 100 + 10), beside=10))
    assert live.most() == 6
    live.note("rollout", 7 * 20, 7)
    assert live.most() == 6
    live.note("rollout", 20, 1)
    assert live.expect() == 2 * 20
    assert live.most() == 4 * BATCH  # 25 have room
    note_steps(live, [50.0])
    # They grow by 30 in a Step, and wait for four: 2 * (50 + 120) + 10.
    assert live.most() == BATCH
    note_steps(live, [50.0])
    assert live.most() == 1260 // 110


def test_a_lost_row_has_no_tokens() -> None:
    live = live_of(LiveRoom(prompts=6, tokens=1000))
    live.note("rollout", 40, 4)
    for _ in range(4):
        live.note("rollout", 0, 1)
    assert live.expect() == 2 * 5.0


def test_a_number_that_was_asked_for_counts_answers_alone() -> None:
    live = live_of(asked=100)
    assert live.most() == BATCH
    note_steps(live, [5.0])
    assert live.most() == 10
    both = live_of(LiveRoom(prompts=5, tokens=5 * 150, beside=100), asked=100)
    note_steps(both, [5.0])
    assert both.most() == 750 // 110


def test_without_a_lag_or_a_room_nothing_is_bounded() -> None:
    assert live_of(LiveRoom(prompts=4, tokens=1), max_lag=0).most() == BATCH
    assert not live_of(LiveRoom(prompts=4, tokens=1), max_lag=0).is_bounded
    live = live_of()
    note_steps(live, [1e9])
    assert live.most() == 4 * BATCH


@settings(max_examples=example_count(200))
@given(
    st.lists(st.floats(0.0, 500.0), max_size=12),
    st.integers(0, 4000),
    st.integers(0, 50),
    st.integers(1, 4),
)
def test_a_batch_is_always_allowed_and_what_fits_no_more(
    means: Sequence[float], tokens: int, beside: int, max_lag: int
) -> None:
    live = live_of(LiveRoom(prompts=BATCH, tokens=tokens, beside=beside), max_lag=max_lag)
    for mean in means:
        note_steps(live, [mean])
        most = live.most()
        assert BATCH <= most <= (1 + max_lag) * BATCH
        measured = ROWS * round(mean * BATCH * ROWS) / (BATCH * ROWS)
        assert most == BATCH or most * (measured + beside) <= tokens


def test_admission_waits_and_goes_on() -> None:
    source = planned_node("prompts", work="source", relation="source", source="prompts")
    table = PromptTable("prompts", (source, rollout()), ["rollout"], Blocks())
    room = LiveRoom(prompts=6, tokens=6 * 200)
    admission = Admission(source_of(room), table, steps=99)

    def admit() -> int:
        return sum(len(chunk.keys) for chunk in admission.admit(0))

    assert admit() == 6
    note_steps(admission.live, [20.0])
    assert admit() == 4 * BATCH - 6
    note_steps(admission.live, [90.0])
    assert admit() == 0
    assert admission.prompt_counts[2:] == (4 * BATCH, BATCH)


def growing_plan(room: LiveRoom | None) -> Plan:
    source = source_of(room, max_lag=2)
    model = PlannedModel(name="policy", base="b", writer="learn", readers=("rollout",))
    nodes = learning_nodes("data", "gen", ("train",))
    return plan_of(*nodes, sources=(source,), models=(model,), recorder="data")


class AnswersThatGrow:
    """A run whose answers double with each Step. held: the most tokens that waited beyond a batch,
    of a prompt's rows as they came.
    """

    def __init__(self, room: LiveRoom | None, steps: int) -> None:
        self.outstanding: list[int] = []
        self.run: Simulation = simulation(growing_plan(room), settings=Settings(steps=steps))
        keep = self.run.workers.outbox.keep

        def kept(worker: str, node: PlannedNode, *others: Any) -> Ref:
            ref = keep(worker, node, *others)
            if not node.traits.generates:
                return ref
            tokens = 10 * 2**self.run.coordinator.version
            return replace(ref, lengths=np.full(len(ref.keys), tokens))

        self.run.workers.outbox.keep = kept  # type: ignore[method-assign]
        self.run.run()


@pytest.mark.parametrize("tokens", [inf, 400.0, 0.0])
def test_a_run_whose_answers_grow_comes_to_its_end(tokens: float) -> None:
    """With a room for all rows, for those of the first Steps, and for none at all."""
    room = None if tokens == inf else LiveRoom(prompts=BATCH, tokens=int(tokens))
    growing = AnswersThatGrow(room, steps=8)
    run = growing.run
    assert run.finish is not None
    assert not run.finish.error
    most = run.coordinator.cuts()["prompts"][3]
    assert most == (3 * BATCH if room is None else BATCH)
