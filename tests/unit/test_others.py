"""How many cores others use: the machine's seconds, less one's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dataflow.errors import RunError
from engine.plan.cost.machine_load import MOST, MOST_OF_CPU
from engine.predict.profile import other_load as others
from engine.predict.profile.other_load import (
    BUSY,
    CoreWaits,
    Others,
    disturbs,
    read_core_waits,
    refuse_worthless,
    taken_share,
)

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


@pytest.mark.parametrize(
    ("cores", "wanted", "share"), [(4.0, 4, 0.0), (6.0, 4, 0.5), (6.0, 2, 0.0), (9.0, 8, 1.0)]
)
def test_others_have_wanted_cores_once_no_other_is_idle(
    monkeypatch: pytest.MonkeyPatch, cores: float, wanted: int, share: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert taken_share(cores, wanted) == share


def test_threads_that_wait_tell_what_share_others_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "_TASKS", tmp_path)
    for thread, figures in {"7": "3000000000 500000000 9", "8": "1000000000 1500000000 4"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"{figures}\n")
    (tmp_path / "9").mkdir()  # it has ended meanwhile
    now = read_core_waits()
    assert (now.ran, now.waited) == pytest.approx((4.0, 2.0))
    assert now.share == pytest.approx(1 / 3)
    assert now.since(CoreWaits(3.0, 1.0)).share == pytest.approx(0.5)
    assert now.since(CoreWaits(9.0, 9.0)).share == 0.0, "of threads that have ended"


def test_this_process_tells_what_it_ran() -> None:
    before, begun = read_core_waits(), time.process_time()
    while time.process_time() - begun < 0.1:
        pass
    assert read_core_waits().since(before).ran > 0.05


@pytest.mark.parametrize(
    ("share", "by_cpu", "accept"),
    [(MOST, False, False), (MOST_OF_CPU, True, False), (0.9, True, True)],
)
def test_what_is_not_too_much_or_accepted(share: float, by_cpu: bool, accept: bool) -> None:
    refuse_worthless("n", share, by_cpu=by_cpu, accept=accept)


@pytest.mark.parametrize(("by_cpu", "most"), [(False, "25 %"), (True, "75 %")])
def test_what_others_made_worthless_is_refused(by_cpu: bool, most: str) -> None:
    with pytest.raises(RunError) as caught:
        refuse_worthless("rollout", 0.8, by_cpu=by_cpu, accept=False)
    message = str(caught.value)
    expected = (
        f"profile: rollout: expected others to have at most {most} of the cores that it wants"
    )
    assert message.startswith(f"{expected}, found 80 %; ")
    assert message.endswith(
        "Fix: stop what else runs here (top lists it), or keep such seconds: --busy accept."
    )
