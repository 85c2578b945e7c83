"""A Step of a source with a lag: cut into parts once it is formed, trained before later rows."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from engine.plan.plan import Plan
from engine.plan.planned_source import PlannedSource
from engine.protocol import messages as m
from tests.kit.plans import plan_of, planned_node
from tests.kit.streamed_world import StreamedWorld

BATCH, SAMPLES, STEPS, TOKENS = 6, 2, 4, 20


def formed_plan(*, in_parts: bool = True, scorer: str = "c", max_lag: int = 1) -> Plan:
    """GRPO with a lag; values are computed below the cut, in a Worker of their own."""
    rows = {"rows": SAMPLES, "inner": SAMPLES}
    below = {"region": "step", "in_parts": in_parts}
    lag = {"lag": max_lag}
    tokens = TOKENS if in_parts else 0
    source = PlannedSource(
        name="prompts", batch=BATCH, max_lag=max_lag, cohort=BATCH, part_tokens=tokens
    )
    return plan_of(
        planned_node("prompts", work="source", relation="source", workers=("c",), **lag),
        planned_node(
            *("rollout", "prompts"),
            workers=("a", "b"),
            work="decode",
            relation="expand",
            rows=SAMPLES,
            chunks=2,
            tokens="x",
            **lag,
        ),
        planned_node("score", "rollout", workers=(scorer,), **rows, **lag),
        planned_node("values", "score", workers=("v",), **rows, **below),
        planned_node(
            *("train", "rollout", "values"),
            work="train",
            relation="sink",
            workers=("d",),
            **rows,
            **below,
        ),
        sources=(source,),
        recorder="c",
    )


def length(position: int, sample: int) -> int:
    return 1 + (position * 7 + sample * 3) % 11 + 20 * (position % 5 == 4)


def run(plan: Plan, seed: int) -> StreamedWorld:
    world = StreamedWorld(plan, STEPS, length, seed=seed)
    world.run()
    return world


def group_tokens(position: int) -> int:
    return sum(length(position, sample) for sample in range(SAMPLES))


@pytest.mark.parametrize("seed", range(4))
def test_each_row_is_in_one_part_of_about_equal_tokens(seed: int) -> None:
    world = run(formed_plan(), seed)
    tokens_by_step: dict[int, list[int]] = defaultdict(list)
    trained: Counter[tuple[int, int, int]] = Counter()
    for task in world.told:
        if isinstance(task, m.TrainPart):
            trained.update(task.keys.rows())
            positions = set(task.keys.position.tolist())
            assert len(task.keys) == SAMPLES * len(positions)
            tokens_by_step[task.step].append(sum(map(group_tokens, positions)))
    assert len(trained) == STEPS * BATCH * SAMPLES
    assert set(trained.values()) == {1}
    heaviest_group = max(map(group_tokens, range(STEPS * BATCH + BATCH)))
    for tokens in tokens_by_step.values():
        assert len(tokens) == min(BATCH, sum(tokens) // TOKENS)
        assert max(tokens) - min(tokens) <= heaviest_group
    assert sorted(tokens_by_step) == list(range(1, STEPS + 1))


def test_parts_are_trained_while_values_of_others_are_computed() -> None:
    world = run(formed_plan(), 0)
    values: set[int] = set()
    for task in world.told:
        if isinstance(task, m.RunChunk) and task.node == "values":
            values.add(task.id)
    order: list[str] = []
    for event in world.heard:
        if isinstance(event, m.PartTrained):
            order.append("trained")
        elif isinstance(event, m.ChunkDone) and event.id in values:
            order.append("values")
    assert "values trained values" in " ".join(order)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_later_step_wait_where_a_worker_trains(seed: int, in_parts: bool) -> None:
    """The scores of later rows, in the Worker that trains, wait until its version is out."""
    assert not _scores_meanwhile(run(formed_plan(in_parts=in_parts, scorer="d", max_lag=2), seed))


@pytest.mark.parametrize("in_parts", [True, False])
def test_rows_of_a_later_step_go_on_elsewhere(in_parts: bool) -> None:
    plan = formed_plan(in_parts=in_parts, max_lag=2)
    assert any(_scores_meanwhile(run(plan, seed)) for seed in range(8))


def _scores_meanwhile(world: StreamedWorld) -> bool:
    """Whether scores were asked for between the begin of a Step's training and its end."""
    is_training = False
    for task in world.told:
        if isinstance(task, m.TrainPart | m.TrainStep):
            is_training = True
        elif isinstance(task, m.StepClosed):
            is_training = False
        elif isinstance(task, m.RunChunk) and task.node == "score" and is_training:
            return True
    return False
