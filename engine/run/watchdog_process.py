"""The process that watches another one from outside. Its arguments are those of `main`.

Where beats stay away for so long that its threads cannot run any more, it says what the process was
doing and where it stands, and ends it if it is to.

Owns: that judgement. Does not own: beats and the board (watchdog.py). Imports the standard
library alone, and little of it: one is started with each run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

BOARD = 1024
"""Bytes of what is under way."""
BEAT, INTERRUPTED = b".", b"!"
_ROUND = 0.5
_STOOD_STILL = 4.0
"""Seconds of one round after which this process was itself stopped, and nobody's silence counts."""
_STACKS = 1.0


def main(
    beats: int, board: int, stacks: int, number: int, limit: float, to_end: float, kills: bool
) -> None:
    """Until the run ends, or does not move."""
    watched = os.getppid()
    poll = select.poll()
    poll.register(beats, select.POLLIN)
    silent, before, why = 0.0, time.monotonic(), "in code that holds the interpreter's lock"
    while silent <= limit:
        ready = poll.poll(min(_ROUND, limit / 4) * 1e3)
        now = time.monotonic()
        said = os.read(beats, 4096) if ready else b""
        if (ready and not said) or os.getppid() != watched:
            return
        if INTERRUPTED in said:
            limit, why = to_end, "in code that cannot be interrupted"
        if said:
            silent = 0.0
        elif not _stood_still(now - before, watched):
            silent += now - before
        before = now
    _tell(watched, board, stacks, number, f"{limit:g} s", why, kills=kills)
    if kills:
        os.kill(watched, signal.SIGKILL)


def _tell(
    watched: int, board: int, stacks: int, number: int, silent: str, why: str, *, kills: bool
) -> None:
    """On standard error; nobody may read it."""
    doing = os.pread(board, BOARD, 0).rstrip(b"\0").decode(errors="replace") or "something unknown"
    end = (
        "The process is ended; dataflow resume goes on from the last checkpoint"
        if kills
        else "It goes on"
    )
    told = f"nothing has moved for {silent}: {doing}, {why}. {end}. Fix: see where it stands:\n"
    with contextlib.suppress(OSError):
        os.write(2, told.encode(errors="backslashreplace") + _stacks(watched, stacks, number))


def _stacks(watched: int, stacks: int, number: int) -> bytes:
    """Those of its threads, which it writes at C level, until nothing more comes for a second."""
    poll = select.poll()
    poll.register(stacks, select.POLLIN)
    os.kill(watched, number)
    found = b""
    while len(found) < 1 << 16 and poll.poll(_STACKS * 1e3) and (came := os.read(stacks, 1 << 16)):
        found += came
    return found or b"(it does not say)\n"


def _stood_still(seconds: float, watched: int) -> bool:
    """Whether this process, or the one that it watches, was stopped in a round of so many."""
    return seconds > _STOOD_STILL or _is_stopped(watched)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"Tt"
    except OSError:
        return False


if __name__ == "__main__":
    beats, board, stacks, number = map(int, sys.argv[1:5])
    main(beats, board, stacks, number, float(sys.argv[5]), float(sys.argv[6]), sys.argv[7] == "1")
