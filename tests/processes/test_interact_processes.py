"""What the environments of `interact` leave: no process, however their kernel ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import KernelError
from tests.kit.environments import Failing, HangingIn
from tests.kit.interact_kernels import open_interact, run_episodes, with_arguments
from tests.kit.kernels import prompt_chunk
from tests.kit.nothing_left import descriptors, require_ended, require_gone
from tests.kit.processes import MARK, kill, limited, marked, new_mark, start_python

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import sys
from tests.kit.environments import HangingIn
from tests.kit.interact_kernels import open_interact, with_arguments
from tests.kit.kernels import prompt_chunk
environment = with_arguments(HangingIn, call="step")
kernel = open_interact(sys.argv[1], environment, inproc=False, n=2)
kernel.interrupt()
running = kernel.run(prompt_chunk(["abc", "hello"]))
next(running)
print("open", flush=True)
list(running)
"""
PROCESSES = 1 + 2 + 4
"""The script, a keeper with its template, and four environments."""


def base_of(folder: Path) -> str:
    return str(folder / "model")


def test_no_environment_outlives_the_process_of_its_kernel(tiny_folder: Path) -> None:
    mark = new_mark()
    try:
        words = ("-c", SCRIPT, base_of(tiny_folder))
        with limited(start_python(*words, env={MARK: mark}, stderr=None)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            while len(marked(mark)) < PROCESSES:
                assert process.poll() is None
            process.kill()
            process.wait()
            require_gone(mark)
    finally:
        kill(marked(mark))


def test_no_environment_is_left_when_the_kernel_closes_in_the_middle(tiny_folder: Path) -> None:
    open_interact(base_of(tiny_folder)).close()
    before = descriptors()
    environment = with_arguments(HangingIn, call="step")
    kernel = open_interact(base_of(tiny_folder), environment, inproc=False, n=2)
    kernel.interrupt()
    running: Any = kernel.run(prompt_chunk(["abc", "hello"]))
    next(running)
    pool: Any = kernel._pool
    while len(pool.pids()) < PROCESSES - 1:
        pool.wait(1.0)
    pids = pool.pids()
    kernel.close()
    require_ended(pids)
    running.close()
    assert descriptors() == before


def test_no_environment_is_left_after_an_error(tiny_folder: Path) -> None:
    how = {"n": 8, "retries": 0, "on_error": "stop"}
    kernel = open_interact(base_of(tiny_folder), Failing, inproc=False, **how)
    with pytest.raises(KernelError, match="the lamp went out"):
        run_episodes(kernel, ["abc", "hello", "zz"])
    pids = kernel._pool.pids()  # type: ignore[attr-defined]
    kernel.close()
    require_ended(pids)
