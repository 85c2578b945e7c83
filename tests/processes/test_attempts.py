"""A run that loses state goes back to its checkpoint with the same numbers, or gives up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.coordinator.coordinator import Coordinator
from engine.protocol.messages import Rollback, StepClosed
from tests.kit.run_graphs import evaluated, small
from tests.kit.runs import best_names, require_same_runs
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]
Lose = Callable[..., list[int]]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Coordinators that lose the train node's Worker when they close these Steps, each n times."""

    def begin(*steps: int, times: int = 1) -> list[int]:
        handle, lost = Coordinator.handle_together, []

        def losing(self: Coordinator, events: Any, now: float) -> Any:
            told = handle(self, events, now)
            closed = [each.step for each in told if isinstance(each, StepClosed)]
            if closed and closed[0] in steps and lost.count(closed[0]) < times:
                lost.append(closed[0])
                return [Rollback(worker="train", error="process 7 was killed by SIGKILL")]
            return told

        monkeypatch.setattr(Coordinator, "handle_together", losing)
        return lost

    return begin


def test_the_run_goes_on_as_if_nothing_had_happened(
    tiny: TinyRuns, lose: Lose, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins anew after Step 1, of which there is no checkpoint, and goes back after 3 and 4."""
    graph = partial(evaluated, keep_best=1)
    whole = tiny.run(graph, 5, name="whole")
    lost, seen = lose(1, 3, 4), []
    tell = [lambda row: seen.append(row["step"])]
    again = tiny.run(graph, 5, name="again", checkpoint_every=2, on_step=tell)
    assert lost == [1, 3, 4]
    require_same_runs(again, whole)
    assert best_names(again) == best_names(whole)
    assert seen == [1, 2, 3, 3, 4, 5]
    said = [line for line in caplog.messages if "going back" in line]
    assert len(said) == 3
    assert all("Worker train was lost: process 7 was killed by SIGKILL" in line for line in said)
    assert len(list((again.folder / "trace").iterdir())) == 1


def test_samples_that_a_dead_recorder_left_of_a_step_that_never_came_go_with_the_end_of_the_run(
    tiny: TinyRuns,
) -> None:
    def leave(row: Any) -> None:
        (folder,) = tiny.runs.glob("*/samples")
        (folder / f"step_{int(row['step']) + 1:06d}.parquet").write_bytes(b"")

    left = (tiny.run(small, 2, on_step=[leave]).folder / "samples").iterdir()
    assert sorted(path.name for path in left) == ["step_000001.parquet", "step_000002.parquet"]


def test_attempts_that_come_no_further_end_the_run(tiny: TinyRuns, lose: Lose) -> None:
    lost = lose(3, times=9)
    told = r"3 attempts in a row came no further than step 2: process 7 was killed"
    with pytest.raises(RunError, match=told):
        tiny.run(small, 5)
    assert lost == [3, 3, 3, 3], "the first came to Step 2, and so counts for something"


def test_progress_between_losses_lets_the_run_go_on(tiny: TinyRuns, lose: Lose) -> None:
    lost = lose(2, 3, times=2)
    assert tiny.run(small, 3, checkpoint_every=1).step == 3
    assert lost == [2, 2, 3, 3]
