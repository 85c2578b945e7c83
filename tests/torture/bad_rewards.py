"""Reward functions that each misbehave in one way, with their messages; rewards.py runs them.

Each misbehaves if a row's prompt ends with `!`, and is right for all other rows. Forged answers,
metrics and most of what is no list of numbers: tests/processes/test_scoring_faults.py.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

Bad = Callable[[list[str], Any], Any]
BAD: dict[str, tuple[str, Bad]] = {}
"""Name -> a regular expression of its message (empty: harmless) and what it does."""


BROKE = "broke the connection to its process: "


def good(completions: list[str]) -> list[float]:
    """What a row is worth where nothing is wrong."""
    return [0.5 + len(text) % 7 for text in completions]


def bad(said: str) -> Callable[[Bad], Callable[..., Any]]:
    """One more kind; the name is then that of its reward function."""

    def keep(does: Bad) -> Callable[..., Any]:
        def reward(prompts: list[str], completions: list[str], log_metric: Any, **_: Any) -> Any:
            wrong = any(prompt.endswith("!") for prompt in prompts)
            return does(completions, log_metric) if wrong else good(completions)

        BAD[does.__name__] = said, does
        reward.__name__, reward.__qualname__ = does.__name__, does.__qualname__
        return reward

    return keep


def any_kind(prompts: list[str], completions: list[str], log_metric: Any, **columns: Any) -> Any:
    """What the last prompt names, `raises!`."""
    kind, mark, _ = prompts[-1].partition("!")
    return BAD[kind][1](completions, log_metric) if mark else good(completions)


# --- what it raises -------------------------------------------------------------------------------


@bad("raised KeyboardInterrupt")
def interrupts(*_: Any) -> Any:
    raise KeyboardInterrupt


@bad("raised RecursionError")
def recurses(*_: Any) -> Any:
    def deeper() -> Any:
        return deeper()

    return deeper()


@bad("raised ExceptionGroup")
def raises_a_group(*_: Any) -> Any:
    raise ExceptionGroup("many", [ValueError(str(i)) for i in range(1000)])


@bad("raised MemoryError")
def wants_more_memory_than_there_is(*_: Any) -> Any:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), now + (256 << 20)))
    return [bytearray(1 << 40)]


# --- how its process ends -------------------------------------------------------------------------


@bad("timed out after")  # a signal that asks a run to stop means nothing to the keeper
def ends_its_keeper(*_: Any) -> Any:
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


@bad("")
def stops_its_keeper(completions: list[str], *_: Any) -> Any:
    os.kill(os.getppid(), signal.SIGSTOP)
    return good(completions)


# --- time -----------------------------------------------------------------------------------------


@bad("timed out")
def hears_no_signal(*_: Any) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            signal.pause()


@bad("timed out")
def awaits_for_ever(*_: Any) -> Any:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    return waits()


# --- what a single expression does ----------------------------------------------------------------


LOST = "lost its process, which was killed by "
SIMPLE: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "raises": ("raised ZeroDivisionError: division by zero", lambda texts: 1 / 0),
    "raises_with_half_a_character": ("raised UnicodeEncodeError", lambda texts: "\udc80".encode()),
    "imports_what_is_not_there": (
        "raised ModuleNotFoundError: No module named 'no_such_library'",
        lambda texts: importlib.import_module("no_such_library"),
    ),
    "kills_its_group": (LOST + "SIGKILL|timed out", lambda texts: os.killpg(0, signal.SIGKILL)),
    "crashes": (LOST + "SIGSEGV", lambda texts: ctypes.string_at(0)),
    "stops_itself": ("timed out", lambda texts: os.kill(os.getpid(), signal.SIGSTOP)),
    "returns_one_text": ("returned str", lambda texts: "1" * len(texts)),
    "returns_decimals": ("", lambda texts: tuple(Decimal("0.5") for _ in texts)),
}


def _simple(name: str, make: Callable[[list[str]], Any]) -> Bad:
    def does(completions: list[str], *_: Any) -> Any:
        return make(completions)

    does.__name__ = does.__qualname__ = name
    return does


globals().update({name: bad(said)(_simple(name, make)) for name, (said, make) in SIMPLE.items()})


def returns_nones(prompts: list[str], completions: list[str], **columns: Any) -> Any:
    """For its row alone, as None is an answer like any other."""
    worth = zip(prompts, good(completions), strict=True)
    return [None if prompt.endswith("!") else number for prompt, number in worth]


BAD["returns_nones"] = "returned None", lambda completions, log_metric: [None] * len(completions)


# --- metrics --------------------------------------------------------------------------------------


@bad("logged a metric that 'm10000' is number 10001 of one call")
def logs_without_end(completions: list[str], log_metric: Any) -> Any:
    for number in range(20_000):
        log_metric(f"m{number}", 1.0)


# --- descriptors and forks ------------------------------------------------------------------------


@bad(BROKE + r"process \d+, which it had forked, answered, too|lost its process")
def forks_and_only_the_child_answers(completions: list[str], *_: Any) -> Any:
    if os.fork() == 0:
        return [9.0] * len(completions)
    signal.pause()


def stay() -> None:
    """A child, a session, a daemon that holds stdout, one that ignores SIGTERM, and threads."""
    code = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    asleep = [sys.executable, "-c", code]
    subprocess.Popen(asleep)
    subprocess.Popen(asleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("a daemon", flush=True)
            os.execv(sys.executable, asleep)
        os._exit(0)
    threading.Thread(target=threading.Event().wait).start()


@bad("lost its process, as the one that watches over it was killed")
def leaves_helpers_and_kills_its_keeper(*_: Any) -> Any:
    stay()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@bad("timed out")
def forks_without_end(*_: Any) -> Any:
    alive = 0
    while True:
        if alive < 50:
            alive += 1
            if os.fork() == 0:
                os.setsid()
                signal.pause()
        else:
            signal.pause()


# --- its surroundings -----------------------------------------------------------------------------


@bad("")
def changes_its_surroundings(completions: list[str], *_: Any) -> Any:
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    sys.path.clear()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.disable()
    return good(completions)


@bad("")
def changes_its_arguments(completions: list[str], *_: Any) -> Any:
    values = good(completions)
    completions.clear()
    return values


@bad("lost its process, which ended with exit code 1|raised|broke the connection")
def patches_the_library(completions: list[str], *_: Any) -> Any:
    socket.socket.sendall = socket.socket.send = lambda *_: None  # type: ignore[method-assign,assignment]
    builtins.print = json.dumps = struct.pack = None  # type: ignore[assignment]
    os.getpid = lambda: 1
    return good(completions)
