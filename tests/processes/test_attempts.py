"""A run whose state is lost goes back to its last checkpoint, and gives the same numbers; not for
ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import evaluated, small

from dataflow.errors import RunError
from engine.api import run
from engine.coordinator.core import Coordinator
from engine.coordinator.messages import Rollback, StepClosed
from engine.observe.samples import read_samples
from tests.kit.runs import metrics, timeless, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Coordinators that lose the train node's Worker when they close one of these Steps; each Step
    so many times.
    """

    def begin(*steps: int, times: int = 1) -> list[int]:
        handle, lost = Coordinator.handle, []

        def losing(self: Coordinator, event: Any, now: float) -> Any:
            told = handle(self, event, now)
            closed = [each.step for each in told if isinstance(each, StepClosed)]
            if closed and closed[0] in steps and lost.count(closed[0]) < times:
                lost.append(closed[0])
                return [Rollback(worker="train", error="process 7 was killed by SIGKILL")]
            return told

        monkeypatch.setattr(Coordinator, "handle", losing)
        return lost

    return begin


@pytest.mark.parametrize("every", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_run_goes_on_as_if_nothing_had_happened(
    tiny: Path,
    options: Options,
    lose: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
    every: int,
) -> None:
    graph = evaluated(tiny, every=2, keep_best=1)
    whole = run(graph, options(5, name="whole"))
    lost = lose(1, 3, 4)
    seen: list[float] = []
    again = run(
        graph,
        options(5, name="again", checkpoint_every=every),
        on_step=[lambda row: seen.append(row["step"])],
    )
    assert lost == [1, 3, 4]
    assert timeless(metrics(again.folder)) == timeless(metrics(whole.folder))
    assert weights(again) == weights(whole)
    assert read_samples(again.folder / "samples").equals(read_samples(whole.folder / "samples"))
    assert [p.name for p in again.best["evaluate"]] == [p.name for p in whole.best["evaluate"]]
    assert seen == ([1, 2, 3, 3, 4, 5] if every else [1, 2, 1, 2, 3, 1, 2, 3, 4, 5])
    assert again.step == 5
    told = [r.getMessage() for r in caplog.records if "going back" in r.getMessage()]
    assert len(told) == 3
    assert all("Worker train was lost: process 7 was killed by SIGKILL" in line for line in told)
    assert len(list((again.folder / "trace").iterdir())) == 1


def test_samples_that_a_dead_recorder_left_of_a_step_that_never_came_go_with_the_end_of_the_run(
    tiny: Path, options: Options
) -> None:
    given = options(2)

    def leave(row: Any) -> None:
        (samples,) = given.runs.glob("*/samples")
        (samples / f"step_{int(row['step']) + 1:06d}.parquet").write_bytes(b"")

    samples = run(small(tiny), given, on_step=[leave]).folder / "samples"
    assert sorted(path.name for path in samples.iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]


def test_attempts_that_come_no_further_end_the_run(
    tiny: Path, options: Options, lose: Callable[..., list[int]]
) -> None:
    lost = lose(3, times=9)
    with pytest.raises(
        RunError, match=r"3 attempts in a row came no further than step 2: process 7 was killed"
    ):
        run(small(tiny), options(5))
    assert lost == [3, 3, 3, 3], "the first came to Step 2, and so counts for something"


def test_progress_between_losses_lets_the_run_go_on(
    tiny: Path, options: Options, lose: Callable[..., list[int]]
) -> None:
    lost = lose(2, 4, 6, times=2)
    assert run(small(tiny), options(6, checkpoint_every=1)).step == 6
    assert lost == [2, 2, 4, 4, 6, 6]
