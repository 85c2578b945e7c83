"""What a reward process sends to its kernel: frames, valid answers, safe display of user text.

Owns: the format and limits of frames, ScoringOutcome and ScoringFault, and the checks on answers.
The process runs user code, so no answer is trusted and nothing is unpickled. Does not own: sockets
(scoring_parent.py, scoring_child.py), the consequences of a fault (scoring.py).

    frame   4 bytes of mark, the sender's pid, the number of the call, bytes of payload; the payload
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import msgspec

from dataflow.metric_names import is_part, repair_part
from dataflow.processor_time import ProcessorTime
from dataflow.safe_text import printable

MARK = b"dfr\x01"
HEADER = struct.Struct("<4sIQQ")
LARGEST_ANSWER = 64 << 20
"""Most bytes of an answer: some millions of rewards."""
_LARGEST = 3.4028234663852886e38  # the largest float32, the type in which rewards travel
_TEXT, _DETAIL, _NAME = 500, 20_000, 100
_METRICS = 10_000
"""Most calls of log_metric in one call of a function."""
_OWN = ("mean", "std", "applied", "passed_when_repeated")
"""Metrics that every reward has: reward/<function>/mean is the reward's own."""

FaultKind = Literal["raised", "type", "length", "value", "metric", "answer", "timeout", "died"]


class ScoringFault(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in one call. detail: a traceback, a stack or the last output, if any."""

    kind: FaultKind
    text: str
    detail: str = ""


class ScoringOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call: values (None: does not apply) and metrics, or a fault. The values of
    steps are those of each row's, one row after another. processors: of the function's
    process, and of those that ended in it.
    """

    values: list[float | None] = []
    metrics: list[tuple[str, float]] = []
    fault: ScoringFault | None = None
    processors: ProcessorTime = ProcessorTime()


class Garbled(Exception):
    """The bytes on a reward's socket are not the process's answer to this call; says why."""


class Answers:
    """Bytes that came from one process, cut into whole frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, received: bytes) -> None:
        """Add bytes that came."""
        self._received += received

    def __len__(self) -> int:
        """Bytes that have not been taken."""
        return len(self._received)

    def take(self, pid: int, number: int) -> bytes | None:
        """Take the process's answer to this call, once complete. Raises Garbled for anything
        else.
        """
        if not MARK.startswith(self._received[: len(MARK)]):
            beginning = describe_value(bytes(self._received[:40]))
            raise Garbled(f"{beginning} came where its answer was expected")
        if len(self._received) < HEADER.size:
            return None
        _, sender, answered, size = HEADER.unpack_from(self._received)
        if sender != pid:
            raise Garbled(
                f"process {sender}, which it had forked, answered, too: a fork has to end by"
                " os._exit"
            )
        if answered != number:
            raise Garbled(
                f"an answer to call {answered} came where one to call {number} was expected"
            )
        if size > LARGEST_ANSWER:
            raise Garbled(f"an answer of {size} bytes came, and one may have {LARGEST_ANSWER}")
        end = HEADER.size + size
        if len(self._received) < end:
            return None
        payload = bytes(memoryview(self._received)[HEADER.size : end])
        del self._received[:end]
        if self._received:
            raise Garbled("more than one answer came")
        return payload


def decode_answer(payload: bytes, due: int) -> ScoringOutcome:
    """Decode the outcome in an answer, and check it. due: how many values it must have. Raises
    Garbled if no call can produce it.
    """
    try:
        outcome = msgspec.msgpack.decode(payload, type=ScoringOutcome)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(f"an answer came that cannot be read ({error})") from error
    if (fault := outcome.fault) is not None:
        text = abridge(fault.text, _TEXT)
        detail = abridge(fault.detail, _DETAIL)
        return ScoringOutcome(fault=ScoringFault(kind=fault.kind, text=text, detail=detail))
    if len(outcome.values) != due:
        raise Garbled(f"an answer with {len(outcome.values)} values came where {due} are due")
    if any(reward is not None and not is_reward(reward) for reward in outcome.values):
        raise Garbled("an answer came with a value that is no finite float32")
    for name, number in outcome.metrics:
        if problem := find_metric_problem(name, number):
            raise Garbled(f"an answer came with a metric that {problem}")
    took = outcome.processors
    if not (0.0 <= took.computed < math.inf and 0.0 <= took.queued < math.inf):
        raise Garbled(f"an answer came with {took!r}")
    return outcome


def is_reward(number: float) -> bool:
    """Whether it is finite as a float32."""
    return math.isfinite(number) and abs(number) <= _LARGEST


def find_metric_problem(name: object, number: object, so_far: int = 0) -> str:
    """Why this cannot be a metric after `so_far` others in this call; empty if it can."""
    if problem := _find_name_problem(name):
        return problem
    if isinstance(number, str) or not hasattr(number, "__float__"):
        return f"{name!r} has the value {describe_value(number)}, not a number"
    if not math.isfinite(float(number)):  # type: ignore[arg-type]
        return f"{name!r} has the value {float(number)!r}, not a finite number"  # type: ignore[arg-type]
    if so_far >= _METRICS:
        return f"{name!r} is number {so_far + 1} of one call, and {_METRICS} are the most"
    return ""


def _find_name_problem(name: object) -> str:
    if not isinstance(name, str):
        return f"has a name of type {type(name).__name__}, not str"
    if not name or len(name) > _NAME or not name.isprintable() or name != name.strip():
        name_shown = describe_value(name)
        return f"has the name {name_shown}, not 1 to {_NAME} characters that can be printed"
    if not all(map(is_part, name.split("/"))):
        repaired = "/".join(map(repair_part, name.split("/")))
        return f"has the name {name!r}, which no metric can have; one like {repaired!r} can"
    if name in _OWN:
        return f"has the name {name!r}, which every reward has already"
    return ""


def describe_value(user_value: object, most: int = 60) -> str:
    """A user's value as a short text, whatever its repr does."""
    try:
        text = repr(user_value)
    except Exception as error:  # a user's class; a text is needed in any case
        text = f"<{type(user_value).__name__}, whose repr raised {type(error).__name__}>"
    return printable(abridge(text, most))


def abridge(text: str, most: int) -> str:
    """Abridge a text that is long: its beginning and end around the number of characters left
    out.
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
