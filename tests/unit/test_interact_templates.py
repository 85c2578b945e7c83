"""Episodes under the chat template of a real family: ends of turns, tools, what stands between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.batch import Batch
from operators.environments import tools
from operators.kernels.text import Tokenizer, load_tokenizer
from tests.kit.chat_templates import save_family
from tests.kit.environments import VowelTurns, add
from tests.kit.generate_suite import MIXED
from tests.kit.interact_kernels import open_interact, require_sound, run_episodes
from tests.kit.kernels import FakeSession

TALKS = [[{"role": "user", "content": text}] for text in MIXED]
HOW: dict[str, Any] = {"n": 4, "max_tokens": 300, "max_turn_tokens": 30, "max_turns": 4}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_family(tmp_path_factory.mktemp("qwen"), "qwen2")


@pytest.fixture
def tokenizer(qwen: str) -> Tokenizer:
    return load_tokenizer(qwen)


def spans_of(batch: Batch, row: int) -> Iterator[tuple[list[int], list[int]]]:
    """Of each turn the ids that were written, and those that answer it."""
    ids = batch.ragged("completion_ids")[row]
    mask = batch.ragged("completion_mask")[row]
    numbers = batch.ragged("turn")[row]
    for number in range(len(batch.ragged("turn_end")[row])):
        is_turn = numbers == number
        yield ids[is_turn & (mask == 1)].tolist(), ids[is_turn & (mask == 0)].tolist()


def test_a_turn_has_one_end_whether_the_model_wrote_it_or_not(
    qwen: str, tokenizer: Tokenizer
) -> None:
    kernel = open_interact(qwen, VowelTurns, **HOW)
    batch = run_episodes(kernel, TALKS)
    kernel.close()
    require_sound(batch, qwen, completion=300, context=512)
    ends = {True: 0, False: 0}
    for row in range(len(batch)):
        messages = json.loads(batch.array("messages")[row].as_py())
        replies = [turn["content"] for turn in messages if turn["role"] == "user"][1:]
        for (written, given), reply in zip(spans_of(batch, row), replies, strict=False):
            shown = str(tokenizer.inner.decode([*written, *given]))
            behind = f"{END}\n<|im_start|>user\n{reply}{END}\n<|im_start|>assistant\n"
            if given:
                assert shown.endswith(behind)
                is_written = written[-1] in tokenizer.eos_ids
                ends[is_written] += 1
                assert tokenizer.inner.decode(given) == behind[is_written * len(END) :]
    assert min(ends.values()) > 0


def test_tools_are_shown_and_a_turn_without_a_call_is_the_last(
    qwen: str, tokenizer: Tokenizer
) -> None:
    session = FakeSession(node="episode")
    kernel = open_interact(qwen, tools(add), session=session, **HOW)
    batch = run_episodes(kernel, TALKS)
    kernel.close()
    assert not session.tombstones
    prompt = tokenizer.inner.decode(batch.ragged("prompt_ids")[0])
    assert '"name": "add"' in prompt
    assert "one of them." in prompt
    assert (batch.ragged("turn_end").lengths == 1).all()
    assert set(batch.array("finish").to_pylist()) == {"stop"}
