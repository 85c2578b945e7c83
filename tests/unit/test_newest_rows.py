"""Newest rows of nodes: a disk that fails is told once, and leaves nothing half written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from dataflow.batch import Batch, Keys
from dataflow.schema import Reward
from engine.run.worker.newest_rows import NEWEST, NewestRows


def rows() -> Batch:
    return Batch.make(Keys.of([1, 2]), {"reward": np.array([0.5, 1.0], np.float32)}, Reward)


def test_a_disk_that_fails_leaves_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    newest = NewestRows(tmp_path)
    monkeypatch.setattr(os, "replace", fails)
    newest.offer("score", rows())
    newest.offer("other", rows())
    assert list((tmp_path / NEWEST).iterdir()) == []
    assert len(caplog.records) == 1
    assert "goes on without the newest rows" in caplog.text


def test_the_first_rows_are_there(tmp_path: Path) -> None:
    NewestRows(tmp_path).offer("score", rows())
    assert [path.name for path in (tmp_path / NEWEST).iterdir()] == ["score.arrow"]
