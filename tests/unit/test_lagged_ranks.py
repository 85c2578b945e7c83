"""Ranks that decode with a lag take up chunks and weights at one step, whatever came first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit import lagged_ranks
from tests.kit.models import save_tiny
from tests.kit.training import as_ranks


@pytest.mark.long
def test_ranks_that_are_told_in_other_orders_decode_as_one(tmp_path: Path) -> None:
    """Chunks that join, weights within a run, a version that one rank skips, and one that the
    first rank has loaded between two runs.
    """
    for seed, name in enumerate(("old", "new")):
        save_tiny(tmp_path / name, seed=seed)
    as_ranks(2, lagged_ranks.main, tmp_path, limit=120.0)
    first, second = (_read(tmp_path, number) for number in range(2))
    assert first["taken"] == second["taken"], "at the same stops"
    assert [what for _, what in first["taken"]] == ["weights 5", "chunk 2", "chunk 3"]
    assert first["distance"] < 1e-5
    assert [0, 5] in first["versions"], "weights came within rows"
    positions = [key[0] for key in first["keys"]]
    assert positions == [position for position in range(8) for _ in range(lagged_ranks.N)]
    assert first["versions"][-8:] == [[6]] * 8
    for number in (81, 85, 86):
        assert f"Loaded {number}" in first["events"]
    assert "Loaded 81" not in second["events"], "it was never told of that version"
    for number in (1, 2, 3, 4):
        assert first["events"].count(f"ChunkDone {number}") == 1
        assert second["events"].count(f"RankDone {number}") == 1


def _read(folder: Path, number: int) -> Any:
    return json.loads((folder / f"{number}.json").read_text(encoding="ascii"))
