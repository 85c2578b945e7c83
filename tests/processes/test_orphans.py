"""No orphan process is left when the process of the run is killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.nothing_left import require_gone, require_no_sockets
from tests.kit.processes import MARK, kill, limited, marked, new_mark, start_python

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import sys
from pathlib import Path
from tests.kit.host_plans import WithChild, chunk, plan
from engine.run.launch.supervisor import Supervisor
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
folder = RunFolder.create("run", Path(sys.argv[1]))
supervisor = Supervisor(plan(source=WithChild), folder, RunOptions())
"""
BUSY = """
list(supervisor.open())
supervisor.tell(chunk(1, range(2)))
print('open', flush=True)
supervisor.next()
"""
STARTS = """
print('start', flush=True)
list(supervisor.open())
supervisor.next()
"""


@contextlib.contextmanager
def script(folder: Path, lines: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has a Supervisor over a kernel with a child of its own; and its mark."""
    mark = new_mark()
    try:
        words = ("-c", SCRIPT + lines, folder)
        with limited(start_python(*words, env={MARK: mark}, stderr=None)) as process:
            yield process, mark
    finally:
        kill(marked(mark))


def test_no_orphan_when_the_process_of_the_run_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, BUSY) as (run, mark):
        assert run.stdout is not None
        assert run.stdout.readline() == "open\n"
        # the run, a template, two Workers, a reward function of one, and its keeper
        assert len(marked(mark)) == 6
        run.kill()
        run.wait()
        require_gone(mark)
        require_no_sockets(tmp_path)


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_no_orphan_when_it_is_killed_while_it_starts_them(tmp_path: Path, others: int) -> None:
    with script(tmp_path, STARTS) as (run, mark):
        assert run.stdout is not None
        run.stdout.readline()
        while len(marked(mark)) < 1 + others:
            assert run.poll() is None
        run.kill()
        run.wait()
        require_gone(mark)
