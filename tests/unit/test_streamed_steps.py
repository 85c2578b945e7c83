"""A synchronous Step that is trained in parts while it is generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dataflow.kernel import Layout
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import PlannedSource, Streaming
from engine.protocol import messages as m
from tests.kit.plans import plan_of, planned_node
from tests.kit.streamed_world import StreamedWorld

BATCH, SAMPLES, STEPS = 6, 2, 3


def streamed_plan(
    stream: Streaming = "ordered",
    *,
    train_in_parts: bool = True,
    replicas: Sequence[str] = ("a", "b"),
    chunks: int = 2,
    spread: int = 1,
) -> Plan:
    """GRPO with replicas of the rollout; values are computed below the cut."""
    layout = Layout(spread=spread)
    rows = {"rows": SAMPLES, "inner": SAMPLES}
    below = {"region": "step", "in_parts": True}
    decode = {"work": "decode", "relation": "expand", "rows": SAMPLES, "chunks": chunks}
    return plan_of(
        planned_node("prompts", work="source", relation="source", workers=("c",)),
        planned_node(
            *("rollout", "prompts"), workers=tuple(replicas), tokens="x", layout=layout, **decode
        ),
        planned_node("score", "rollout", workers=("c",), chunking="part", **rows),
        planned_node("values", "score", workers=("d",), **rows, **below),
        planned_node(
            *("train", "rollout", "values"),
            work="train",
            relation="sink",
            region="step",
            workers=("d",),
            **rows,
            in_parts=train_in_parts,
        ),
        sources=(PlannedSource(name="prompts", batch=BATCH, stream=stream, part_tokens=20),),
        recorder="d",
    )


def two_sources(max_lag: int = 0) -> Plan:
    """Two Models, each with prompts of its own."""
    lag = {"lag": max_lag}
    nodes: list[PlannedNode] = []
    sources: list[PlannedSource] = []
    for name, worker in (("red", "a"), ("blue", "b")):
        rows = {"rows": SAMPLES, "inner": SAMPLES, "source": f"{name}_prompts"}
        below = {"region": "step", "in_parts": True}
        source = PlannedSource(
            name=f"{name}_prompts",
            batch=BATCH,
            max_lag=max_lag,
            stream="off" if max_lag else "ordered",
            part_tokens=20,
        )
        sources.append(source)
        nodes += [
            planned_node(
                source.name,
                work="source",
                relation="source",
                source=source.name,
                workers=("c",),
                **lag,
            ),
            planned_node(
                *(f"{name}_rollout", source.name),
                workers=(worker,),
                work="decode",
                relation="expand",
                rows=SAMPLES,
                source=source.name,
                tokens="x",
                **lag,
            ),
            planned_node(f"{name}_values", f"{name}_rollout", workers=("c",), **rows, **below),
            planned_node(
                *(f"train_{name}", f"{name}_rollout", f"{name}_values"),
                work="train",
                relation="sink",
                workers=("d",),
                **rows,
                **below,
            ),
        ]
    return plan_of(*nodes, sources=tuple(sources), recorder="d")


def length(position: int, sample: int) -> int:
    """Long tailed, and without a pattern in the positions."""
    return 1 + (position * 7 + sample * 3) % 11 + 20 * (position % 5 == 4)


def run(plan: Plan, seed: int, drops=lambda position: False, parts=None) -> StreamedWorld:
    world = StreamedWorld(plan, STEPS, length, drops, seed, parts=parts)
    world.run()
    return world


def parts_of(world: StreamedWorld) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    tasks = (message for message in world.told if isinstance(message, m.TrainPart))
    return [(task.step, task.part, task.keys.rows()) for task in tasks]


@pytest.mark.parametrize("seed", range(5))
def test_an_ordered_step_has_the_same_parts_at_any_timing(seed: int) -> None:
    first, other = run(streamed_plan(), 0), run(streamed_plan(), seed + 1)
    assert parts_of(first) == parts_of(other)
    finishes = [message for message in other.told if isinstance(message, m.FinishStep)]
    assert [task.step for task in finishes] == [1, 2, 3]
    for task in finishes:
        of_step = [part for part in parts_of(other) if part[0] == task.step]
        assert [part for _, part, _ in of_step] == list(range(task.parts))
        positions = sorted({position for _, _, keys in of_step for position, _, _ in keys})
        assert positions == list(range((task.step - 1) * BATCH, task.step * BATCH))


@pytest.mark.parametrize("replicas", ["a", "ab", "abef"])
def test_equal_chunks_give_the_same_parts_on_any_replicas(replicas: str) -> None:
    alone = run(streamed_plan(replicas="a", chunks=4), 0)
    for seed in (1, 2, 3):
        world = run(streamed_plan(replicas=replicas, chunks=4), seed)
        assert parts_of(world) == parts_of(alone)
        tasks = [task for task in world.told if isinstance(task, m.RunChunk)]
        assert {task.worker for task in tasks if task.node == "rollout"} == set(replicas)


@pytest.mark.parametrize("seed", range(3))
def test_a_group_whose_rows_are_on_two_replicas_waits_for_its_last_row(seed: int) -> None:
    first, other = run(streamed_plan(spread=2), 99), run(streamed_plan(spread=2), seed)
    tasks = [task for task in other.told if isinstance(task, m.RunChunk)]
    assert any(task.spans is not None for task in tasks)
    assert parts_of(other) == parts_of(first)
    rows = [key for _, _, keys in parts_of(other) for key in keys]
    assert len(rows) == len(set(rows)) == STEPS * BATCH * SAMPLES


def test_a_step_has_as_many_parts_as_it_has_tokens_for() -> None:
    """Fewer than the Step before it: the numbers of parts begin anew."""

    def shorter(position: int, sample: int) -> int:
        return max(1, 24 - position) + sample

    world = StreamedWorld(streamed_plan(), STEPS, shorter)
    world.run()
    finishes = [message for message in world.told if isinstance(message, m.FinishStep)]
    counts = [task.parts for task in finishes]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    steps = Counter(step for step, _, _ in parts_of(world))
    assert counts == [steps[task.step] for task in finishes]


def test_what_arrives_is_cut_as_recorded_at_any_timing() -> None:
    first = run(streamed_plan("arrival"), 0)
    recorded: dict[int, list[tuple[int, ...]]] = {}
    for formed in first.told:
        if isinstance(formed, m.PartFormed):
            recorded.setdefault(formed.step, []).append(formed.positions)
    others = [run(streamed_plan("arrival"), seed) for seed in (1, 2, 3)]
    assert any(parts_of(other) != parts_of(first) for other in others)
    for seed in (1, 2, 3):
        again = run(streamed_plan("arrival"), seed, parts={"prompts": recorded})
        assert parts_of(again) == parts_of(first)


@pytest.mark.parametrize("stream", ["ordered", "arrival"])
def test_each_row_is_trained_once_where_groups_are_dropped(stream: Streaming) -> None:
    def drops(position: int) -> bool:
        return position % 4 == 1

    for seed in range(4):
        world = run(streamed_plan(stream), seed, drops)
        rows = [key for _, _, keys in parts_of(world) for key in keys]
        assert len(rows) == len(set(rows)) == STEPS * BATCH * SAMPLES
        assert not any(drops(position) for position, _, _ in rows)
        assert parts_of(world) == parts_of(run(streamed_plan(stream), seed, drops))
    if stream == "ordered":
        assert parts_of(world) == parts_of(run(streamed_plan(stream), 99, drops))


def test_parts_begin_before_the_last_row_has_come() -> None:
    world = run(streamed_plan(), 0)
    chunks = [
        message.id
        for message in world.told
        if isinstance(message, m.RunChunk) and message.node == "rollout" and message.step == 0
    ]
    assert chunks
    order = world.order
    last_rows = max(place for place, what in enumerate(order) if what == "Stepped")
    assert order.index("PartTrained") < last_rows
    # Of the first Step: a part is trained while rows of it still come.
    first_step = order[: order.index("Stepped")]
    first_part = first_step.index("PartTrained")
    assert "Produced" in first_step[first_part:]


def test_a_node_that_needs_the_whole_step_waits_for_its_end() -> None:
    world = run(streamed_plan(train_in_parts=False), 0)
    assert parts_of(world) == []
    steps = [message for message in world.told if isinstance(message, m.TrainStep)]
    assert [len(task.keys) for task in steps] == [BATCH * SAMPLES] * STEPS
    values = [m_.keys for m_ in world.told if isinstance(m_, m.RunChunk) and m_.node == "values"]
    assert len(values) > STEPS, "values are computed part by part all the same"


def test_an_early_replica_gives_its_devices_to_the_rank_that_waits_for_them() -> None:
    """Two ranks train where two replicas generate, by turns; b is much slower than a."""
    plan = streamed_plan()
    train = replace(plan.node("train"), workers=("left", "right"), layout=Layout(data=2))
    nodes = tuple(train if node.name == "train" else node for node in plan.nodes)
    plan = replace(plan, nodes=nodes, turns=(("a", "left"), ("b", "right")))
    world = StreamedWorld(plan, STEPS, length, slow="b")
    world.run()
    first_step = world.heard[: world.order.index("Stepped")]
    slow_rows = places_of(first_step, m.Produced, "b")
    left, right = (places_of(first_step, m.PartTrained, rank) for rank in ("left", "right"))
    assert left[0] < slow_rows[-1], "a part is trained while the slow replica generates"
    assert slow_rows[-1] < right[0], "the other rank has no devices before"
    assert sorted(parts_of(world)) == sorted(parts_of(run(plan, 7))), "as at any timing"


def places_of(events: list[m.Event], kind: type[m.Event], worker: str) -> list[int]:
    """Where in these events a Worker says this."""
    places = list[int]()
    for place, event in enumerate(events):
        by = event.ref.worker if isinstance(event, m.Produced) else getattr(event, "worker", "")
        if isinstance(event, kind) and by == worker:
            places.append(place)
    return places


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_two_sources_have_parts_of_their_own(seed: int, max_lag: int) -> None:
    world = run(two_sources(max_lag), seed)
    keys_of: dict[str, list[tuple[int, int, int]]] = {"train_red": [], "train_blue": []}
    for task in world.told:
        if isinstance(task, m.TrainPart):
            keys_of[task.node] += task.keys.rows()
    expected = [
        (position, sample, 0) for position in range(STEPS * BATCH) for sample in range(SAMPLES)
    ]
    for keys in keys_of.values():
        assert sorted(keys) == expected
    finished = [(task.node, task.step) for task in world.told if isinstance(task, m.FinishStep)]
    assert sorted(finished) == sorted((name, step) for name in keys_of for step in (1, 2, 3))
