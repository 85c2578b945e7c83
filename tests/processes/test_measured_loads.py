"""Of two replicas the slow one gets fewer rows, by what both took."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import run
from tests.kit import run_graphs as graphs
from tests.kit.scaled_runs import TOLD, slow_in_the_second
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(400)
STEPS, PROMPTS, ANSWERS = 4, 8, 2


@pytest.mark.long
def test_a_slow_replica_has_fewer_rows(
    tiny: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    monkeypatch.setenv(TOLD, str(rows))
    graph = graphs.small(tiny.folder, slow_in_the_second, batch=PROMPTS, n=ANSWERS)
    places = {"rollout": "train", "train_policy": "train", "score": "g0,g1"}
    run(graph, tiny.options(STEPS, workers="auto", pin=places, loads="measured"))
    fast, slow = (len((rows / worker).read_text()) for worker in ("g0", "g1"))
    assert fast + slow == STEPS * PROMPTS * ANSWERS
    # Half of the first Step, and of each later one not more than a prompt or two.
    assert slow < fast / 2
