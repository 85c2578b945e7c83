"""Whole runs of which rows are lost alone: trained without them, resumed, and run again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

from engine.api import rerun, resume
from tests.kit.lost_rows import lossy_graph
from tests.kit.runs import column, metrics, samples, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)


def test_groups_are_trained_without_their_lost_rows(tiny: TinyRuns) -> None:
    result = tiny.run(lossy_graph, 2)
    last = metrics(result)[-1]
    assert 0 < last["data/lost_rows"] < 16
    assert column(result, "data/prompts") == [4.0, 4.0]
    assert 0 < sum(column(result, "data/rows")) < 32
    assert last["eval/rows"] + last["eval/lost_rows"] == 6


def test_emptied_groups_make_room_for_others(tiny: TinyRuns) -> None:
    result = tiny.run(partial(lossy_graph, loses="prompt 1"), 2)
    last = metrics(result)[-1]
    assert (last["data/dropped"], last["data/lost_rows"]) == (1.0, 4.0)
    assert last["data/admitted"] == 9.0
    assert column(result, "data/rows") == [16.0, 16.0]


def _after_one_step(row: Mapping[str, float]) -> bool:
    return row["step"] == 1


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tiny: TinyRuns) -> None:
    whole = tiny.run(lossy_graph, 3)
    stopped = tiny.run(lossy_graph, 3, name="stopped", checkpoint_every=1, until=_after_one_step)
    assert resume(stopped.folder).step == 3
    assert timeless(metrics(stopped)) == timeless(metrics(whole))
    assert samples(stopped).equals(samples(whole))


@pytest.mark.long
def test_a_chunk_with_lost_rows_is_run_again(tiny: TinyRuns) -> None:
    result = tiny.run(lossy_graph, 2, record="all")
    for node in ("score", "group_advantage", "train_policy"):
        replayed = rerun(result.folder, [node], 2)
        assert replayed.same, replayed.nodes
