"""Bytes of environments' processes: frames, answers, deadlines; whatever comes, nothing breaks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kernels.environments.answers import read_answer
from operators.kernels.environments.child.calls import encode_answer
from operators.kernels.environments.child.faults import AnswerRefused
from operators.kernels.environments.child.frames import (
    HEADER,
    LARGEST_REPLY,
    MARK,
    BadFrame,
    FrameStream,
    pack_frame,
)
from operators.kernels.environments.deadlines import Deadlines


def frames_of(came: bytes, step: int) -> list[tuple[int, bytes]]:
    """The frames of bytes that come in pieces of this size."""
    stream = FrameStream(LARGEST_REPLY)
    frames: list[tuple[int, bytes]] = []
    for at in range(0, len(came), step):
        stream.add(came[at : at + step])
        while (frame := stream.take()) is not None:
            frames.append(frame[1:])
    return frames


@given(st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=50))), st.integers(1, 70))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[int, bytes]], step: int
) -> None:
    came = b"".join(pack_frame(number, payload) for number, payload in frames)
    assert frames_of(came, step) == frames


@pytest.mark.parametrize("came,problem", [
    (b"\x80", r"b'\x80' came where its answer was expected"),
    (MARK[:2] + b"xx", "came where its answer was expected"),
    (HEADER.pack(MARK, 1, 1, LARGEST_REPLY + 1), f"an answer of {LARGEST_REPLY + 1} bytes came"),
])  # fmt: skip
def test_what_is_no_frame_is_refused(came: bytes, problem: str) -> None:
    with pytest.raises(BadFrame, match=re.escape(problem)):
        frames_of(came, 1)


ANSWERS: list[tuple[Any, str]] = [
    ({}, "sent an answer that cannot be read (Object missing required field `seconds`)"),
    ({"seconds": -1.0}, "took -1.0 seconds"),
    ({"seconds": 0.0, "reward": 1e39}, "returned 1e+39 as reward, expected a finite number"),
    ({"seconds": 0.0, "messages": 7}, "returned 7 as messages, expected a list of them"),
    ({"seconds": 0.0, "messages": {"role": "user"}}, "returned {'role': 'user'} as messages"),
    ({"seconds": 0.0, "messages": ["x"]}, "returned 'x' as message 0, expected a dict"),
    ({"seconds": 0.0, "messages": [{"role": "user"}]}, "returned message 0 without 'content'"),
    ({"seconds": 0.0, "tools": ["x"]}, "has the tools ['x'], expected a list"),
    ({"seconds": 0.0, "state": []}, "sent an answer that cannot be read"),
    ({"seconds": 0.0, "done": 1}, "sent an answer that cannot be read"),
]


@pytest.mark.parametrize("answer,problem", ANSWERS)
def test_what_is_no_answer_is_a_fault_that_says_why(answer: Any, problem: str) -> None:
    reply = read_answer(json.dumps(answer).encode(), 5, "step")
    assert reply.fault is not None
    assert (reply.fault.kind, reply.fault.text[: len(problem)]) == ("answer", problem)
    assert reply.episode == 5


@given(st.binary(max_size=60))
def test_any_bytes_are_a_reply(payload: bytes) -> None:
    reply = read_answer(payload, 5, "step")
    assert reply.fault is None or reply.fault.kind in ("answer", "raised", "died", "timeout")


def test_a_faults_text_is_one_safe_line_whoever_wrote_it() -> None:
    fault = {"kind": "odd", "text": "x\n\x1b" * 1000, "detail": "y\x1b" * 100_000}
    reply = read_answer(json.dumps({"seconds": 0.0, "fault": fault}).encode(), 5, "step")
    assert reply.fault is not None
    assert reply.fault.kind == "answer"
    assert len(reply.fault.text) < 5_000
    assert len(reply.fault.detail) < 100_000
    assert not {"\n", "\x1b"} & set(reply.fault.text)
    assert "\x1b" not in reply.fault.detail


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4))
def test_a_state_arrives_as_it_was(state: dict[str, Any]) -> None:
    payload = encode_answer({"seconds": 0.0, "state": state, "reward": 1})
    reply = read_answer(payload, 5, "finish")
    assert (reply.state, reply.reward, reply.fault) == (state, 1.0, None)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
REFUSED: list[tuple[Any, str]] = [
    ([1, {"a": {3}}], "returned state[1]['a'] = {3}, which JSON cannot hold"),
    ({"a": float("inf")}, "returned state['a'] = inf, which JSON cannot hold"),
    ({(1, 2): 1}, "returned state with the key (1, 2), which JSON cannot hold"),
    (ENDLESS, "more than 40 levels, which JSON cannot hold"),
    ("x" * LARGEST_REPLY, f"bytes, and {LARGEST_REPLY} are the most"),
]


@pytest.mark.parametrize("state,problem", REFUSED, ids=range(len(REFUSED)))
def test_what_json_cannot_hold_is_named_with_its_place(state: Any, problem: str) -> None:
    with pytest.raises(AnswerRefused, match=re.escape(problem)):
        encode_answer({"state": state})


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1000.0]))))
def test_of_deadlines_those_that_are_due_are_done_once(settings: list[tuple[int, float]]) -> None:
    deadlines = Deadlines()
    done: list[int] = []
    latest: dict[int, float] = {}
    for owner, seconds in settings:
        deadlines.set(owner, seconds, lambda owner=owner: done.append(owner))
        latest[owner] = seconds
    deadlines.clear(4)
    deadlines.run()
    deadlines.run()
    due = [owner for owner, seconds in latest.items() if seconds == 0.0 and owner != 4]
    assert sorted(done) == sorted(due)
    assert deadlines.seconds_left() > 900.0
