"""Environments as users write them; a template imports this file, so it imports little."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

SLEEPS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(1000)"


def message(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


class Obedient:
    """Does what it is told, a word of Python-like commands."""

    def __init__(self, greeting: str = "hello") -> None:
        random.random()
        self.greeting = greeting
        self.steps = 0
        self.pid = os.getpid()
        self._hidden = 1
        self.holds_no_json = {1, 2}

    def reset(self, seed: int, question: str = "none") -> str:
        self.steps = 0
        self.drawn = random.random()
        self.seed = seed
        return f"{self.greeting} {question}"

    def step(self, message: dict[str, Any]) -> Any:
        self.steps += 1
        word, _, rest = message["content"].partition(" ")
        return getattr(self, f"do_{word}")(rest)

    def finish(self, reason: str) -> float:
        self.reason = reason
        return 2.5

    def do_say(self, rest: str) -> Any:
        return rest, 0.5, False

    def do_pid(self, rest: str) -> Any:
        return str(os.getpid()), None, False

    def do_draw(self, rest: str) -> Any:
        return {"messages": str(random.random())}

    def do_print(self, rest: str) -> Any:
        print(rest)
        return [], None, True

    def do_raise(self, rest: str) -> Any:
        raise ValueError(rest)

    def do_hang(self, rest: str) -> Any:
        time.sleep(1000)

    def do_abort(self, rest: str) -> Any:
        print("the last words")
        os.abort()

    def do_exit(self, rest: str) -> Any:
        os._exit(int(rest))

    def do_kill(self, rest: str) -> Any:
        """Kill what is above it: its template, or that one's keeper."""
        pid = os.getppid()
        if rest == "keeper":
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        time.sleep(1000)

    def do_garbage(self, rest: str) -> Any:
        for descriptor in range(3, 40):
            try:
                os.write(descriptor, b"\x00garbage" * 9)
            except OSError:
                continue
        return "", None, False

    def do_fork(self, rest: str) -> Any:
        """Return in two processes."""
        pid = os.fork()
        if pid > 0:
            os.waitpid(pid, 0)
        return "from one of two", None, False

    def do_return(self, rest: str) -> Any:
        """Return a value of this kind."""
        values: dict[str, Any] = {
            "large": ("x" * (65 << 20), None, False),
            "set": ([{"role": "user", "content": "x", "more": {1}}], None, False),
            "nan": ("x", float("nan"), False),
            "text": ("x", "1.0", False),
            "done": ("x", None, "no"),
            "none": None,
            "role": ([{"content": "x"}], None, False),
            "content": ([{"role": "tool", "content": 1}], None, False),
            "surrogate": ("\ud800", None, False),
            "tool": ([{"role": "tool", "content": "x", "tool_call_id": "7"}], 1, True),
        }
        return values[rest]

    def do_children(self, rest: str) -> Any:
        """Start a child, and one in a session of its own; their pids, with its own."""
        pids = [os.getpid()]
        for has_session in (False, True):
            child = subprocess.Popen(
                [sys.executable, "-c", SLEEPS],
                stdout=subprocess.PIPE,
                start_new_session=has_session,
            )
            assert child.stdout is not None
            pids.append(int(child.stdout.readline()))
        return json.dumps(pids), None, False

    def do_allocate(self, rest: str) -> Any:
        bytearray(int(rest) << 20)
        return "allocated", None, False

    def do_compute(self, rest: str) -> Any:
        while True:
            pass

    def do_open(self, rest: str) -> Any:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(rest))]
        return str(len(files)), None, False


class AsyncObedient(Obedient):
    """The same, whose methods are coroutines, with calls that wait for one another."""

    meeting: asyncio.Event | None = None

    async def reset(self, seed: int, question: str = "none") -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return Obedient.reset(self, seed, question)

    async def step(self, message: dict[str, Any]) -> Any:
        returned = Obedient.step(self, message)
        return await returned if asyncio.iscoroutine(returned) else returned

    async def close(self) -> None:
        print("closed")

    async def do_wait(self, rest: str) -> Any:
        """Wait until another episode sets what all of this process share."""
        AsyncObedient.meeting = AsyncObedient.meeting or asyncio.Event()
        await AsyncObedient.meeting.wait()
        return "met", None, True

    async def do_meet(self, rest: str) -> Any:
        AsyncObedient.meeting = AsyncObedient.meeting or asyncio.Event()
        AsyncObedient.meeting.set()
        return "set", None, True


class Reluctant(Obedient):
    """Takes long to close."""

    def close(self) -> None:
        time.sleep(1000)


class NotingEnds(Obedient):
    """Writes down what is called, a line each, in a file that all instances share."""

    def __init__(self, record: str) -> None:
        super().__init__()
        self._record = record

    def note(self, call: str) -> None:
        with open(self._record, "a") as record:
            record.write(f"{call}\n")

    def reset(self, seed: int, question: str = "none") -> str:
        self.note("reset")
        if question == "q13":
            raise ValueError("an unlucky question")
        return super().reset(seed, question)

    def step(self, message: dict[str, Any]) -> Any:
        self.note(f"step {message['content'].partition(' ')[0]}")
        return super().step(message)

    def finish(self, reason: str) -> float:
        self.note(f"finish {reason}")
        if self.ending == "raise":
            raise ValueError("no end is good")
        if self.ending == "hang":
            time.sleep(1000)
        return 2.5

    def close(self) -> None:
        self.note("close")

    ending = ""

    def do_end(self, rest: str) -> Any:
        """What `finish` is to do."""
        self.ending = rest
        return "noted", None, False

    def do_await(self, rest: str) -> Any:
        """Wait until this file is there."""
        while not os.path.exists(rest):
            os.sched_yield()
        return "there", None, False


class Unreset(Obedient):
    """Its `reset` takes nothing."""

    def reset(self) -> None:  # type: ignore[override]
        return None


class Unsteppable:
    """Has no `step`."""

    def reset(self) -> None:
        return None


def refuses() -> Any:
    """A function that makes no environment."""
    raise RuntimeError("out of order")
