"""`run --watch`: the page's server beside a run, which ends after it however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.page_client import PageClient, opened
from tests.kit.processes import call_python, children, ended, limited, start_python
from tests.kit.watched import watched_run

RUN = """
import sys
from pathlib import Path
from engine.cli.watch import watching

with watching(Path(sys.argv[1]), "a", wanted=True):
    sys.stdout.flush()
    sys.stdin.readline()
"""


@contextmanager
def run_beside(root: Path) -> Iterator[tuple[subprocess.Popen[str], PageClient, int]]:
    """A process that stands for a run, the page beside it, and the page's process."""
    with limited(start_python("-c", RUN, root, stdin=subprocess.PIPE)) as process:
        assert process.stdout is not None
        client = opened(process.stdout.readline(), process)
        (server,) = children(process.pid)
        yield process, client, server


def test_the_server_ends_with_a_run_that_ends(tmp_path: Path) -> None:
    with run_beside(tmp_path) as (process, page, server):
        assert page.ask(f"/?token={page.token}").headers["location"] == "/#a"
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
        assert ended(server, 20)


def test_an_open_page_keeps_the_server_until_it_is_closed(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=1)
    with run_beside(tmp_path) as (process, page, server):
        with page.stream("a") as events:
            next(events)
            process.kill()
            process.wait()
            assert process.stdout is not None
            assert process.stdout.read() == "", "whoever reads the run's output sees its end"
            assert page.json("/api/runs")[0]["name"] == "a"
            assert not ended(server, 0.0)
        assert ended(server, 30)


def test_stop_signals_are_the_runs_and_the_server_ends_with_a_killed_one(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=1)
    with run_beside(tmp_path) as (process, page, server):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            subprocess.run(["kill", f"-{number.value}", str(server)], check=True)
        assert page.json("/api/runs")[0]["name"] == "a"
        process.kill()
        process.wait()
        assert ended(server, 20)


WITHOUT = """
import sys
sys.modules["starlette"] = None
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *more: None if name == "starlette" else found(name, *more)
from engine.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_the_extra_one_error_names_it(tmp_path: Path) -> None:
    done = call_python("-c", WITHOUT, "watch", "--root", tmp_path, env={"COLUMNS": "200"})
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        "dataflow watch: needs starlette, which is not installed."
        " Fix: pip install 'dataflow-rl[ui]'."
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nobody"], "no run 'nobody' in"),
        (["--root", "nowhere"], "no folder 'nowhere'"),
        (["--port", "70000"], "expected a port from 0 to 65535"),
    ],
)
def test_what_is_not_there_is_one_error(tmp_path: Path, words: list[str], problem: str) -> None:
    watched_run(tmp_path / "runs" / "some", steps=1)
    command = "import sys; from engine.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {"COLUMNS": "200"}
    done = call_python("-c", command, "watch", *words, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert problem in done.stderr
    assert sys.executable not in done.stderr
