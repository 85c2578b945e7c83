"""The inside of an episode's process: one environment, asked one thing at a time.

Owns: the loop of requests, seeds, how the environment ends. Does not own: what is called
(calls.py), the fork and the process's end (template.py).
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from .awaiting import SerialCalls
from .calls import CallTimer, EpisodeCalls
from .faults import note_error
from .frames import ParentSocket
from .limits import ProcessLimits

_NUMPY_SEEDS = 1 << 32


def serve_episodes(parent: ParentSocket, factory: Any, limits: ProcessLimits) -> None:
    """Answer requests until the pool hangs up, or gives the episode up: then tell the environment,
    and close it. Raises what its `close` raises.
    """
    environment = EpisodeCalls(factory, seed_generators)
    serial = SerialCalls()
    while True:
        frame = parent.receive()
        if frame is None:
            break
        number, payload = frame
        request = json.loads(payload)
        if request["call"] == "drop":
            _give_up(environment, serial, request["reason"])
            break
        if request["call"] == "reset":
            limits.begin_episode()
        parent.reply(number, _answer(environment, serial, request))
    serial.run(environment.close())


def _give_up(environment: EpisodeCalls, serial: SerialCalls, reason: str | None) -> None:
    try:
        serial.run(environment.give_up(reason))
    except BaseException as error:  # the user's code may raise anything; `close` has its turn
        note_error("finish", error)


def seed_generators(seed: int) -> None:
    """Seed Python's global generator, and NumPy's where it has been imported."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)


def _answer(environment: EpisodeCalls, serial: SerialCalls, request: dict[str, Any]) -> bytes:
    timer = CallTimer()
    try:
        answer = serial.run(environment.begin(request))
    except BaseException as error:  # the user's code may raise anything, exits too
        return timer.encode_fault(error)
    return timer.encode(answer)
