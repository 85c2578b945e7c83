"""OrderedInbox: each event of an incarnation once and in order, none of an earlier one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.ordered_inbox import OrderedInbox
from tests.kit.turns import example_count


@settings(max_examples=example_count(200))
@given(data=st.data(), count=st.integers(0, 12))
def test_whatever_the_order_and_however_often_each_comes_once_and_in_order(
    data: st.DataObject, count: int
) -> None:
    sent = data.draw(
        st.permutations([n for n in range(count) for _ in range(data.draw(st.integers(1, 3)))])
    )
    inbox = OrderedInbox(4)
    assert [m for n in sent for m in inbox.take(4, n, n)] == list(range(count))
    assert inbox.missing is None


def test_a_zombie_is_not_heard() -> None:
    inbox = OrderedInbox()
    assert inbox.take(0, 1, "early") == []
    assert inbox.missing == 0
    inbox.close()
    assert inbox.take(0, 0, "late") == []
    assert inbox.take(1, 0, "new") == ["new"]
    assert inbox.take(1, 1, "next") == ["next"]
