"""How many cores others use: the machine's seconds, less one's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.profile import others
from engine.profile.others import BUSY, Others, disturbs

TICKS = os.sysconf("SC_CLK_TCK")


def stat(path: Path, *seconds: float) -> None:
    """/proc/stat of a machine whose processors have spent their time so."""
    first = " ".join(str(int(each * TICKS)) for each in seconds)
    path.write_text(f"cpu  {first}\ncpu0 {first}\nintr 1 2 3\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stat"
    monkeypatch.setattr(others, "_STAT", path)
    monkeypatch.setattr(time, "monotonic", iter([100.0, 110.0]).__next__)
    return path


# user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
BEFORE = (50, 10, 20, 500, 30, 1, 2, 3, 40, 4)


def test_time_of_processors_that_nobody_here_used(machine: Path) -> None:
    stat(machine, *BEFORE)
    seen = Others()
    stat(machine, 55, 11, 22, 900, 90, 2, 3, 3, 45, 5)
    assert seen.cores() == pytest.approx(1.0, abs=0.02)  # 5 + 1 + 2 + 1 + 1 in 10 seconds


def test_what_this_process_used_is_not_others(machine: Path) -> None:
    stat(machine, *BEFORE)
    seen = Others()
    begun = time.process_time()
    while time.process_time() - begun < 0.2:
        pass
    stat(machine, BEFORE[0] + 0.2, *BEFORE[1:])
    assert seen.cores() == pytest.approx(0.0, abs=0.005)


def test_cores_to_spare_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert [disturbs(cores) for cores in (0.0, 5.0, 5 + BUSY, 5.1 + BUSY)] == [False] * 3 + [True]
