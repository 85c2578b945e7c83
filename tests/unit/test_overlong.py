"""Prompts and rows that do not fit: refused, dropped or cut by the policy, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Keys, Ragged
from dataflow.errors import DataError
from dataflow.kernel import KernelNode
from operators.kernels.overlong import METRIC, Room, RowRoom, require_positions
from operators.kernels.text import to_ragged
from tests.kit.kernels import FakeSession
from tests.kit.turns import example_count

ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=6)


def room(policy: str, own: int | None = None, **params: Any) -> Room:
    given_ = {"max_tokens": 4, "overlong_prompt": policy} | params
    return Room.of(KernelNode(name="rollout", operator="generate", params=given_), "policy", own)


def lists(rows: Ragged) -> list[list[int]]:
    return [rows[i].tolist() for i in range(len(rows))]


@settings(max_examples=example_count(60))
@given(rows=ROWS, most=st.integers(1, 8), policy=st.sampled_from(["error", "drop", "truncate"]))
def test_what_is_answered_fits_and_what_fits_is_answered(
    rows: list[list[int]], most: int, policy: str
) -> None:
    session = FakeSession()
    keys = Keys.of(range(10, 10 + len(rows)))
    long = [i for i, row in enumerate(rows) if len(row) > most]
    fitted = room(policy, most + 4)
    if policy == "error" and long:
        with pytest.raises(
            DataError,
            match=rf"rollout: row \({10 + long[0]}, 0, 0\): expected at most {most} prompt",
        ):
            fitted.fit(to_ragged(rows), keys, session)
        return
    stay, left = fitted.fit(to_ragged(rows), keys, session)
    if policy == "truncate":
        assert lists(left) == [row[-most:] for row in rows]
    else:
        assert lists(left) == [row for row in rows if len(row) <= most]
    dropped = [] if policy == "truncate" else long
    assert stay.tolist() == [i for i in range(len(rows)) if i not in dropped]
    assert [key[0] for key, _ in session.tombstones] == [10 + i for i in dropped]
    if policy != "error":
        assert session.metrics[METRIC] == [(pytest.approx(len(long) / len(rows)), len(rows))]


def test_the_least_bound_counts_and_is_named() -> None:
    assert room("error").most is None
    assert room("error", max_prompt_tokens=3).most == 3
    assert room("error", 100, max_prompt_tokens=3).why == "max_prompt_tokens=3"
    of_reader = room("error", 100, positions=20, positions_of="rm")
    assert (of_reader.most, of_reader.why) == (16, "Model 'rm' has 20 positions, and max_tokens=4")


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_where_answers_take_all_positions_no_policy_helps(policy: str) -> None:
    with pytest.raises(DataError, match="expected at most 0 prompt tokens"):
        room(policy, 4).fit(to_ragged([[1]]), Keys.of([0]), FakeSession())


@settings(max_examples=example_count(60))
@given(
    data=st.data(),
    prompts=ROWS,
    most=st.integers(1, 12),
    policy=st.sampled_from(["drop", "truncate"]),
)
def test_demonstrations_fit_afterwards(
    data: st.DataObject, prompts: list[list[int]], most: int, policy: str
) -> None:
    answers = [data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)) for _ in prompts]
    given_ = {"overlong": policy, "positions": most, "positions_of": "policy"}
    rows = RowRoom.of(KernelNode(name="demos", operator="demonstrations", params=given_), "policy")
    session = FakeSession()
    keys = Keys.of(range(len(prompts)))
    completion = to_ragged(answers)
    mask = completion.like(np.ones(len(completion.values), np.uint8))
    stay, left, (kept, masked) = rows.fit(to_ragged(prompts), [completion, mask], keys, session)
    wanted = {i: answers[i][: most - len(p)] for i, p in enumerate(prompts) if len(p) < most}
    if policy == "drop":
        wanted = {i: a for i, a in wanted.items() if a == answers[i]}
    assert stay.tolist() == list(wanted)
    assert lists(left) == [prompts[i] for i in wanted]
    assert lists(kept) == list(wanted.values())
    assert masked.offsets.tolist() == kept.offsets.tolist()
    assert {key[0] for key, _ in session.tombstones} == set(range(len(prompts))) - set(wanted)


def test_rows_beyond_the_positions_are_refused_by_their_key() -> None:
    rows = (Keys.of([4, 5]), to_ragged([[1], [1, 2]]), to_ragged([[1, 2], [1, 2, 3]]))
    require_positions("ref", "reference", 5, *rows)
    require_positions("ref", "reference", None, *rows)
    message = r"ref: row \(5, 0, 0\): expected at most 4 tokens.*'reference', found 5 \(1 of 2"
    with pytest.raises(DataError, match=message):
        require_positions("ref", "reference", 4, *rows)
