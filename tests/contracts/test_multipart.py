"""Answers between hosts: their messages; what was changed or left out is not taken."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pull_liars import outcome
from pull_rows import rollouts

from dataflow.errors import RunError
from engine.channels import multipart
from engine.channels.block_requests import Reply
from engine.channels.contract import BlockRequest
from engine.channels.frames import checksums


def replied(*messages: tuple[multipart.Message, list[bytes]]) -> pa.RecordBatch:
    """What these messages come to."""
    first, *rest = messages
    reply = multipart.IncomingReply.of(
        multipart.message_of(multipart.seal_message(first[0])), first[1]
    )
    for message, frames in rest:
        assert not reply.whole
        reply.add(multipart.message_of(multipart.seal_message(message)), frames)
    assert reply.whole
    return reply.rows([BlockRequest(worker="a", block=0)])[0]


@pytest.mark.parametrize("much", [False, True], ids=["little", "much"])
def test_a_flipped_bit_in_a_frame_is_found(much: bool) -> None:
    rows = rollouts(5, 9)
    answer, buffers = multipart.frame_block(0, rows.records)
    sums, frames = checksums(buffers), [b.to_pybytes() for b in buffers]
    spoilt = [bytearray(frame) for frame in frames]
    spoilt[3][-1] ^= 4
    for those, right in ((frames, True), (spoilt, False)):
        little: list[tuple[multipart.Message, list]] = [
            (Reply(1, multipart.add_checksums([answer], buffers)), those)
        ]
        parts = [
            (multipart.FramesPart(1, 0), those[2:4]),
            (multipart.FramesPart(1, 1), those[4:]),
            (multipart.FrameSums(1, sums), []),
        ]
        messages = [(Reply(1, [answer], 2), those[:2]), *parts] if much else little
        assert outcome(partial(replied, *messages)) == (rows.records if right else RunError)


@pytest.mark.parametrize(
    "order", ["1", "0 0", "0 sums", "0 1 2", "sums", "header", "0 1 header", "0 1 sums+"]
)
def test_the_messages_of_an_answer_have_one_order(order: str) -> None:
    answer, buffers = multipart.frame_block(0, rollouts(5, 9).records)
    frames = [b.to_pybytes() for b in buffers]
    reply = multipart.IncomingReply.of(Reply(1, [answer], 2), frames[:2])
    last = multipart.FrameSums(1, checksums(buffers))
    told = {
        "header": (Reply(1, [answer], 2), frames[:2]),
        "sums": (last, []),
        "sums+": (last, [b"more"]),
    }
    *honest, wrong = [
        told.get(word) or (multipart.FramesPart(1, int(word)), frames[2:4])
        for word in order.split()
    ]
    for message in honest:
        reply.add(*message)
    with pytest.raises(RunError, match="expected part"):
        reply.add(*wrong)


@pytest.mark.parametrize("message", [multipart.FramesPart(1, 0), multipart.FrameSums(1, [])])
def test_answers_begin_with_headers(message: multipart.FramesPart | multipart.FrameSums) -> None:
    with pytest.raises(RunError, match="expected the header"):
        multipart.IncomingReply.of(message, [])


@given(st.lists(st.integers(0, 3 << 20), max_size=9))
def test_every_frame_is_in_one_message_and_none_is_split(sizes: list[int]) -> None:
    frames = [pa.py_buffer(bytes(n)) for n in sizes]
    parts = multipart.split_frames(frames)
    assert [f for part in parts for f in part] == frames
    assert all(parts) or not frames
    assert all(sum(f.size for f in part[:-1]) < 1 << 20 for part in parts)
