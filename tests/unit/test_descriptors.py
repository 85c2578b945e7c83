"""Limits of open files: raised where that is possible, one clear error where it is not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from engine.channels.descriptors import explain_shortage
from engine.run.control.control import Failed

_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from engine.channels import descriptors as d
from dataflow.errors import RunError
try:
    d.{call}
except RunError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limited(call: str, soft: int, hard: int) -> str:
    """What a process prints that calls this with these limits: the error, the limits after it."""
    code = _LIMITED.format(call=call, soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("call,soft,hard,told", [
    ("make_room_for_peers(10)", 64, 4000, "296 4000\n"),
    ("make_room_for_peers(10)", 500, 4000, "500 4000\n"),
    ("make_room_for_peers(1000)", 64, 400, "400 400\n"),
], ids=["as many as it takes", "enough already", "as far as the hard limit goes"])  # fmt: skip
def test_the_soft_limit_is_raised_to_what_peers_take(
    call: str, soft: int, hard: int, told: str
) -> None:
    assert limited(call, soft, hard) == told


def test_a_supervisor_says_how_many_open_files_its_workers_take() -> None:
    raised, _, hard = limited("make_room_for_children(512)", 64, 4000).strip().partition(" ")
    assert 1536 + 256 < int(raised) < 1912
    assert hard == "4000"
    problem, limits = limited("make_room_for_children(512)", 64, 700).splitlines()
    assert limits == "700 700"
    for part in (
        "supervisor: 512 workers of this host need 1",
        "found a hard limit below that. Fix: ulimit -n 1",
        "(now 700, hard limit 700)",
        "in a shell that may raise its hard limit, or fewer workers.",
    ):
        assert part in problem, problem


def test_too_many_open_files_are_no_fault_of_the_engine() -> None:
    message = Failed.of(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "gen-3").text
    assert message.startswith("worker gen-3: Too many open files. Fix: ulimit -n ")
    assert "internal" not in message
    assert "fs.file-max" in (explain_shortage(OSError(errno.ENFILE, "Too many")) or "")
    assert explain_shortage(OSError(errno.EACCES, "no")) is None
    assert "internal error: PermissionError" in Failed.of(OSError(errno.EACCES, "no"), "w").text
