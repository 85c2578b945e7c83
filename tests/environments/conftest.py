"""Environments of other packages, through the pool, in an interpreter that has these packages.

Run by scripts/test-environments, which makes that interpreter's environment and names it in
DATAFLOW_ENVIRONMENTS. A test whose package it lacks is skipped with that reason.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operators.environments import AnyEnvironment, isolated
from operators.kernels.environments.pool import ProcessPool
from tests.environments.episodes import PooledEpisode
from tests.environments.server_process import ServerProcess

_NAMED = "DATAFLOW_ENVIRONMENTS"
collect_ignore_glob = [] if _NAMED in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of the environments."""
    return os.environ[_NAMED]


@pytest.fixture(autouse=True)
def _has_package(request: pytest.FixtureRequest, python: str) -> None:
    """Skip the tests of a module whose `PACKAGE` is not installed there."""
    package = getattr(request.module, "PACKAGE", None)
    if package is None:
        return
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", code], timeout=60).returncode:
        pytest.skip(f"{package} is not installed for {python} (requirements/environments.txt)")


@pytest.fixture(scope="session")
def begin(python: str) -> Iterator[Callable[..., PooledEpisode]]:
    """Begins an episode of an environment. Episodes of the same one share a pool: loading OpenEnv
    takes seconds.
    """
    pools: dict[str, ProcessPool] = {}
    numbers = itertools.count()

    def begin_episode(
        environment: AnyEnvironment, row: dict[str, Any] | None = None, seed: int = 3
    ) -> PooledEpisode:
        placed: Any = isolated(environment, python=python)
        key = repr(placed)
        if key not in pools:
            pools[key] = ProcessPool(placed, name="tested", reset_timeout=300, step_timeout=300)
        return PooledEpisode(pools[key], row or {}, seed, next(numbers))

    yield begin_episode
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def serve(python: str) -> Iterator[Callable[..., ServerProcess]]:
    """A server of tests/environments/servers on a port of the loopback; one for all tests."""
    servers: dict[tuple[str, ...], ServerProcess] = {}

    def find_or_start(name: str, *arguments: str) -> ServerProcess:
        key = (name, *arguments)
        if key not in servers:
            servers[key] = ServerProcess(python, name, *arguments)
        return servers[key]

    yield find_or_start
    for server in servers.values():
        server.end()
