"""The process that watches another one from outside. Its arguments are those of `main`.

If no beats come for too long, it says what the process was doing and where it stands, and kills it
if told to. Owns: this judgement. Does not own: beats and the board (watchdog.py). Imports little,
and the standard library alone: one is started with each run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

BOARD = 1024
"""Bytes of memory in which the watched process says what is under way."""
BEAT, INTERRUPTED = b".", b"!"
_DEATH_SIGNAL = 1
_ROUND = 0.5
_STOOD_STILL = 4.0
"""Seconds of a round after which this process itself was stopped: no silence counts."""
_FIRST_LINE, _STACKS = 20.0, 1.0
"""Seconds that stacks are waited for: until the first line, and from then on."""


def main(
    beats: int, board: int, stacks: int, number: int, limit: float, to_end: float, kills: bool
) -> None:
    """Watch until the run ends or hangs."""
    watched = os.getppid()
    _end_with_it()
    poll = select.poll()
    poll.register(beats, select.POLLIN)
    silent, before, why = 0.0, time.monotonic(), "in code that holds the interpreter's lock"
    while silent <= limit:
        ready = poll.poll(min(_ROUND, limit / 4) * 1e3)
        now = time.monotonic()
        beats_read = os.read(beats, 4096) if ready else b""
        if (ready and not beats_read) or os.getppid() != watched:
            return
        if INTERRUPTED in beats_read:
            limit, why = to_end, "in code that cannot be interrupted"
        if beats_read:
            silent = 0.0
        elif not _was_stopped(watched, now - before):
            silent += now - before
        before = now
    _tell(watched, board, stacks, number, f"{limit:g} s", why, kills=kills)
    if kills:
        os.kill(watched, signal.SIGKILL)


def _end_with_it() -> None:
    """On Linux: SIGKILL for this process when the watched one ends, also if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def _tell(
    watched: int, board: int, stacks: int, number: int, silent: str, why: str, *, kills: bool
) -> None:
    shown, _, _ = os.pread(board, BOARD, 0).partition(b"\0")
    doing = shown.decode(errors="replace") or "something unknown"
    ended = "The process is ended; dataflow resume goes on from the last checkpoint"
    end = ended if kills else "It goes on"
    message = f"nothing has moved for {silent}: {doing}, {why}. {end}. Fix: see where it stands:\n"
    with contextlib.suppress(OSError):  # nobody may be reading
        os.write(2, message.encode(errors="backslashreplace") + _stacks(watched, stacks, number))


def _stacks(watched: int, stacks: int, number: int) -> bytes:
    """Its threads' stacks, which it writes at C level, until nothing comes for a second. The first
    line may take longer: where others keep the machine busy, it has to get a core.
    """
    poll = select.poll()
    poll.register(stacks, select.POLLIN)
    os.kill(watched, number)
    text, patience = b"", _FIRST_LINE
    while len(text) < 1 << 16 and poll.poll(patience * 1e3) and (came := os.read(stacks, 1 << 16)):
        text += came
        patience = _STACKS
    return text or b"(it does not say)\n"


def _was_stopped(pid: int, seconds: float) -> bool:
    """Whether that process, or this one, was stopped in a round of so many seconds."""
    if seconds > _STOOD_STILL:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"Tt"
    except OSError:
        return False


if __name__ == "__main__":
    beats, board, stacks, number = map(int, sys.argv[1:5])
    main(beats, board, stacks, number, float(sys.argv[5]), float(sys.argv[6]), sys.argv[7] == "1")
