"""What goes wrong in an environment, as text for the pool.

Owns: how an exception is told, with the user's frames alone. Does not own: which exceptions are
caught (calls.py), what becomes of a fault.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

_TEXT = 300
_DETAIL = 20_000
"""Most characters of an exception's text, and of its traceback."""
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class AnswerRefused(Exception):
    """What an environment returned is no answer; the text ends a sentence about the environment.
    An adapter may raise it, too.
    """


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as a fault: kind, text, detail."""
    if isinstance(error, AnswerRefused):
        return {"kind": "answer", "text": shorten(str(error), 2 * _TEXT), "detail": ""}
    return {
        "kind": "raised",
        "text": f"raised {_summarize(error)}",
        "detail": _format_traceback(error),
    }


def note_error(call: str, error: BaseException) -> None:
    """Print what a call raised that nobody waits for."""
    print(f"its {call} raised {_summarize(error)}\n{_format_traceback(error)}", file=sys.stderr)


def describe_value(user_value: object) -> str:
    """A user's value as a short text, whatever its repr does."""
    try:
        text = repr(user_value)
    except Exception as error:  # a user's class; a text is needed in any case
        kind = type(user_value).__name__
        text = f"<{kind}, whose repr raised {type(error).__name__}>"
    return shorten(text, 60)


def shorten(text: str, most: int) -> str:
    """The beginning and the end of a text that is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def _summarize(error: BaseException) -> str:
    """`ValueError: boom`: the class, and the first line of the text that is not blank."""
    name = type(error).__qualname__.rpartition(".")[2]
    for line in _error_text(error)[:_DETAIL].split("\n"):
        if line.strip():
            return shorten(f"{name}: {line.strip()}", _TEXT)
    return name


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the user's class
        return f"(its str raised {type(second).__name__})"


def _format_traceback(error: BaseException) -> str:
    trace = _user_frames(error.__traceback__)
    lines = traceback.format_tb(trace)
    if len(_error_text(error)) <= _DETAIL:
        lines = traceback.format_exception(type(error), error, trace)
    return shorten("".join(lines), _DETAIL)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The frames after the last one of this package: the user's; all, if none comes after it."""
    user_frames = trace
    frame = trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            user_frames = frame.tb_next
        frame = frame.tb_next
    return user_frames or trace


def format_user_frames(frames: list[tuple[Any, int]]) -> list[str]:
    """The user's among these frames and their lines, the innermost last: those that come after one
    of this package's.
    """
    user_frames: list[tuple[Any, int]] = []
    is_called_here = False
    for frame, line in frames:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            is_called_here = True
            user_frames = []
        elif is_called_here:
            user_frames.append((frame, line))
    return traceback.StackSummary.extract(iter(user_frames)).format()
