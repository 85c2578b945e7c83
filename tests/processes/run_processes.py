"""Runs in a process of their own, to be killed or stopped: run_script.py.

Owns: starting one, following it, seeing its children end. Does not own: what is run
(run_script.py), what is asserted.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.processes import ROOT

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests" / "unit"))),
}


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """run_script.py in a session of its own; whatever happens, it has ended afterwards.

    Its standard input ends with communicate().
    """
    command = [sys.executable, str(HERE / "run_script.py"), *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    made = subprocess.Popen(command, env=ENVIRONMENT, text=True, start_new_session=True, **pipes)
    late = threading.Timer(150, made.kill)
    late.start()
    try:
        yield made
    finally:
        late.cancel()
        if made.poll() is None:
            made.kill()
        made.communicate()


def wait_for(made: subprocess.Popen[str], line: str) -> None:
    assert made.stdout is not None
    for found in made.stdout:
        if found.strip() == line:
            return
    raise AssertionError(
        f"the run ended before {line!r}: {made.stderr.read() if made.stderr else ''}"
    )


def wait_for_error(made: subprocess.Popen[str], words: str) -> None:
    """Read its standard error up to a line with these words."""
    assert made.stderr is not None
    for found in made.stderr:
        if words in found:
            return
    raise AssertionError(f"the run ended, and never said {words!r}")


def go_on(made: subprocess.Popen[str]) -> None:
    """Let one go on that holds after a Step."""
    assert made.stdin is not None
    made.stdin.write("\n")
    made.stdin.flush()


def end_of_children(pids: list[int]) -> None:
    """Wait until the kernel has ended these processes; the test's own time limit is the bound."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(handle) as opened:
            ready, _, _ = select.select([opened], [], [], 20)
            assert ready, f"process {pid} outlived its run"
