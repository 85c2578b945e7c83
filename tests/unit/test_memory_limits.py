"""Which limits are lowered when memory runs out, by how much, and when nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.kernel import Layout
from dataflow.memory_limits import MemoryLimits, MemoryNeed
from engine.coordinator.memory_limits import LoweredLimits, find_lower
from engine.protocol.memory_messages import LimitLowered, Short
from tests.kit.host_plans import plan

LIMITS = MemoryLimits(slots=256, tokens=16384)
KEY = (3, 1, 0)


@pytest.mark.parametrize(
    ("work", "limits", "need", "wanted"),
    [
        ("decode", LIMITS, MemoryNeed(rows=256), replace(LIMITS, slots=128)),
        ("decode", LIMITS, MemoryNeed(rows=12), replace(LIMITS, slots=6)),
        ("decode", LIMITS, MemoryNeed(), replace(LIMITS, slots=128)),
        ("decode", LIMITS, MemoryNeed(rows=1), None),
        ("forward", LIMITS, MemoryNeed(rows=9, tokens=900), replace(LIMITS, tokens=450)),
        ("forward", LIMITS, MemoryNeed(rows=1, tokens=900, key=KEY, is_divisible=False), None),
        ("train", LIMITS, MemoryNeed(rows=2, tokens=30000), replace(LIMITS, tokens=8192)),
        (
            "train",
            LIMITS,
            MemoryNeed(rows=1, tokens=900, key=KEY, is_divisible=False),
            replace(LIMITS, recompute="layers"),
        ),
        (
            "train",
            replace(LIMITS, recompute="layers"),
            MemoryNeed(rows=1, tokens=900, key=KEY, is_divisible=False),
            None,
        ),
        ("train", LIMITS, MemoryNeed(doing="the update", is_divisible=False), None),
    ],
)
def test_what_is_lowered(
    work: str, limits: MemoryLimits, need: MemoryNeed, wanted: MemoryLimits | None
) -> None:
    assert find_lower(work, limits, need) == wanted


@given(
    work=st.sampled_from(["decode", "forward", "train"]),
    slots=st.integers(1, 4096),
    tokens=st.integers(1, 1 << 20),
    needs=st.lists(
        st.builds(
            MemoryNeed,
            rows=st.integers(0, 4096),
            tokens=st.integers(0, 1 << 20),
            is_divisible=st.booleans(),
            key=st.sampled_from([None, KEY]),
        ),
        min_size=80,
        max_size=80,
    ),
)
def test_it_ends_and_each_time_something_is_less(
    work: str, slots: int, tokens: int, needs: list[MemoryNeed]
) -> None:
    limits = MemoryLimits(slots=slots, tokens=tokens)
    for count, need in enumerate(needs):
        lower = find_lower(work, limits, need)
        if lower is None:
            break
        assert lower.slots >= 1
        assert lower.tokens >= 1
        assert lower.slots < limits.slots or lower.tokens < limits.tokens or count < 80
        assert lower != limits
        limits = lower
    else:
        pytest.fail("it goes on for ever")


def short_of(limits: MemoryLimits, **need: object) -> Short:
    node = plan().nodes[1].name
    return Short(
        id=1,
        node=node,
        worker="a",
        limits=limits,
        need=MemoryNeed(doing="a pass", rows=1, key=KEY, longest=77, is_divisible=False, **need),
        error="no room",
    )


def of_forward() -> LoweredLimits:
    planned = plan()
    first, second = planned.nodes
    layout = Layout(tokens=64)
    return LoweredLimits(
        replace(planned, nodes=(first, replace(second, work="forward", layout=layout)))
    )


def test_what_several_say_of_the_same_limits_lowers_them_once() -> None:
    lowered = of_forward()
    before = MemoryLimits.of(Layout(tokens=64))
    short = replace(short_of(before), need=MemoryNeed(rows=8, tokens=64))
    first = lowered.lower(short)
    assert isinstance(first, LimitLowered)
    assert first.limits.tokens == 32
    assert lowered.lower(replace(short, worker="b")) is None
    assert lowered.of(short.node) == first.limits
    assert lowered.take_metrics() == {f"short/{short.node}": 2.0}
    assert lowered.take_metrics() == {}


def test_the_end_names_the_row_its_tokens_and_a_fix() -> None:
    error = of_forward().lower(short_of(MemoryLimits.of(Layout(tokens=64))))
    assert isinstance(error, str)
    assert "expected room for a pass, of which row (3, 1, 0) has up to 77 tokens" in error
    assert "no room. Fix: --offload" in error
