"""The parts of the continuous integration; `.ci/run` starts this file.

Owns: which parts there are, what each waits for, which run beside each other and which only in
every third turn. Does not own: how they are run (ci_scheduler.py). Needs no environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ci_scheduler import CiPart, Scheduler, due_parts, times_table

ROOT = Path(__file__).resolve().parents[1]
TURN = ROOT / ".ci" / "turn"
"""Holds a number. Whoever lands a change raises it by one, in the commit that lands: so each part
of a third runs for every third change that lands, and in the same turn for all who try a change.
"""
COMPUTES, WAITS = "computes", "waits"
"""Lanes: parts that use both cores by themselves, and parts that mostly wait or use one core. To
move a part, change its lane; scripts/ci-times says which leave the cores idle. A third lane makes
nothing faster, and tests fail by their time limits.
"""

PARTS = (
    CiPart(name="setup", lane=COMPUTES, command="make setup VLLM=1"),
    # Uses apt alone, so it need not wait for the environment. Killed, apt would leave packages that
    # are not configured.
    CiPart(name="chromium", lane=WAITS, command="scripts/chromium", always_ends=True),
    CiPart(name="test", lane=COMPUTES, needs=("setup",), command="make test"),
    CiPart(name="vllm", lane=COMPUTES, needs=("setup",), command="scripts/test-vllm"),
    CiPart(
        name="vllm-long",
        lane=COMPUTES,
        needs=("setup",),
        command="scripts/test-vllm --long",
        third=2,
    ),
    # Last, as it keeps both cores busy by itself to its end.
    CiPart(
        name="long",
        lane=COMPUTES,
        needs=("setup",),
        command="scripts/test -m 'long and not hosts'",
    ),
    CiPart(name="torture", lane=WAITS, needs=("setup",), command="scripts/torture --short"),
    CiPart(name="chaos", lane=WAITS, needs=("setup",), command="scripts/chaos short"),
    CiPart(name="newcomer", lane=WAITS, needs=("setup",), command="scripts/newcomer"),
    CiPart(
        name="browser",
        lane=WAITS,
        needs=("setup", "chromium"),
        command="scripts/test-browser",
    ),
    CiPart(
        name="hosts",
        lane=WAITS,
        needs=("setup",),
        # The folder of all tests on hosts: to collect all others would take ten seconds.
        command="scripts/test tests/processes -m 'long and hosts'",
    ),
    CiPart(
        name="types-newest",
        lane=WAITS,
        needs=("setup",),
        command="scripts/pythons types 3.13",
        third=1,
    ),
    # 512 processes take 12 GiB and both cores: alone, so it waits for all of the other lane.
    CiPart(
        name="many",
        lane=COMPUTES,
        needs=("setup", "browser", "torture", "chaos", "newcomer", "hosts"),
        command="scripts/test-many",
        third=0,
    ),
)


def main() -> int:
    """Run the parts of this turn, print what each took; the output of a part that fails is last."""
    os.chdir(ROOT)
    turn = int(TURN.read_text())
    # Tests that only repeat, and schedules of chaos, are taken in turn, too.
    environment = os.environ | {"CI_TURN": str(turn)}
    times_folder = os.environ.get("CI_TIMES")
    with _output_folder(times_folder) as folder:
        if times_folder:
            costs = folder / "tests.jsonl"
            costs.unlink(missing_ok=True)  # each process of pytest appends to it
            environment["TEST_COSTS"] = str(costs)
        keep_going = os.environ.get("CI_KEEP_GOING") == "1"
        scheduler = Scheduler(due_parts(PARTS, turn), folder, environment, keep_going=keep_going)
        exit_code = scheduler.run()
        times = scheduler.times(turn)
        if times_folder:
            times.save(folder / "parts.json")
        print(times_table([*times.parts, times.whole]), flush=True)
        scheduler.print_failures()
    return exit_code


@contextlib.contextmanager
def _output_folder(times_folder: str | None) -> Iterator[Path]:
    """The folder of that name, which stays; a temporary one if there is none."""
    if times_folder:
        folder = Path(times_folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ci-") as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
