"""Supervisors of a test's own plan, whose Workers start fast."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.run.launch.supervisor import Supervisor
from tests.kit.nothing_left import (
    descriptors,
    require_no_sockets,
    require_nothing_in_shared_memory,
    shared_memory,
)
from tests.kit.processes import children

Start = Callable[..., contextlib.AbstractContextManager[Supervisor]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Opens a Supervisor; afterwards no process, descriptor or name of it may be left."""

    @contextlib.contextmanager
    def started(planned: Plan, **options: Any) -> Iterator[Supervisor]:
        with RunFolder.create("run", tmp_path) as folder:
            supervisor = Supervisor(planned, folder, RunOptions(**options))
            try:
                supervisor.wait_until_open = list(supervisor.open())  # type: ignore[attr-defined]
                yield supervisor
            finally:
                supervisor.close()

    gc.collect()  # else descriptors that an earlier test left are closed at any time
    before, names = descriptors(), shared_memory()
    yield started
    assert not children()
    assert descriptors() == before
    require_nothing_in_shared_memory(names)
    require_no_sockets(tmp_path)
