"""Answers of environments' processes, checked: no process is trusted, as it runs a user's code.

Owns: the form of an answer to each call, messages and tools. Does not own: frames (connection.py),
what a process refuses to send (child/calls.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from dataflow.prompt_types import Message
from dataflow.safe_text import one_line, printable
from operators.kernels.environments.replies import EnvironmentFault, EnvironmentReply, FaultKind
from operators.kernels.scoring_frames import abridge, describe_value, is_reward

CallKind = Literal["reset", "step", "finish"]
_TEXT, _DETAIL = 500, 20_000
"""Most characters of a fault's text, and of its detail."""


class AnswerProblem(Exception):
    """An answer has not the form of one; the text ends a sentence about the environment."""


class _Fault(msgspec.Struct):
    kind: str
    text: str
    detail: str


class _SentAnswer(msgspec.Struct):
    """All fields that an answer may have; which ones a call's has is checked afterwards."""

    seconds: float
    messages: Any = None
    text: str | None = None
    reward: float | None = None
    done: bool = False
    tools: Any = None
    state: dict[str, Any] = {}
    fault: _Fault | None = None


_decoder = msgspec.json.Decoder(_SentAnswer)


def read_answer(payload: bytes, episode: int, call: CallKind) -> EnvironmentReply:
    """The reply in an answer; a fault where it has not the form of one."""
    try:
        answer = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"sent an answer that cannot be read ({error})"
        return faulty_reply(episode, call, make_fault("answer", text))
    try:
        return _read_fields(answer, episode, call)
    except AnswerProblem as problem:
        return faulty_reply(episode, call, make_fault("answer", str(problem)))


def _read_fields(answer: _SentAnswer, episode: int, call: CallKind) -> EnvironmentReply:
    seconds = answer.seconds
    if not 0.0 <= seconds < math.inf:
        raise AnswerProblem(f"took {seconds!r} seconds")
    if answer.fault is not None:
        fault = make_fault(answer.fault.kind, answer.fault.text, answer.fault.detail)
        return faulty_reply(episode, call, fault, seconds)
    if answer.reward is not None and not is_reward(answer.reward):
        raise AnswerProblem(f"returned {answer.reward!r} as reward, expected a finite number")
    return EnvironmentReply(
        episode=episode,
        call=call,
        messages=read_messages(answer.messages),
        text=answer.text,
        reward=answer.reward,
        done=answer.done,
        tools=_read_tools(answer.tools),
        state=answer.state,
        seconds=seconds,
    )


def read_messages(returned: Any) -> Sequence[Message]:
    """Messages with a role and a text; a string is one user message. Raises AnswerProblem."""
    if returned is None:
        return ()
    if isinstance(returned, str):
        return ({"role": "user", "content": returned},)
    if not isinstance(returned, list | tuple):
        shown = describe_value(returned)
        raise AnswerProblem(f"returned {shown} as messages, expected a list of them or a string")
    for index, message in enumerate(returned):
        _check_message(index, message)
    return tuple(returned)


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict):
        shown = describe_value(message)
        raise AnswerProblem(f"returned {shown} as message {index}, expected a dict")
    for key in ("role", "content"):
        if key not in message:
            raise AnswerProblem(f"returned message {index} without {key!r}")
        if not isinstance(message[key], str):
            shown = describe_value(message[key])
            raise AnswerProblem(f"returned message {index} with {shown} as {key}, expected a text")


def _read_tools(tools: Any) -> Sequence[Mapping[str, Any]]:
    if tools is None:
        return ()
    is_list = isinstance(tools, list | tuple)
    if not is_list or not all(isinstance(tool, dict) for tool in tools):
        raise AnswerProblem(
            f"has the tools {describe_value(tools)}, expected a list of function schemas"
        )
    return tuple(tools)


def read_fault(fault: Mapping[str, Any]) -> EnvironmentFault:
    """A fault as a process tells it. Raises KeyError or TypeError for what is none."""
    return make_fault(fault["kind"], fault["text"], fault["detail"])


def make_fault(kind: str, text: str, detail: str = "") -> EnvironmentFault:
    """A fault whose text is safe and short, whoever wrote it."""
    known_kind: FaultKind = "answer"
    for each in get_args(FaultKind):
        if each == kind:
            known_kind = each
    return EnvironmentFault(
        kind=known_kind,
        text=one_line(abridge(text, _TEXT)),
        detail=printable(abridge(detail, _DETAIL)),
    )


def faulty_reply(
    episode: int, call: CallKind, fault: EnvironmentFault, seconds: float = 0.0
) -> EnvironmentReply:
    """A reply that there is none."""
    return EnvironmentReply(episode=episode, call=call, fault=fault, seconds=seconds)
