"""What holds for all tests: output is as wide as where nobody says how wide a screen is, and Ctrl-C
ends what they start, also where a shell has started the tests in the background.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.kit import forked, root_logs
from tests.kit.cost_records import cost_records
from tests.kit.parallel_tests import parallel_tests
from tests.kit.turns import example_count, left_out

for _name in ("COLUMNS", "LINES", "NO_COLOR"):
    os.environ.pop(_name, None)
    # Importing readline, as pytest does, sets the first two behind the back of os.environ, and
    # processes that tests start would have them.
    os.unsetenv(_name)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "tests",
    max_examples=example_count(100),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that must be free; all tests together leave less than half of that."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which a process that is started inherits
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost, where the environment asks for it; fork what they start; capture the
    logs of the root alone; keep folders of tests in memory, where there is room.
    """
    gc.disable()  # until all is collected: nearly all of that stays
    _keep_folders_in_memory()
    forked.install()
    root_logs.install()
    # .ci/run tells each of its parts its name: two of them run the same marker.
    records = cost_records(suite=os.environ.get("CI_PART") or config.getoption("-m") or "all")
    for plugin in filter(None, (records, parallel_tests())):
        config.pluginmanager.register(plugin)


def _keep_folders_in_memory() -> None:
    """Runs wait until the disk has their checkpoints: a hundredth of a second for each file."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
        folder = _MEMORY / f"t{os.getuid()}"  # short: the path of a socket has 107 bytes
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that only repeat what others prove, and whose turn it is not."""
    others = set(left_out(items))
    if others:
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage: runs ask for many."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_interpreters() -> Iterator[None]:
    """Of all that the test starts, for what a fork would show otherwise."""
    with forked.own_interpreters():
        yield
