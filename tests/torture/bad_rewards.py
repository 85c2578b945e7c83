"""Reward functions that each misbehave in one way, with their messages; rewards.py runs them.

Each misbehaves if a row's prompt ends with `!`, and is right for all other rows.
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
import re
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
def interrupts(completions: list[str], log_metric: Any) -> Any:
    raise KeyboardInterrupt


class Odd(BaseException):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent anywhere")


@bad(r"raised Odd: \(its str raised RuntimeError\)")
def raises_what_has_no_text(completions: list[str], log_metric: Any) -> Any:
    raise Odd


@bad("raised ValueError: xxxxx")
def raises_a_long_text(completions: list[str], log_metric: Any) -> Any:
    raise ValueError("x" * 100_000_000)


@bad(r"raised ValueError: \\x1b\[2Jred\\x07")
def raises_what_a_terminal_obeys(completions: list[str], log_metric: Any) -> Any:
    raise ValueError("\x1b[2Jred\x07\nsecond line")


@bad("raised RecursionError")
def recurses(completions: list[str], log_metric: Any) -> Any:
    def deeper() -> Any:
        return deeper()

    return deeper()


@bad("raised ExceptionGroup")
def raises_a_group(completions: list[str], log_metric: Any) -> Any:
    raise ExceptionGroup("many", [ValueError(str(i)) for i in range(1000)])


@bad("raised MemoryError")
def wants_more_memory_than_there_is(completions: list[str], log_metric: Any) -> Any:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), now + (256 << 20)))
    return [bytearray(1 << 40)]


# --- how its process ends -------------------------------------------------------------------------


@bad("timed out after")  # a signal that asks a run to stop means nothing to the keeper
def ends_its_keeper(completions: list[str], log_metric: Any) -> Any:
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


@bad("lost its process, as the one that watches over it was killed")
def kills_its_keeper(completions: list[str], log_metric: Any) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@bad("")
def stops_its_keeper(completions: list[str], log_metric: Any) -> Any:
    os.kill(os.getppid(), signal.SIGSTOP)
    return good(completions)


# --- time -----------------------------------------------------------------------------------------


@bad(r"timed out after [\d.]+ s(.|\n)*in loops")
def loops(completions: list[str], log_metric: Any) -> Any:
    while True:
        pass


@bad(r"timed out after [\d.]+ s(.|\n)*in holds_the_lock")
def holds_the_lock(completions: list[str], log_metric: Any) -> Any:
    return re.match("(a+)+$", "a" * 60 + "b")


@bad("timed out")
def hears_no_signal(completions: list[str], log_metric: Any) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            signal.pause()


@bad("timed out")
def awaits_for_ever(completions: list[str], log_metric: Any) -> Any:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    return waits()


@bad("timed out")
def waits_for_a_lock(completions: list[str], log_metric: Any) -> Any:
    lock = threading.Lock()
    with lock, lock:
        return None


# --- what a single expression does ----------------------------------------------------------------


class Endless(list[float]):
    def __iter__(self) -> Any:
        while True:
            yield 1.0


LOST = "lost its process, which was killed by "
SIMPLE: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "raises": ("raised ZeroDivisionError: division by zero", lambda texts: 1 / 0),
    "exits": ("raised SystemExit: 0", lambda texts: sys.exit(0)),
    "raises_with_half_a_character": ("raised UnicodeEncodeError", lambda texts: "\udc80".encode()),
    "imports_what_is_not_there": (
        "raised ModuleNotFoundError: No module named 'no_such_library'",
        lambda texts: importlib.import_module("no_such_library"),
    ),
    "ends_at_once": ("lost its process, which ended with exit code 0", lambda texts: os._exit(0)),
    "kills_itself": (LOST + "SIGKILL", lambda texts: os.kill(os.getpid(), signal.SIGKILL)),
    "kills_its_group": (LOST + "SIGKILL|timed out", lambda texts: os.killpg(0, signal.SIGKILL)),
    "crashes": (LOST + "SIGSEGV", lambda texts: ctypes.string_at(0)),
    "aborts": (LOST + "SIGABRT", lambda texts: os.abort()),
    "stops_itself": ("timed out", lambda texts: os.kill(os.getpid(), signal.SIGSTOP)),
    "returns_too_few": ("returned 0 values for 1 completions", lambda texts: good(texts)[1:]),
    "returns_too_many": ("returned 2 values for 1 completions", lambda texts: [*good(texts), 1.0]),
    "returns_a_generator": ("returned generator", lambda texts: (1.0 for _ in texts)),
    "returns_a_dict": ("returned dict", lambda texts: dict(enumerate(good(texts)))),
    "returns_nothing": ("returned NoneType", lambda texts: None),
    "returns_nan": ("returned nan as value", lambda texts: [float("nan")] * len(texts)),
    "returns_inf": ("returned inf as value", lambda texts: [Decimal("Infinity")] * len(texts)),
    "returns_more_than_a_float32": (
        r"returned 1e\+300 as value",
        lambda texts: [1e300] * len(texts),
    ),
    "returns_a_huge_int": (r"returned 1000000.* as value", lambda texts: [10**1000] * len(texts)),
    "returns_texts": ("returned '1.0' as value", lambda texts: ["1.0"] * len(texts)),
    "returns_one_text": ("returned str", lambda texts: "1" * len(texts)),
    "returns_nested_lists": (r"returned \[1.0\] as value", lambda texts: [[1.0]] * len(texts)),
    "returns_a_matrix": (
        r"returned an array of shape \(1, 1\)",
        lambda texts: numpy().ones((len(texts), 1)),
    ),
    "returns_what_lies_about_its_length": (
        "of length 1 with another number of values",
        lambda texts: Endless(good(texts)),
    ),
    "returns_bools": ("", lambda texts: [True] * len(texts)),
    "returns_numpy": ("", lambda texts: numpy().ones(len(texts), "float16")),
    "returns_decimals": ("", lambda texts: tuple(Decimal("0.5") for _ in texts)),
}


def numpy() -> Any:
    return importlib.import_module("numpy")


def _simple(name: str, make: Callable[[list[str]], Any]) -> Bad:
    def does(completions: list[str], log_metric: Any) -> Any:
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


@bad(r"logged a metric that has the name 'a\\nb\\x1b'")
def logs_a_name_with_control_characters(completions: list[str], log_metric: Any) -> Any:
    log_metric("a\nb\x1b", 1.0)
    return good(completions)


@bad("logged a metric that has a name of type int")
def logs_a_name_that_is_no_text(completions: list[str], log_metric: Any) -> Any:
    with contextlib.suppress(Exception):
        log_metric(1, 1.0)
    return good(completions)


@bad("logged a metric that 'x' has the value nan")
def logs_nan(completions: list[str], log_metric: Any) -> Any:
    log_metric("x", float("nan"))
    return good(completions)


@bad("logged a metric that has the name 'mean', which every reward has already")
def logs_a_name_that_is_taken(completions: list[str], log_metric: Any) -> Any:
    log_metric("mean", 1.0)
    return good(completions)


@bad("logged a metric that 'm10000' is number 10001 of one call")
def logs_without_end(completions: list[str], log_metric: Any) -> Any:
    for number in range(20_000):
        log_metric(f"m{number}", 1.0)


# --- descriptors and forks ------------------------------------------------------------------------


def sockets() -> list[int]:
    descriptors = []
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                descriptors.append(descriptor)
    return descriptors


@bad("lost its process, which ended with exit code 1|closed the connection to its process")
def closes_everything(completions: list[str], log_metric: Any) -> Any:
    os.closerange(0, 4096)
    return good(completions)


@bad(BROKE + "b'rubbish")
def writes_rubbish_everywhere(completions: list[str], log_metric: Any) -> Any:
    for descriptor in range(1, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"rubbish\x00\xff" * 50)
    return good(completions)


def forge(number: int, size: int, body: bytes, pid: int | None = None) -> None:
    for descriptor in sockets():
        with contextlib.suppress(OSError):
            head = struct.pack("<4sIQQ", b"dfr\x01", pid or os.getpid(), number, size)
            socket.socket(fileno=os.dup(descriptor)).sendall(head + body)


@bad(BROKE + "an answer to call 77 came")
def answers_another_call(completions: list[str], log_metric: Any) -> Any:
    forge(77, 1, b"\x80")
    return good(completions)


@bad(BROKE + "an answer (of 1099511627776 bytes|to call)")
def answers_with_a_terabyte(completions: list[str], log_metric: Any) -> Any:
    for number in range(1, 9):
        forge(number, 1 << 40, b"")
    return good(completions)


@bad(BROKE + "process 1, which it had forked")
def answers_as_another(completions: list[str], log_metric: Any) -> Any:
    forge(2, 1, b"\x80", pid=1)
    return good(completions)


@bad(BROKE + r"process \d+, which it had forked, answered, too")
def forks_and_the_child_answers(completions: list[str], log_metric: Any) -> Any:
    ended, theirs = os.pipe()
    if os.fork() == 0:
        return [9.0] * len(completions)
    os.close(theirs)
    os.read(ended, 1)
    return good(completions)


@bad(BROKE + r"process \d+, which it had forked, answered, too|lost its process")
def forks_and_only_the_child_answers(completions: list[str], log_metric: Any) -> Any:
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


@bad("")
def leaves_helpers(completions: list[str], log_metric: Any) -> Any:
    stay()
    return good(completions)


@bad("lost its process, which was killed by SIGKILL")
def leaves_helpers_and_is_killed(completions: list[str], log_metric: Any) -> Any:
    stay()
    os.kill(os.getpid(), signal.SIGKILL)


@bad("lost its process, as the one that watches over it was killed")
def leaves_helpers_and_kills_its_keeper(completions: list[str], log_metric: Any) -> Any:
    stay()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@bad("timed out")
def forks_without_end(completions: list[str], log_metric: Any) -> Any:
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
def prints_megabytes(completions: list[str], log_metric: Any) -> Any:
    for descriptor in (1, 2):
        for _ in range(64):
            os.write(descriptor, b"\x1b[31mspam \xff\x00\r" * 2048 + b"\n")
    return good(completions)


@bad("")
def changes_its_surroundings(completions: list[str], log_metric: Any) -> Any:
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    sys.path.clear()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.disable()
    return good(completions)


@bad("")
def changes_its_arguments(completions: list[str], log_metric: Any) -> Any:
    values = good(completions)
    completions.clear()
    return values


@bad("lost its process, which ended with exit code 1|raised|broke the connection")
def patches_the_library(completions: list[str], log_metric: Any) -> Any:
    socket.socket.sendall = socket.socket.send = lambda *_: None  # type: ignore[method-assign,assignment]
    builtins.print = json.dumps = struct.pack = None  # type: ignore[assignment]
    os.getpid = lambda: 1
    return good(completions)
