"""The coordinator's benchmark: its Workers answer all that they are told, and its arithmetic."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.coordinator import of_curves, told_to_a_rank
from benchmarks.coordinator_picture import apart, picture
from benchmarks.coordinator_world import CoordinatorWorld, WorldLoad
from dataflow.batch import Keys


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "chunks", "together"), [(4, 4, 1), (12, 6, 1), (4, 4, 7), (12, 6, 128)]
)
def test_every_row_is_trained_once_and_every_event_is_counted(
    workers: int, chunks: int, together: int
) -> None:
    load = WorldLoad(prompts=12, samples=4, workers=workers, chunks=chunks, steps=2)
    world = CoordinatorWorld(load, together)
    spent = world.run()
    first, second = (step.keys.rows() for step in world.assignments)
    assert len(first) == len(second) == 48
    assert len({*first, *second}) == 96
    rows = 12 + 3 * 48
    """Of the prompts, the generation, its reward and its advantage in a Step."""
    assert spent.events >= 2 * (rows + chunks)
    assert spent.seconds >= spent.longest > 0


@pytest.mark.long
def test_each_rank_is_told_of_its_share_in_few_bytes() -> None:
    world = CoordinatorWorld(WorldLoad(prompts=16, samples=4, workers=4, chunks=4, ranks=4), 32)
    world.run()
    assert len(world.assignments) == 4
    shares = Keys.concat([told.keys for told in world.assignments])
    assert sorted(shares.rows()) == Keys.of(range(16)).expand(4).rows()
    result = told_to_a_rank(64, 4)
    assert result.goal == 256 + 40 * 64 * 16 / 4
    assert result.holds


def test_the_ratio_is_that_of_the_most_workers_to_64() -> None:
    points = [(8, 10.0), (64, 20.0), (512, 30.0), (4096, 30.0), (10_000, 31.0)]
    found = {result.name: result for result in of_curves({"alone": points})}
    ratio = found["10,000 Workers to 64/alone"]
    assert (ratio.value, ratio.holds) == (1.55, False)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_line_and_a_name_for_each_curve() -> None:
    curves = {name: [(8, 10.0), (64, 12.0), (512, 41.0)] for name in ("a < b", "b", "c")}
    root = ElementTree.fromstring(picture(curves))
    assert {"a < b", "8", "512", "60"} <= {each.text for each in root.iter(f"{SVG}text")}
    lines = [line.get("points", "") for line in root.iter(f"{SVG}polyline")]
    assert [line.split()[-1] for line in lines] == ["460.0,76.0"] * 3


def test_names_of_lines_that_end_near_each_other_stand_apart() -> None:
    assert apart([100.0, 200.0, 195.0]) == [100.0, 200.0, 186.0]
    assert apart([76.0, 76.0, 76.0]) == [76.0, 62.0, 48.0]
