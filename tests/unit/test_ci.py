"""scripts/ci_*.py: the order of parts, what a failure or a signal leaves, what is recorded."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cost_records import TestCost
from tests.kit.processes import MARK, ROOT, call_python, marked, new_mark

SCRIPTS, TESTS = ROOT / "scripts", ROOT / "tests"
ON_HOSTS = "mark.host" + "s"  # in two, as there is no such test here


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's module, where parts run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("ci_scheduler")


@pytest.fixture
def parts_file() -> Any:
    """The module with the committed list of parts."""
    return importlib.import_module("ci_parts")


def shell(text: str) -> str:
    """A part's command that runs this in a shell."""
    return f"sh -c {shlex.quote(text)}"


def scheduler(ci: Any, *parts: Any, **variables: str) -> Any:
    return ci.Scheduler(parts, Path.cwd(), {**os.environ, **variables})


def logging_part(ci: Any, name: str, lane: str, *needs: str) -> Any:
    """It notes in a file when it begins and ends."""
    command = shell(f"echo begin {name} >> log; echo end {name} >> log")
    return ci.CiPart(name=name, command=command, lane=lane, needs=needs)


def test_a_part_waits_for_its_needs_and_lets_a_later_one_of_its_lane_go_first(ci: Any) -> None:
    parts = [
        logging_part(ci, "setup", "one"),
        logging_part(ci, "second", "one", "setup"),
        logging_part(ci, "waits", "two", "second"),
        logging_part(ci, "free", "two"),
    ]
    assert scheduler(ci, *parts).run() == 0
    log = Path("log").read_text().splitlines()
    for ended, begun in (("setup", "second"), ("second", "waits"), ("free", "waits")):
        assert log.index(f"end {ended}") < log.index(f"begin {begun}")


def test_lanes_run_beside_each_other(ci: Any) -> None:
    """Each of two parts waits for the other, so neither would end alone."""
    os.mkfifo("pipe")
    writer = ci.CiPart(name="writer", command=shell("echo word > pipe"), lane="one")
    reader = ci.CiPart(name="reader", command="cat pipe", lane="two")
    assert scheduler(ci, writer, reader).run() == 0
    assert Path("reader.txt").read_text() == "word\n"


@pytest.mark.parametrize("resists", [False, True])
def test_a_failure_is_shown_last_and_ends_all_other_parts(
    ci: Any, resists: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = new_mark()
    os.mkfifo("pipe")
    if resists:
        monkeypatch.setattr(ci, "GRACE", 0.0)
    trap = "trap '' INT; " if resists else ""
    beside = f"{trap}setsid sleep 1000 & sleep 1000 & echo go > pipe; wait"
    fails = "echo printed; echo also printed >&2; read line < pipe; exit 3"
    run = scheduler(
        ci,
        ci.CiPart(name="beside", command=shell(beside), lane="two"),
        ci.CiPart(name="fails", command=shell(fails), lane="one"),
        ci.CiPart(name="never", command="touch never", lane="one"),
        **{MARK: mark},
    )
    assert run.run() == 1
    assert marked(mark) == []
    assert not Path("never").exists()
    outcomes = {part.name: part.outcome for part in run.times(0).parts}
    assert outcomes == {"fails": ci.FAILED, "beside": ci.STOPPED}
    run.print_failures()
    *_, heading, first, second, empty, last = capsys.readouterr().out.splitlines()
    assert heading == "ci: fails: all of its output:"
    assert (first, second, empty) == ("printed", "also printed", "")
    assert last.startswith("ci: fails: failed after ")


def test_where_it_keeps_going_a_failure_ends_only_what_needs_it(ci: Any) -> None:
    parts = [
        ci.CiPart(name="fails", command="false", lane="one"),
        ci.CiPart(name="never", command="touch never", lane="one", needs=("fails",)),
        ci.CiPart(name="goes on", command="true", lane="one"),
    ]
    run = ci.Scheduler(parts, Path.cwd(), os.environ, keep_going=True)
    assert run.run() == 1
    outcomes = {part.name: part.outcome for part in run.times(0).parts}
    assert outcomes == {"fails": ci.FAILED, "goes on": ci.PASSED}


def test_a_part_that_passes_is_a_line_and_what_pytest_said_last(
    ci: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "echo much; echo '=== 12 passed, 3 skipped in 1.50s ==='; echo more"
    assert scheduler(ci, ci.CiPart(name="tests", command=shell(says), lane="one")).run() == 0
    started, passed, ending = capsys.readouterr().out.splitlines()
    assert started.startswith("ci: tests: started: sh -c ")
    assert passed.startswith("ci: tests: passed in ")
    assert ending == "    12 passed, 3 skipped in 1.50s"
    assert ci.ending_lines("a\nlast line\n") == ["last line"]
    assert ci.ending_lines("") == []


def test_a_process_that_outlives_a_part_that_passed_is_killed(ci: Any) -> None:
    mark = new_mark()
    part = ci.CiPart(name="leaves", command=shell("setsid sleep 1000 &"), lane="one")
    assert scheduler(ci, part, **{MARK: mark}).run() == 0
    assert marked(mark) == []


def test_a_part_that_always_ends_is_waited_for_where_others_are_stopped(
    ci: Any,
) -> None:
    """It waits for what the other part does when it is interrupted."""
    os.mkfifo("pipe")
    os.mkfifo("started")
    installs = "echo go > started; read line < pipe; touch installed"
    stopped = "trap 'echo go > pipe; exit 1' INT; read line < started; kill -INT $PPID"
    run = scheduler(
        ci,
        ci.CiPart(name="installs", command=shell(installs), lane="one", always_ends=True),
        ci.CiPart(name="tests", command=shell(f"{stopped}; sleep 1000 & wait"), lane="two"),
    )
    assert run.run() == 128 + signal.SIGINT
    outcomes = {part.name: part.outcome for part in run.times(0).parts}
    assert outcomes == {"installs": ci.PASSED, "tests": ci.STOPPED}
    assert Path("installed").exists()


def test_a_part_ignores_no_signal_that_is_to_end_it(ci: Any) -> None:
    """Python ignores SIGPIPE, and a process inherits what is ignored."""
    command = "grep SigIgn /proc/self/status"
    assert scheduler(ci, ci.CiPart(name="part", command=command, lane="one")).run() == 0
    ignored = int(Path("part.txt").read_text().split()[1], 16)
    assert [number for number in ci.STOP_SIGNALS if ignored >> (number - 1) & 1] == []
    assert not ignored >> (signal.SIGPIPE - 1) & 1


INTERRUPTED = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
from ci_scheduler import CiPart, Scheduler
part = CiPart(name="part", command=sys.argv[1], lane="one")
sys.exit(Scheduler([part], Path.cwd(), os.environ).run())
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_ends_all_parts(name: str, tmp_path: Path) -> None:
    mark = new_mark()
    command = shell(f"setsid sleep 1000 & kill -{name} $PPID; exec sleep 1000")
    done = call_python("-c", INTERRUPTED, command, env={MARK: mark}, cwd=tmp_path)
    assert done.returncode == 128 + signal.Signals[f"SIG{name}"], done.stderr
    assert "ci: part: stopped" in done.stdout
    assert marked(mark) == []


def test_parts_of_a_third_run_in_every_third_turn_and_nobody_waits_for_them_in_others(
    ci: Any,
) -> None:
    parts = [
        ci.CiPart(name="always", command="true", lane="one"),
        ci.CiPart(name="third", command="true", lane="one", third=1),
        ci.CiPart(name="after", command="true", lane="one", needs=("always", "third")),
    ]
    names = {turn: [part.name for part in ci.due_parts(parts, turn)] for turn in range(5)}
    assert [turn for turn in names if "third" in names[turn]] == [1, 4]
    assert names[0] == ["always", "after"]
    assert ci.due_parts(parts, 2)[-1].needs == ("always",)
    assert scheduler(ci, *ci.due_parts(parts, 2)).run() == 0


def test_a_part_that_needs_a_later_one_is_refused(ci: Any) -> None:
    early = ci.CiPart(name="early", command="true", lane="one", needs=("late",))
    late = ci.CiPart(name="late", command="true", lane="one")
    with pytest.raises(ValueError, match=r"part 'early': .* found \['late'\]"):
        scheduler(ci, early, late)
    with pytest.raises(ValueError, match="part 'late': expected once"):
        scheduler(ci, late, late)


NAMES = ["first", "second", "whole"]


def test_what_parts_took_is_a_table_and_json(ci: Any) -> None:
    run = scheduler(
        ci,
        ci.CiPart(name="first", command="true", lane="one"),
        ci.CiPart(name="second", command="true", lane="two", needs=("first",)),
    )
    assert run.run() == 0
    times = run.times(7)
    times.save(Path("parts.json"))
    assert ci.CiTimes.load(Path("parts.json")) == times
    table = ci.times_table([*times.parts, times.whole]).splitlines()
    assert [row.split()[:2] for row in table[1:]] == [[name, "passed"] for name in NAMES]


def test_busy_cores_are_cpu_seconds_a_second(ci: Any) -> None:
    part = ci.PartTimes(name="a", lane="one", outcome="passed", wall=4.0, cpu=6.0, idle=0.25)
    assert ci.times_table([part]).splitlines()[1].split()[-4:] == ["4.0", "6.0", "1.50", "25%"]


def test_the_report_adds_up_tests_by_file_and_suite(ci: Any) -> None:
    report = importlib.import_module("ci_times")
    costs = [
        TestCost(suite="test", test="a.py::one", wall=5.0, own=1.0, children=3.0),
        TestCost(suite="test", test="a.py::two", wall=1.0, own=0.5, children=0.0),
        TestCost(suite="long", test="b.py::one", wall=9.0, own=8.0, children=0.0),
        TestCost(suite="test", test="(collecting)", wall=2.0, own=2.0, children=0.0),
    ]
    long, test = report.cost_sums(costs, lambda cost: cost.suite)
    assert (test.tests, test.wall, test.own, test.children) == (2, 8.0, 3.5, 3.0)
    assert (long.tests, long.own) == (1, 8.0)
    idle, busy = (
        ci.PartTimes(name=name, lane="one", outcome="passed", wall=1.0, cpu=1.0, idle=share)
        for name, share in (("idle", 0.9), ("busy", 0.1))
    )
    text = report.report(costs, ci.CiTimes(turn=3, parts=(busy, idle), whole=busy))
    tables = [[row.split() for row in table.splitlines()[2:]] for table in text.split("\n\n")]
    by_test, *sums, parts = tables
    assert by_test[0][-1] == "b.py::one"
    by_file, by_suite = ([row[-1] for row in rows] for rows in sums)
    assert (by_file, by_suite) == (["b.py", "a.py", "(collecting)"], ["long", "test"])
    assert [row[0] for row in parts] == ["idle", "busy", "busy"]


def test_the_committed_parts_can_run_in_each_turn(ci: Any, parts_file: Any) -> None:
    due = {turn: ci.due_parts(parts_file.PARTS, turn) for turn in range(ci.THIRDS)}
    for parts in due.values():
        ci.require_order(parts)
    names = {part.name for parts in due.values() for part in parts}
    assert names == {part.name for part in parts_file.PARTS}
    commands = [shlex.split(part.command) for part in parts_file.PARTS]
    scripts = [words[0] for words in commands if words[0] != "make"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    assert any(words[:2] == ["make", "test"] for words in commands)
    assert int(parts_file.TURN.read_text()) >= 0


def test_each_part_stands_in_the_table_of_contributing(parts_file: Any) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Which suite proves what")[2].partition("\n## ")[0]
    turns = dict(re.findall(r"^\| `([\w.-]+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE))
    expected = {
        part.name: "always" if part.third is None else f"turn % 3 = {part.third}"
        for part in parts_file.PARTS
    }
    assert turns == expected


def test_all_tests_on_hosts_lie_in_the_folder_that_their_part_collects() -> None:
    """The part `long` leaves them out, so elsewhere they would run nowhere."""
    folders = {file.parent for file in TESTS.rglob("test_*.py") if ON_HOSTS in file.read_text()}
    assert folders == {TESTS / "processes"}
