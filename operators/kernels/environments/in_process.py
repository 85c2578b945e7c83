"""Environments in the kernel's own process, for breakpoints: objects, called one after another.

Owns: their calls, and the global generators of each. Does not own: processes (pool.py). There is no
time limit, no isolation and no limit of memory here.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

from dataflow.errors import KernelError
from dataflow.prompt_types import Message
from operators.environments import Environment
from operators.kernels.environments.answers import CallKind, read_answer
from operators.kernels.environments.child.awaiting import SerialCalls
from operators.kernels.environments.child.calls import CallTimer, EpisodeCalls
from operators.kernels.environments.child.episode import seed_generators
from operators.kernels.environments.child.faults import AnswerRefused
from operators.kernels.environments.replies import EnvironmentReply
from operators.kernels.environments.requests import finish_request, reset_request, step_request
from operators.kernels.environments.wake_up import WakeUp
from operators.kernels.scoring_child import summarize_error
from operators.kernels.scoring_output import Output, hear_function

_ADAPTERS = "operators.kernels.environments.child.adapters"


class InProcessPool:
    """See EnvironmentPool. A call is made as it is asked, and its reply is there at once."""

    def __init__(self, environment: Environment, *, name: str) -> None:
        """Load the environment. Raises KernelError if that fails, or it needs an interpreter."""
        self._name = name
        if environment.python is not None:
            raise KernelError(
                f"environment {name!r}: expected no python= in the kernel's own process, found"
                f" {environment.python!r}. Fix: run it without inproc."
            )
        self._factory = _load(name, environment)
        self._serial = SerialCalls()
        self._output = Output(name, "environment")
        self._episodes: dict[int, _Episode] = {}
        self._idle: list[EpisodeCalls] = []
        self._raised: dict[int, BaseException] = {}
        self._replies: list[EnvironmentReply] = []
        self._wake_up = WakeUp()
        self._is_closed = False

    def reset(self, episode: int, seed: int, row: Mapping[str, Any]) -> None:
        """See EnvironmentPool. Raises DataError for a column that JSON cannot hold."""
        request = reset_request(self._name, self._factory.columns, seed, row)
        self._raised.pop(episode, None)
        calls = self._idle.pop() if self._idle else self._make_calls()
        self._episodes[episode] = _Episode(calls)
        self._call(episode, "reset", request)

    def step(self, episode: int, message: Message) -> None:
        """See EnvironmentPool."""
        self._call(episode, "step", step_request(message))

    def finish(self, episode: int, reason: str) -> None:
        """See EnvironmentPool."""
        reply = self._call(episode, "finish", finish_request(reason))
        if reply.fault is None:
            self._idle.append(self._episodes.pop(episode).calls)

    def abandon(self, episode: int, reason: str | None = None) -> None:
        """See EnvironmentPool. It is called here and now, however long that takes."""
        if episode in self._episodes:
            self._end(self._episodes.pop(episode).calls, reason)
            replies = [reply for reply in self._replies if reply.episode != episode]
            self._replies = replies

    def wait(self, seconds: float | None) -> list[EnvironmentReply]:
        """See EnvironmentPool: what is there."""
        self._wake_up.clear()
        replies = self._replies
        self._replies = []
        return replies

    def wake(self) -> None:
        """See EnvironmentPool: no `wait` takes time."""
        self._wake_up.wake()

    def fileno(self) -> int:
        """See SelectablePool: readable after a wake alone, as replies are there at once."""
        return self._wake_up.fileno()

    def seconds_left(self) -> float:
        """See SelectablePool."""
        return 0.0 if self._replies else math.inf

    def close(self) -> None:
        """See EnvironmentPool."""
        if self._is_closed:
            return
        self._is_closed = True
        for episode in self._episodes.values():
            self._end(episode.calls)
        for calls in self._idle:
            self._end(calls)
        self._episodes.clear()
        self._idle.clear()
        self._serial.close()
        self._wake_up.close()

    def raised_error(self, episode: int) -> BaseException | None:
        """What an episode's environment raised last, with its frames, for a debugger."""
        return self._raised.get(episode)

    def _make_calls(self) -> EpisodeCalls:
        return EpisodeCalls(self._factory, seed_generators)

    def _call(self, number: int, kind: CallKind, request: dict[str, Any]) -> EnvironmentReply:
        episode = self._episodes[number]
        timer = CallTimer()
        # As from another process: an environment gets values of its own.
        request = json.loads(json.dumps(request))
        process_generators = _GeneratorStates()
        try:
            episode.restore_generators()
            with hear_function(self._output):
                answer = self._serial.run(episode.calls.begin(request))
            payload = timer.encode(answer)
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code may raise anything, exits too
            if not isinstance(error, AnswerRefused):
                self._raised[number] = error
            payload = timer.encode_fault(error)
        finally:
            episode.generators = _GeneratorStates()
            process_generators.restore()
        reply = read_answer(payload, number, kind)
        if reply.fault is not None:
            self._end(self._episodes.pop(number).calls, "error")
        self._replies.append(reply)
        return reply

    def _end(self, calls: EpisodeCalls, reason: str | None = None) -> None:
        """End an environment: what it raises is noted."""
        process_generators = _GeneratorStates()
        for name, last_calls in (("finish", calls.give_up(reason)), ("close", calls.close())):
            try:
                with hear_function(self._output):
                    self._serial.run(last_calls)
            except (GeneratorExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # of the user's code, which nobody asks any more
                self._output.add(f"its {name} raised {summarize_error(error)}\n".encode())
        process_generators.restore()


class _Episode:
    """An episode under way, and the state of its generators after its last call."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self.calls = calls
        self.generators: _GeneratorStates | None = None

    def restore_generators(self) -> None:
        """Let the global generators go on where this episode's were, as in a process of its own."""
        if self.generators is not None:
            self.generators.restore()


class _GeneratorStates:
    """Where Python's and NumPy's global generators are."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Set them so again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _load(name: str, environment: Environment) -> Any:
    try:
        adapter = importlib.import_module(f"{_ADAPTERS}.{environment.adapter}")
        return adapter.load(environment.target, dict(environment.arguments))
    except Exception as error:
        raise KernelError(
            f"environment {name!r}: could not be loaded: {summarize_error(error)}. Fix: what it"
            " imports has to be importable here."
        ) from error
