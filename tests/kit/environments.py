"""Environments for tests, as users write them; importable by name in another process."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from dataflow.prompt_types import Message
from operators.environments import Turn
from tests.kit.run_graphs import vowels


class Chatter:
    """Answers each turn with random letters of the seed's stream, and rewards some turns."""

    longest = 12
    turns = 4

    def reset(self, seed: int, prompt: str) -> str | None:
        """Now and then adds to the prompt."""
        self._random = random.Random(f"{seed}{prompt}")
        self._turns_left = self._random.randint(1, self.turns)
        return self._letters() if self._random.random() < 0.5 else None

    def step(self, message: dict[str, Any]) -> Turn:
        """Whether it is over depends on the seed alone, the reward on what was written."""
        self._turns_left -= 1
        reward = None
        if self._random.random() < 0.7:
            reward = len(message["content"]) / 8
        answer = [{"role": "user", "content": self._letters()}]
        return Turn(messages=answer, reward=reward, done=self._turns_left <= 0)

    def finish(self, reason: str) -> float | None:
        """A reward for some reasons."""
        return {"stop": 0.5, "turns": 0.25}.get(reason)

    def _letters(self) -> str:
        count = self._random.randint(1, self.longest)
        return "".join(self._random.choices("abcdefghij ", k=count))


class Echo(Chatter):
    """Answers the first turn with as many letters as the prompt has, and ends at the second."""

    def reset(self, seed: int, prompt: str) -> None:
        self._random = random.Random(f"{seed}{prompt}")
        self._letters_left = len(prompt)

    def step(self, message: dict[str, Any]) -> Turn:
        """A reward for vowels."""
        count, self._letters_left = self._letters_left, 0
        answer = "".join(self._random.choices("abcdefghij ", k=count))
        (share,) = vowels([message["content"]])
        messages = [{"role": "user", "content": answer}]
        return Turn(messages=messages, reward=share, done=not count)


class Flood(Chatter):
    """Answers with a hundred thousand letters."""

    def step(self, message: dict[str, Any]) -> Turn:
        return Turn(messages=[{"role": "user", "content": "x" * 100_000}])


class Failing(Chatter):
    """Raises in the first turn of about one in ten episodes, by what the model wrote."""

    def step(self, message: dict[str, Any]) -> Turn:
        text = message["content"]
        if sum(map(ord, text)) % 10 == 0:
            raise RuntimeError("the lamp went out")
        return super().step(message)


class Aborting(Chatter):
    """Ends its process where the model wrote many letters."""

    def step(self, message: dict[str, Any]) -> Turn:
        if sum(map(ord, message["content"])) % 10 == 0:
            os.abort()
        return super().step(message)


class VowelTurns:
    """Three turns, each rewarded by its share of vowels; nothing here is random."""

    turns = 3

    def reset(self) -> None:
        self._turns_left = self.turns

    def step(self, message: dict[str, Any]) -> Turn:
        """Answers with the turn's first letter."""
        self._turns_left -= 1
        text = message["content"]
        answer = [{"role": "user", "content": f"[{text[:1]}]"}]
        reward = vowels(completions=[text])[0]
        return Turn(messages=answer, reward=reward, done=self._turns_left == 0)


class Talker(VowelTurns):
    """Answers each of many turns with ten letters, and says in a reward why it ended."""

    turns = 40

    def step(self, message: dict[str, Any]) -> Turn:
        turn = super().step(message)
        return Turn(messages="x" * 10, reward=turn.reward, done=turn.done)

    def finish(self, reason: str) -> float:
        return {"turns": 2.0, "length": 3.0}.get(reason, 0.0)


class Awaited(Talker):
    """For the prompt `hello`, writes a file with its last call; for others its reset waits for that
    file.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def reset(self, prompt: str) -> None:  # type: ignore[override]
        super().reset()
        self._is_first = prompt == "hello"
        while not self._is_first and not os.path.exists(self._file):
            threading.Event().wait(0.01)

    def finish(self, reason: str) -> float:
        if self._is_first:
            os.close(os.open(self._file, os.O_CREAT))
        return 1.0


class Gathered(VowelTurns):
    """Answers the first turn once so many episodes have written theirs: each leaves a file."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self._count = folder, count

    def step(self, message: dict[str, Any]) -> Turn:
        if self._turns_left == self.turns:
            file, _ = tempfile.mkstemp(dir=self._folder)
            os.close(file)
        while len(os.listdir(self._folder)) < self._count:
            threading.Event().wait(0.01)
        return super().step(message)


def first_and_last(messages: Sequence[Message]) -> list[Message]:
    """For `compact`: what the user asked, and what was answered last."""
    return [messages[0], messages[-1]]


class Lookup:
    """Knows a number for each key; the model has to ask for it, and then to say it."""

    def reset(self, seed: int, prompt: Any, key: str) -> None:
        """The number comes from the seed, so that a group has one."""
        self._number = str(random.Random(f"{key}{seed}").randint(0, 9))
        self._key = key
        self.asked = False

    def step(self, message: dict[str, Any]) -> Turn:
        text = message["content"].strip()
        if text == f"?{self._key}":
            self.asked = True
            return Turn(messages=[{"role": "user", "content": f"={self._number}\n"}])
        return Turn(reward=float(text == self._number), done=True)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: one of them.
        second: the other.
    """
    return first + second


def _next_number(folder: str) -> int:
    """Counts what happens in all processes that share a folder: 0, 1, ..."""
    number = 0
    while True:
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            number += 1
        else:
            return number


class Flaky(VowelTurns):
    """Raises in the second turn of every `every`-th episode of all that share a folder, by the
    order in which they begin.
    """

    def __init__(self, folder: str, every: int) -> None:
        self._folder = folder
        self._every = every

    def reset(self) -> None:
        super().reset()
        number = _next_number(self._folder)
        self._fails = number % self._every == self._every - 1

    def step(self, message: dict[str, Any]) -> Turn:
        if self._fails and self._turns_left < self.turns:
            raise RuntimeError("the lamp went out")
        return super().step(message)


class FlakyReset(Flaky):
    """Raises at the beginning, or begins with a long text."""

    def reset(self) -> str:  # type: ignore[override]
        super().reset()
        if self._fails:
            raise RuntimeError("no lamp")
        return "x" * 100


class HangingIn(VowelTurns):
    """Never answers a call of this name, for prompts that begin with `a`. step: the second."""

    def __init__(self, call: str) -> None:
        self._call = call

    def reset(self, prompt: str) -> None:  # type: ignore[override]
        super().reset()
        self._hangs = prompt.startswith("a")
        self._hang("reset")

    def step(self, message: dict[str, Any]) -> Turn:
        if self._turns_left < self.turns:
            self._hang("step")
        return super().step(message)

    def finish(self, reason: str) -> float:
        self._hang("finish")
        return 1.0

    def _hang(self, call: str) -> None:
        if self._hangs and call == self._call:
            threading.Event().wait()


class Sluggish(VowelTurns):
    """Takes its time in each step and at the end, and notes why it ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reason = ""

    def step(self, message: dict[str, Any]) -> Turn:
        threading.Event().wait(self._seconds)
        return super().step(message)

    def finish(self, reason: str) -> float:
        threading.Event().wait(self._seconds)
        self.reason = reason
        return 1.0


class Hooked(Chatter):
    """Calls a function of the test with each step, in the kernel's own process."""

    hook: ClassVar[Any] = None

    def step(self, message: dict[str, Any]) -> Turn:
        hook = type(self).hook
        if hook is not None:
            hook()
        return super().step(message)


class Assistant(Chatter):
    """Answers in the assistant's name, which no conversation can be continued with, where the model
    wrote many letters.
    """

    def step(self, message: dict[str, Any]) -> Turn:
        role = "assistant" if sum(map(ord, message["content"])) % 3 == 0 else "user"
        return Turn(messages=[{"role": role, "content": "so"}])
