"""The coordinator's benchmark: its Workers answer all that they are told, and its arithmetic."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.coordinator import of_curves, told_to_a_rank
from benchmarks.coordinator_picture import apart, picture
from benchmarks.coordinator_world import CoordinatorWorld, WorldLoad


@pytest.mark.parametrize("together", [1, 7, 128])
@pytest.mark.parametrize(("workers", "chunks"), [(4, 4), (12, 6)])
def test_every_row_is_trained_once_and_every_event_is_counted(
    together: int, workers: int, chunks: int
) -> None:
    load = WorldLoad(prompts=12, samples=4, workers=workers, chunks=chunks, steps=2)
    world = CoordinatorWorld(load, together)
    spent = world.run()
    first, second = (step.keys.rows() for step in world.assignments)
    assert len(first) == len({*first, *second}) - len(second) == 48
    rows = 12 + 3 * 48
    """Of the prompts, the generation, its reward and its advantage in a Step."""
    assert spent.events >= 2 * (rows + chunks)
    assert spent.seconds >= spent.longest > 0


def test_each_rank_is_told_of_its_share_in_few_bytes() -> None:
    load = WorldLoad(prompts=16, samples=4, workers=4, chunks=4, ranks=4)
    world = CoordinatorWorld(load, 32)
    world.run()
    shares = [told.keys.rows() for told in world.assignments]
    assert len(shares) == 4
    assert sorted(row for share in shares for row in share) == [
        (position, sample, 0) for position in range(16) for sample in range(4)
    ]
    result = told_to_a_rank(64, 4)
    assert result.goal == 256 + 40 * 64 * 16 / 4
    assert result.holds


def test_the_ratio_is_that_of_the_most_workers_to_64() -> None:
    points = [(8, 10.0), (64, 20.0), (512, 30.0), (4096, 30.0), (10_000, 31.0)]
    found = {result.name: result for result in of_curves({"alone": points})}
    ratio = found["10,000 Workers to 64/alone"]
    assert ratio.value == 1.55
    assert ratio.holds is False


def test_the_picture_has_a_line_and_a_name_for_each_curve() -> None:
    curves = {name: [(8, 10.0), (64, 12.0), (512, 41.0)] for name in ("a < b", "b", "c")}
    root = ElementTree.fromstring(picture(curves))
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 3
    assert {"a < b", "8", "512", "60"} <= set(words)
    ends = [line.get("points", "").split()[-1] for line in lines]
    assert ends == ["460.0,76.0"] * 3


def test_names_of_lines_that_end_near_each_other_stand_apart() -> None:
    assert apart([100.0, 200.0, 195.0]) == [100.0, 200.0, 186.0]
    assert apart([76.0, 76.0, 76.0]) == [76.0, 62.0, 48.0]
