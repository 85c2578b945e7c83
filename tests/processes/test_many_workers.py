"""Many Workers with kernels of nothing: real processes, sockets and shared memory on one host.

    MANY_WORKERS=512 pytest -n 0 -m long -rP tests/processes/test_many_workers.py

What is measured is in docs/clusters.md; of it only what has no clock is asserted.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.session.attempts import StepHooks
from tests.kit.empty_kernels import IMPORTED
from tests.kit.empty_plans import ANSWERS, empty_plan, run_of
from tests.kit.plans import save_tiny_header
from tests.kit.processes import workers
from tests.kit.runs import metrics

WORKERS = int(os.environ.get("MANY_WORKERS", "32"))
STEPS = 20
ROOM = 24 << 20
"""Bytes that a Worker takes of the machine's memory, with its shared memory."""
PRIVATE = 28.0
"""MiB of its own that a Worker may have: with any of the heavy modules it would have more."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def workers_seen() -> dict[str, Any]:
    """What /proc says of a run's Workers. private: MiB of each. files: most open ones."""
    pids = [*workers().values()]
    return {
        "workers": len(pids),
        "private": sum(map(_private, pids)) / len(pids) / 1024,
        "files": max(_open_files(str(pid)) for pid in pids),
        "own files": _open_files("self"),
        "with torch": [p for p in pids if "libtorch" in Path(f"/proc/{p}/maps").read_text()],
    }


def _private(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _open_files(pid: str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """A soft limit that even few Workers are too many for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_files("self") + 64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_open_files", "own_interpreters")
def test_many_workers_of_nothing_run_twenty_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _available() < WORKERS * ROOM + (2 << 30):
        pytest.skip(f"{WORKERS} workers take {WORKERS * ROOM >> 20} MiB, which are not free")
    monkeypatch.chdir(tmp_path)
    save_tiny_header(tmp_path)
    plan = empty_plan(WORKERS)
    began, times, seen = time.monotonic(), list[float](), dict[str, Any]()

    def look(row: object) -> None:
        times.append(time.monotonic() - began)
        if len(times) == STEPS:
            seen.update(workers_seen())

    result = run_of(plan, tmp_path / "runs", STEPS, StepHooks(on_step=(look,)))
    print(f"{seen}; first Step after {times[0]:.1f} s, all after {times[-1]:.1f} s")
    assert (result.step, result.reason) == (STEPS, "all steps are done")
    assert seen["workers"] == WORKERS
    assert seen["with torch"] == []
    assert seen["private"] < PRIVATE
    rows = metrics(result.folder)
    assert {row["data/rows"] for row in rows} == {plan.sources[0].batch * ANSWERS}
    assert {row[f"{IMPORTED}/mean"] for row in rows} == {0.0}, "a Worker has imported too much"
