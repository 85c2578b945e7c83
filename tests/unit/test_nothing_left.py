"""tests/kit/nothing_left.py: what it says is left in shared memory."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.nothing_left import left_in_shared_memory, shared_memory
from tests.kit.processes import limited, wait_for


@pytest.fixture
def name() -> Iterator[str]:
    """A name in shared memory that nobody has."""
    path = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
    yield path.name
    path.unlink(missing_ok=True)


def test_a_name_that_another_process_holds_is_left_only_once_that_has_ended(name: str) -> None:
    before = shared_memory()
    command = ["sh", "-c", f"exec 3> /dev/shm/{name}; echo ready; read line"]
    pipe = subprocess.PIPE
    with limited(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) as holder:
        wait_for(holder, "ready")
        assert name in shared_memory()
        assert name not in left_in_shared_memory(before)
    assert name in left_in_shared_memory(before)


def test_a_name_that_this_process_holds_is_left(name: str) -> None:
    before = shared_memory()
    with (Path("/dev/shm") / name).open("w"):
        assert name in left_in_shared_memory(before)
    assert name not in left_in_shared_memory(before | {name})
