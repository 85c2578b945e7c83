"""The watchdog's thread: a hang is ended, whatever goes wrong as it is told."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from engine.run.loop.watchdog import Watchdog

pytestmark = pytest.mark.timeout(60)


def hang_within(watchdog: Watchdog) -> None:
    never = threading.Event()
    with watchdog:
        while not never.wait(0.01):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hang_that_cannot_be_described_is_ended_all_the_same() -> None:
    def describe() -> NoReturn:
        raise RuntimeError("dictionary changed size during iteration")

    watchdog = Watchdog(0.2, describe)
    with pytest.raises(KeyboardInterrupt):
        hang_within(watchdog)
    assert watchdog.hung == "nothing has moved for 0.2 s"
