"""Pairs: the data of `preferences`, its rows, and what `pair` makes of rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.schema import Reward
from dataflow.user import Columns
from operators.data_files import preference_columns
from operators.kernels.preferences import Preferences, find_prompt_length, open_preferences
from operators.kernels.return_checks import refuse_broken_promise
from operators.select import PAIR
from tests.kit.files import save_jsonl
from tests.kit.kernels import FakeSession

USER = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "aa"}, {"role": "assistant", "content": "b"}
PAIR_OF_TEXTS = {"prompt": "ab", "chosen": "c", "rejected": "dd"}


def opened(
    base: str, data: str, returns: tuple[str, ...] = (), **params: Any
) -> tuple[Preferences, FakeSession]:
    kernel, session = Preferences(), FakeSession(seed=7)
    node = KernelNode(
        name="pairs",
        operator="preferences",
        params={"data": data, "shuffle": False, **params},
        models={"tokenizer": Model("policy", base)},
        returns=returns,
    )
    kernel.open(node, Layout(), session)
    return kernel, session


def batches(kernel: Preferences) -> list[Batch]:
    return list(kernel.run(Chunk(id=0, step=1, keys=Keys.of(range(kernel.rows)), inputs={})))


def made(base: str, data: str, **params: Any) -> Batch:
    """All rows of a file in its order."""
    (batch,) = batches(opened(base, data, **params)[0])
    return batch


def texts(batch: Batch) -> list[str]:
    return batch.array("completion").to_pylist()


def prompts_in(batch: Batch) -> list[list[int]]:
    ids = batch.ragged("prompt_ids")
    return [ids[row].tolist() for row in range(len(ids))]


def test_each_row_of_the_data_is_a_group_of_the_chosen_and_the_rejected_answer(
    base: str, tmp_path: Path
) -> None:
    other = {"prompt": "x", "chosen": "yes", "rejected": ""}
    batch = made(base, save_jsonl(tmp_path / "p.jsonl", PAIR_OF_TEXTS, other))
    assert batch.keys.rows() == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert batch.flat("sign").tolist() == [1, -1, 1, -1]
    assert batch.flat("keep").tolist() == [1, 1, 1, 1]
    assert texts(batch) == ["c", "dd", "yes", ""]
    first, second, *_ = prompts_in(batch)
    assert first == second
    refuse_broken_promise(batch, "pairs")
    ids, mask = batch.ragged("completion_ids"), batch.ragged("completion_mask")
    assert mask.values.all()
    assert [int(ids[row][-1]) for row in range(4)] == [int(ids[3][0])] * 4, "eos ends each answer"


def test_both_rows_of_a_pair_have_the_columns_of_the_file_that_are_read(
    base: str, tmp_path: Path
) -> None:
    rows = ({**PAIR_OF_TEXTS, "label": label} for label in (3, 5))
    batch = made(base, save_jsonl(tmp_path / "p.jsonl", *rows), returns=("sign", "label"))
    assert batch.array("label").to_pylist() == [3, 3, 5, 5]


def test_texts_and_messages_with_and_without_their_prompt_make_the_same_rows(
    base: str, tmp_path: Path
) -> None:
    explicit = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    whole = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    first = made(base, save_jsonl(tmp_path / "a.jsonl", explicit))
    assert first.records.equals(made(base, save_jsonl(tmp_path / "b.jsonl", whole)).records)
    assert texts(first)[0].startswith("aa")
    text = made(base, save_jsonl(tmp_path / "c.jsonl", PAIR_OF_TEXTS))
    implied = made(base, save_jsonl(tmp_path / "d.jsonl", {"chosen": "ab c", "rejected": "ab dd"}))
    assert texts(implied) == [" c", " dd"]
    assert prompts_in(implied) == prompts_in(text)


def test_answers_that_end_in_the_eos_text_get_no_second_one(base: str, tmp_path: Path) -> None:
    ended = {"prompt": "ab", "chosen": "c<eos>", "rejected": "dd<eos>"}
    plain = made(base, save_jsonl(tmp_path / "a.jsonl", PAIR_OF_TEXTS))
    assert made(base, save_jsonl(tmp_path / "b.jsonl", ended)).records.equals(plain.records)


@pytest.mark.parametrize("chosen, rejected, count", [
    ("the sky is blue", "the sky is green", 10),  # the space before a word is the answer's
    ("ab", "cd", 0),
    ("ab", "abc", 2),
    ([USER, GOOD], [USER, BAD], 1),
    ([USER, GOOD], [USER, GOOD], 1),  # an answer has at least one message
    ([USER, GOOD, USER, BAD], [USER, GOOD, USER, GOOD], 3),
    ([GOOD], [GOOD], 0),
])  # fmt: skip
def test_the_prompt_is_what_both_begin_with(chosen: Any, rejected: Any, count: int) -> None:
    assert find_prompt_length(chosen, rejected) == count == find_prompt_length(rejected, chosen)


@pytest.mark.parametrize("row, told", [
    ({"prompt": "a", "choosen": "b", "rejected": "c"}, r"Fix: rename 'choosen' to 'chosen'\."),
    ({"prompt": "a", "chosen": "b"}, r"found columns: prompt, chosen\. Fix: a column 'rejected'\."),
    (
        {"prompt": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        r"expected prompt, chosen, rejected all as text or all as messages.*found prompt: string",
    ),
    ({"chosen": "a", "rejected": 3}, r"found chosen: string, rejected: int64"),
])  # fmt: skip
def test_the_check_refuses_other_columns(tmp_path: Path, row: Any, told: str) -> None:
    data = save_jsonl(tmp_path / "p.jsonl", row)
    with pytest.raises(DataError, match=told):
        preference_columns(data)
    with pytest.raises(DataError, match=told):
        open_preferences(data)


@pytest.mark.parametrize("first, row, told", [
    (
        PAIR_OF_TEXTS,
        {"prompt": "a", "chosen": "b", "rejected": None},
        "expected a rejected, found null",
    ),
    (
        PAIR_OF_TEXTS,
        {"prompt": "a", "chosen": None, "rejected": "b"},
        "expected a chosen, found null",
    ),
    (
        {"chosen": "xa", "rejected": "xb"},
        {"chosen": "a", "rejected": "b"},
        "expected chosen and rejected to begin with one prompt, found 'a' and 'b'",
    ),
], ids=["no rejected", "no chosen", "no common beginning"])  # fmt: skip
def test_rows_that_are_no_pairs_are_refused_with_their_line(
    tmp_path: Path, first: dict[str, str], row: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=rf"p\.jsonl:2: {told}"):
        open_preferences(save_jsonl(tmp_path / "p.jsonl", first, row))


def test_a_pair_goes_as_a_whole_if_one_of_its_rows_is_too_long(base: str, tmp_path: Path) -> None:
    long = {"prompt": "ab", "chosen": "c", "rejected": "d" * 40}
    data = save_jsonl(tmp_path / "p.jsonl", long, PAIR_OF_TEXTS)
    limit = {"positions": 16, "positions_of": "policy"}
    with pytest.raises(DataError, match="expected at most 16 tokens"):
        made(base, data, **limit)
    kernel, session = opened(base, data, overlong="drop", **limit)
    (batch,) = batches(kernel)
    assert batch.keys.rows() == [(1, 0, 0), (1, 1, 0)]
    assert batch.flat("sign").tolist() == [1, -1]
    assert texts(batch) == ["c", "dd"]
    assert [stone[0] for stone in session.tombstones] == [(0, 1, 0)]
    cut = made(base, data, overlong="truncate", **limit)
    assert cut.keys.position.tolist() == [0, 0, 1, 1]
    assert (cut.lengths("prompt_ids") + cut.lengths("completion_ids")).tolist()[1] == 16
    alone, _ = opened(base, save_jsonl(tmp_path / "q.jsonl", long), overlong="drop", **limit)
    assert batches(alone) == []


# pair


def signs_of(score: Batch, margin: float) -> list[int]:
    found = PAIR.function(Columns(score, Reward), margin=margin)
    refuse_broken_promise(found.batch, PAIR.keeps)
    assert (found["keep"] == np.abs(found["sign"])).all()
    return found["sign"].tolist()


groups = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=6)


@given(rewards=st.lists(groups, min_size=1, max_size=5), margin=st.sampled_from([0.0, 0.5, 2.0]))
def test_the_first_best_and_the_first_worst_of_a_group_are_a_pair(
    rewards: list[list[float]], margin: float
) -> None:
    position, numbers, expected = [], [], []
    for number, group in enumerate(rewards):
        signs = [0] * len(group)
        if max(group) - min(group) > margin:
            signs[group.index(max(group))], signs[group.index(min(group))] = 1, -1
        position += [number] * len(group)
        numbers += group
        expected += signs
    keys = Keys.of(position, [position[:row].count(of) for row, of in enumerate(position)])
    score = Batch.make(keys, {"reward": np.array(numbers, np.float32)}, Reward)
    assert signs_of(score, margin) == expected


def test_rows_in_another_order_give_the_same_pairs() -> None:
    keys = Keys.of([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    numbers = np.array([0.0, 1.0, 1.0, 2.0, 1.0], dtype=np.float32)
    batch = Batch.make(keys, {"reward": numbers}, Reward)
    assert signs_of(batch, 0.0) == [-1, 1, 0, 1, -1]
    assert signs_of(batch.take(np.array([4, 1, 3, 0, 2])), 0.0) == [-1, 1, 1, -1, 0]
