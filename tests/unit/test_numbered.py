"""Numbered frames: whatever happens to calls, each message comes once and in order, and no call is
larger than what Ray carries within it.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.run.hosts.numbered_messages import AT_ONCE, FRAME, Arrived, ToSend
from tests.kit.turns import example_count

INLINE = 100 * 1024
"""Bytes pickled above which Ray puts an argument or a result into its object store."""
SIZES = (0, 1, FRAME - 1, FRAME, FRAME + 1, AT_ONCE, 2 * FRAME, 3 * FRAME + 7)


class OneWay:
    """Frames of one end on their way to the other, by calls that something may happen to."""

    def __init__(self, dice: random.Random) -> None:
        self.to_send, self.arrived = ToSend(), Arrived()
        self.came: list[bytes] = []
        self._dice = dice
        self._calls: list[tuple[int, list[bytes]]] = []
        self._counts: list[int] = [0]

    def turn(self, lost: float) -> None:
        """Calls go out, get lost, come twice or in another order; so do acknowledgements."""
        while (batch := self.to_send.take())[1]:
            self._calls += [batch] * self._dice.choices((0, 1, 2), (lost, 1.0, 0.3))[0]
        self._dice.shuffle(self._calls)
        for _ in range(self._dice.randint(0, len(self._calls))):
            self.came += self.arrived.take(*self._calls.pop())
            self._counts.append(self.arrived.count)
        self.to_send.acknowledge(self._dice.choice(self._counts))
        if self._dice.random() < 0.3:
            self.to_send.resend()

    def calm(self) -> None:
        """From now on nothing is lost."""
        self.to_send.resend()
        while not self.to_send.is_settled:
            self.came += self.arrived.take(*self.to_send.take())
            self.to_send.acknowledge(self.arrived.count)


@settings(max_examples=example_count(60))
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=12),
    lost=st.floats(0.0, 2.0),
)
def test_whatever_calls_do_each_message_comes_once_and_in_order(
    seed: int, sizes: list[int], lost: float
) -> None:
    dice = random.Random(seed)
    way, said = OneWay(dice), [bytes([i]) * size for i, size in enumerate(sizes)]
    for body in said:
        way.to_send.add(body)
        way.turn(lost)
        assert way.came == said[: len(way.came)]
    for _ in range(5):
        way.turn(lost)
    way.calm()
    assert way.came == said


def pickled(call: Any) -> int:
    return len(pickle.dumps(call, protocol=5))


@settings(max_examples=example_count(60))
@given(sizes=st.lists(st.integers(0, 3 * FRAME), min_size=1, max_size=8), first=st.integers(0, 9))
def test_no_call_is_larger_than_ray_carries_within_it(sizes: list[int], first: int) -> None:
    to_send = ToSend()
    for size in sizes:
        to_send.add(bytes(size))
    beat = bytes(8000)  # that of a hundred busy Workers
    handed = 0
    while (batch := to_send.take())[1]:
        handed += len(batch[1])
        heard = (2**40 + first, 1e9, *batch, beat)
        assert pickled(batch) < INLINE
        assert pickled(heard) < INLINE
    assert handed == sum(max(1, -(-size // FRAME)) for size in sizes)


def test_many_small_messages_go_in_few_calls() -> None:
    to_send = ToSend()
    for _ in range(900):
        to_send.add(b"x" * 87)
    calls = 0
    while to_send.take()[1]:
        calls += 1
    assert calls == 1


@pytest.mark.parametrize("size", [0, 1, 9, 50, 300])
def test_many_tiny_messages_are_no_large_call(size: int) -> None:
    to_send = ToSend()
    for number in range(120_000 // (size + 1)):
        to_send.add((b"%d" % number).ljust(size)[:size])
    while (batch := to_send.take())[1]:
        assert pickled(batch) < INLINE


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_an_old_acknowledgement_takes_nothing_away(count: int) -> None:
    to_send = ToSend()
    for body in (b"a", b"b", b"c"):
        to_send.add(body)
    assert to_send.acknowledge(2)
    assert not to_send.acknowledge(count)
    assert to_send.take() == (2, [b"lc"])
    assert not to_send.is_settled
