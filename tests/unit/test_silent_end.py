"""A run whose process a user's function ends is told of, and has not done its work."""

from __future__ import annotations

import pytest

from tests.kit.processes import call_python

ENDS = """
import os
from engine.run.loop.silent_end import no_silent_end

with no_silent_end(lambda: "step 7"):
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os._exit({status})
"""


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (0, 3, "<string>:10: os._exit(0) ended the process of the run. Safe: step 7. Fix: return"),
        (5, 5, ""),
    ],
)
def test_the_end_of_the_process_in_a_run_is_no_success(status: int, code: int, told: str) -> None:
    done = call_python("-c", ENDS.format(status=status), timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(told)
    assert bool(done.stderr) == bool(told)


BOUND = """
from os import _exit as leave
from engine.run.loop.silent_end import no_silent_end

with no_silent_end(lambda: "step 7"):
    from os import _exit as leave_later
    {within}
{after}
"""


@pytest.mark.parametrize("name", ["leave", "leave_later"])
def test_a_name_that_a_module_has_for_the_end_is_no_way_around(name: str) -> None:
    ended = call_python("-c", BOUND.format(within=f"{name}(0)", after=""), timeout=60)
    assert (ended.returncode, ended.stderr[:34]) == (3, "<string>:7: os._exit(0) ended the ")
    after = call_python("-c", BOUND.format(within="pass", after=f"{name}(0)"), timeout=60)
    assert (after.returncode, after.stderr) == (0, "")


def test_after_a_run_a_process_ends_as_it_likes() -> None:
    code = ENDS.replace("    os._exit({status})", "    pass") + "os._exit(0)"
    assert call_python("-c", code, timeout=60).returncode == 0


EXECUTES = """
import os, posix, sys
from os import execv, execve, execvp
from engine.run.loop.silent_end import no_silent_end

program = [sys.executable, "-c", "import os; os._exit(4)"]
with no_silent_end(lambda: "step 7"):
    child = os.fork()
    if child == 0:
        os.execv(program[0], program)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    {call}
os.execl(program[0], *program)
"""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("os.execv(program[0], program)", "execv"),
        ("os.execl(program[0], *program)", "execv"),
        ("os.execvpe(program[0], program, os.environ)", "execve"),
        ("execv(program[0], program)", "execv"),
        ("execve(program[0], program, {})", "execve"),
        ("execvp(program[0], program)", "execv"),
        ("posix.execv(program[0], program)", "execv"),
    ],
)
def test_the_process_of_a_run_becomes_no_other_program(call: str, name: str) -> None:
    """Which would end the run as if all was done."""
    done = call_python("-c", EXECUTES.format(call=call), timeout=60)
    assert done.returncode == 1
    message = f"<string>:12: os.{name} would end the process of the run. Fix: subprocess.run, "
    assert message in done.stderr.splitlines()[-1]


def test_a_child_and_a_process_without_a_run_become_other_programs() -> None:
    assert call_python("-c", EXECUTES.format(call="pass"), timeout=60).returncode == 4
