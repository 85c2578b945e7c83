"""scores(reads="text"): a reward model of another tokenizer reads what transformers gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.kernel import Layout
from dataflow.model import Model
from dataflow.schema import MESSAGE, Completion
from operators.kernels.text import append_answer
from operators.kernels.torch.text_scores import TorchTextScores
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<user>", "<assistant>", "<system>", "<end>", "<pad>", "the", "ab", " c"]


def save_reward_model(folder: Path, template: str | None = TEMPLATE, **shape: Any) -> str:
    """A reward model with a byte-level vocabulary of 264 ids, other than the policy's 98."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(WORDS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=template
    )
    torch.manual_seed(1)
    usual = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "initializer_range": 0.3, "num_labels": 1,
    }  # fmt: skip
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    module = Qwen2ForSequenceClassification(
        Qwen2Config(**usual | ends | {"bos_token_id": None} | shape)
    )
    torch.nn.init.normal_(module.score.weight)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_reward_model(tmp_path_factory.mktemp("rm"))


def written(prompts: list[Any], answers: list[str], position: list[int] | None = None) -> Batch:
    """Rows of text; lists are messages."""
    keys = Keys.of(position or range(len(answers)), range(len(answers)))
    told = prompts if isinstance(prompts[0], str) else pa.array(prompts, pa.list_(MESSAGE))
    return Batch.make(keys, {"prompt": told, "completion": answers}, Completion)


def scores_of(base: str, rows: Batch, session: Any = None, **params: Any) -> Batch | None:
    model = Model("rm", base, head="scalar")
    layout = Layout(tokens=params.pop("tokens", 16384))
    kernel = open_kernel(
        TorchTextScores(), model, layout=layout, session=session, node="scores", **params
    )
    return next(iter(kernel.run(rows_chunk(rows))), None)


def require_scores(found: Batch | None, base: str, texts: list[Any], special: bool = False) -> None:
    """The classifier's own numbers for these texts, or for conversations; special: with the
    tokens that its tokenizer adds.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    module = AutoModelForSequenceClassification.from_pretrained(base).eval()
    expected = []
    for text in texts:
        if not isinstance(text, str):
            text = tokenizer.apply_chat_template(text, tokenize=False)
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=special)
            expected.append(float(module(**ids).logits[0, 0]))
    np.testing.assert_allclose(found.flat("reward"), expected, rtol=1e-6, atol=1e-5)
    assert len(set(np.round(expected, 4))) == len(expected), "different texts, different scores"


USER = {"role": "user", "content": "is the abc é right?"}
BEGUN = {"role": "assistant", "content": "It "}
ANSWERS = ["the answer", " c", "", "日本 ab", "the answer "]


@pytest.mark.parametrize("tokens", [16384, 40])
def test_messages_are_scored_as_the_classifier_scores_them(base: str, tokens: int) -> None:
    system = {"role": "system", "content": "be brief"}
    asked = [[USER], [USER], [system, USER], [USER, BEGUN], [USER]]
    found = scores_of(base, written(asked, ANSWERS, [4, 4, 5, 6, 4]), tokens=tokens)
    turns = [append_answer(prompt, answer) for prompt, answer in zip(asked, ANSWERS, strict=True)]
    assert turns[3] == [USER, {"role": "assistant", "content": "It 日本 ab"}]
    require_scores(found, base, turns)


def test_a_prompt_that_is_text_is_the_users_turn(base: str) -> None:
    found = scores_of(base, written(["why?"] * 2, ["so", "not so"]))
    user = {"role": "user", "content": "why?"}
    turns = [[user, {"role": "assistant", "content": answer}] for answer in ("so", "not so")]
    require_scores(found, base, turns)


def test_without_a_template_the_answer_follows_the_prompt(tmp_path: Path) -> None:
    plain = save_reward_model(tmp_path, template=None)
    found = scores_of(plain, written(["why? ", "how? "], ["so", ""]))
    require_scores(found, plain, ["why? so", "how? "], special=True)
    with pytest.raises(DataError, match="need a chat template"):
        scores_of(plain, written([[USER]], ["so"]))
    with pytest.raises(DataError, match="row 1 of 2 has no tokens: ''"):
        scores_of(plain, written(["a", ""], ["", ""]))


def test_rows_without_text_prompts_are_refused(base: str) -> None:
    for columns in ({}, {"prompt": pa.array([[1, 2]])}):
        rows = Batch.make(Keys.of([0]), {"completion": ["a"]} | columns, Completion)
        with pytest.raises(DataError, match="expected the prompts as text or messages"):
            scores_of(base, rows)


def test_rows_too_long_are_refused_dropped_or_cut(base: str) -> None:
    rows = written(["x"] * 3, ["a", "b" * 140, "c"])
    message = (
        "scores: row .1, 1, 0.: expected at most 128 tokens .the positions of Model 'rm'., found"
    )
    fix = "Fix: overlong='drop' or 'truncate', or a Model with more positions."
    with pytest.raises(DataError, match=f"{message}.*{fix}"):
        scores_of(base, rows)
    session = FakeSession()
    assert scores_of(base, rows, session, overlong="drop").keys.position.tolist() == [0, 2]
    assert [key for key, _ in session.tombstones] == [(1, 1, 0)]
    assert session.metrics["scores/overlong"] == [(pytest.approx(1 / 3), 3)]
    assert scores_of(base, rows.take(np.array([1])), FakeSession(), overlong="drop") is None
    cut = scores_of(base, rows.take(np.array([1])), FakeSession(), overlong="truncate")
    require_scores(cut, base, ["b" * 127 + "<end>"])


def test_no_rows_are_no_batch(base: str) -> None:
    assert scores_of(base, written(["a"], ["b"]).take(np.zeros(0, np.int64))) is None
