"""Answers as JSON, whatever words are in them.

Owns: that a name or a text that no encoding can write is shown as codes, and is no error. Does not
own: what an answer says (run_questions.py).
"""

from __future__ import annotations

from typing import Any

import msgspec


def encode_answer(answer: Any) -> bytes:
    """JSON in UTF-8. Half a character, as the name of a folder or of a graph may have, becomes its
    code: `\\ud800`.
    """
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(answer))


def _writable(answer: Any) -> Any:
    if isinstance(answer, str):
        return answer.encode("utf-8", "backslashreplace").decode()
    if isinstance(answer, dict):
        return {_writable(key): _writable(item) for key, item in answer.items()}
    if isinstance(answer, list | tuple):
        return [_writable(item) for item in answer]
    return answer
