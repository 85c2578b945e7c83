"""The calls of one episode's environment, and its answers as JSON can hold them.

Owns: what is called for `reset`, `step` and `finish`, in which order; the form of each answer; what
cannot be sent. Does not own: where the calls run (episode.py, shared.py, the pool of one process),
checks of messages (the pool, as no process is trusted).

A call is a generator of functions without arguments: whoever runs it calls each and sends back what
that returned, awaited where it can be.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from typing import Any

from .faults import AnswerRefused, describe_error, describe_value
from .frames import LARGEST_REPLY

Calls = Generator[Callable[[], Any], Any, "dict[str, Any]"]
_LARGEST_REWARD = 3.4028234663852886e38  # the largest float32, the type in which rewards travel
_DEPTH = 40
"""Most levels of a value that are looked into for the part that JSON cannot hold."""


class EpisodeCalls:
    """An environment, made with its first episode and reset for the next ones."""

    def __init__(self, factory: Any, seed_generators: Callable[[int], None] | None) -> None:
        """seed_generators: None where others use the same ones at the same time."""
        self._factory = factory
        self._seed_generators = seed_generators
        self._environment: Any = None
        self._is_unfinished = False
        """Whether an episode has begun and its `finish` was not called."""

    def begin(self, request: dict[str, Any]) -> Calls:
        """The calls of a request, whose `call` is reset, step or finish."""
        call = request["call"]
        if call == "reset":
            return self._reset(request["seed"], request["row"])
        if call == "step":
            return self._step(request["message"])
        return self._finish(request["reason"])

    def _reset(self, seed: int, row: dict[str, Any]) -> Calls:
        self._is_unfinished = False
        self._seed(seed)
        if self._environment is None:
            self._environment = yield self._factory.make
            # Whatever making one drew: an episode is the same in one that is used again.
            self._seed(seed)
        environment = self._environment
        returned = yield lambda: environment.reset(seed, row)
        self._is_unfinished = True
        tools = getattr(environment, "tools", None)
        answer: dict[str, Any] = {"tools": self._factory.tools if tools is None else tools}
        if isinstance(returned, str):
            answer["text"] = returned
        elif returned is not None:
            answer["messages"] = returned
        return answer

    def _seed(self, seed: int) -> None:
        if self._seed_generators is not None:
            self._seed_generators(seed)

    def _step(self, message: dict[str, Any]) -> Calls:
        environment = self._environment
        returned = yield lambda: environment.step(message)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise AnswerRefused(
                f"returned {describe_value(returned)}, expected messages, reward and done"
            )
        messages, reward, done = returned
        return {"messages": messages, "reward": read_reward(reward), "done": _read_done(done)}

    def _finish(self, reason: str) -> Calls:
        environment = self._environment
        self._is_unfinished = False
        reward = yield lambda: environment.finish(reason)
        state = yield environment.state
        if not isinstance(state, dict):
            raise AnswerRefused(f"has the state {describe_value(state)}, expected a dict")
        return {"reward": read_reward(reward), "state": state}

    def give_up(self, reason: str | None) -> Calls:
        """Tell an environment why its episode is given up, if there is a reason: whatever it
        returns. One whose `reset` raised, or whose `finish` was called, is not told.
        """
        environment = self._environment
        if reason is not None and self._is_unfinished:
            self._is_unfinished = False
            yield lambda: environment.finish(reason)
        return {}

    def close(self) -> Calls:
        """The environment's end, if one was made."""
        environment = self._environment
        self._environment = None
        if environment is not None:
            yield environment.close
        return {}


class CallTimer:
    """Seconds of a call."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def encode(self, answer: dict[str, Any]) -> bytes:
        """The payload of an answer, with its seconds; a fault where JSON cannot hold it."""
        answer["seconds"] = time.perf_counter() - self._begun
        try:
            return encode_answer(answer)
        except AnswerRefused as refused:
            return self.encode_fault(refused)

    def encode_fault(self, error: BaseException) -> bytes:
        """The payload of what an environment raised."""
        seconds = time.perf_counter() - self._begun
        fault = describe_error(error)
        # Its text may have halves of characters, which no encoding can write.
        return json.dumps({"fault": fault, "seconds": seconds}).encode()


def encode_answer(answer: dict[str, Any]) -> bytes:
    """An answer as JSON. Raises AnswerRefused, naming what cannot be in it, or its size."""
    try:
        payload = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        place = _find_refused(answer, "", _DEPTH) or f"a value ({error})"
        raise AnswerRefused(f"returned {place}, which JSON cannot hold") from error
    if len(payload) > LARGEST_REPLY:
        raise AnswerRefused(f"returned {len(payload)} bytes, and {LARGEST_REPLY} are the most")
    return payload


def read_reward(reward: Any) -> float | None:
    """A reward as a float, None as it is. Raises AnswerRefused for anything else."""
    if reward is None:
        return None
    try:
        if isinstance(reward, str):
            raise TypeError
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise AnswerRefused(
            f"returned {describe_value(reward)} as reward, expected a number or None"
        ) from None
    if math.isfinite(number) and abs(number) <= _LARGEST_REWARD:
        return number
    raise AnswerRefused(f"returned {number!r} as reward, expected a finite number or None")


def _read_done(done: Any) -> bool:
    is_numpy = type(done).__module__ == "numpy"
    if isinstance(done, (bool, int)) or (is_numpy and getattr(done, "shape", None) == ()):
        return bool(done)
    raise AnswerRefused(f"returned {describe_value(done)} as done, expected True or False")


def _find_refused(thing: Any, place: str, depth: int) -> str:
    """Where in a value something is that JSON cannot hold, and what; empty if nowhere."""
    if depth == 0:
        return f"{place} with more than {_DEPTH} levels"
    for key, part in _parts(thing):
        inner = f"{place}[{key!r}]" if place else str(key)
        if not isinstance(key, (str, int, float, type(None))):
            return f"{place} with the key {describe_value(key)}"
        refused = _find_refused(part, inner, depth - 1)
        if refused:
            return refused
    if isinstance(thing, (dict, list, tuple)):
        return ""
    try:
        json.dumps(thing, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return f"{place} = {describe_value(thing)}"
    return ""


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, dict):
        return list(thing.items())
    if isinstance(thing, (list, tuple)):
        return list(enumerate(thing))
    return []
