"""Steps of an answer: what they are, and the tokens on which they end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dataflow.batch import Ragged
from operators.kernels import steps
from operators.kernels.steps import Decoding, count_tokens, cut_at_separators, find_steps
from operators.kernels.text import Tokenizer, to_ragged
from tests.kit.models import EOS, character_tokenizer
from tests.kit.rows import ragged
from tests.kit.turns import example_count

CORPUS = [
    "step one\n\nstep two\n\n\n\nthe end",
    "une étape\n\n日本語の 手順\n\nfin 🙂🙂",
    "a.\n\nb.\n\nc",
]


@lru_cache
def tokenizers() -> dict[str, Tokenizer]:
    """Characters; byte-level BPE, whose tokens hold several characters or parts of one, and
    whole separators; words with a space mark, whose text loses its first space.
    """
    bpe = Inner(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 9,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
        ),
    )
    words = Inner(models.WordLevel({"<eos>": 0, "▁a": 1, "▁b": 2, "\n\n": 3, "c\n\nd": 4, "▁": 5}))
    words.decoder = decoders.Metaspace()
    made = {"characters": character_tokenizer()}
    for name, inner in (("bpe", bpe), ("words", words)):
        made[name] = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    return {name: Tokenizer(name, inner, frozenset()) for name, inner in made.items()}


def by_prefixes(tokenizer: Decoding, ids: Sequence[int], place: int) -> int:
    """The definition: the fewest first tokens whose whole characters reach the place."""
    for count in range(1, len(ids)):
        if len(tokenizer.text(ids[:count]).rstrip("\ufffd")) >= place:
            return count
    return len(ids)


@pytest.mark.parametrize("text, pieces, ends", [
    ("a||b||c", ["a", "b", "c"], [3, 6, None]),
    ("a||b||", ["a", "b"], [3, 6]),
    ("||a||||b", ["a", "b"], [5, None]),
    ("no separator", ["no separator"], [None]),
    ("a|||b", ["a", "|b"], [3, None]),
    ("", [], []),
    ("||||", [], []),
    (" || ", [" ", " "], [3, None]),
])  # fmt: skip
def test_steps_are_the_pieces_that_are_not_empty(
    text: str, pieces: list[str], ends: list[int | None]
) -> None:
    assert cut_at_separators(text, "||") == (pieces, ends)


TEXTS = st.lists(
    st.sampled_from([*CORPUS, "\n\n", "é", "🙂", "x ", " ", "\n", "日\n\n"]), max_size=8
)


def require_places(tokenizer: Decoding, ids: Sequence[int], split: str, window: int) -> list[int]:
    """Windows of this many tokens find the places that all prefixes have; returns these."""
    text = tokenizer.text(ids)
    ends = cut_at_separators(text, split)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_WINDOW", window)
        found = count_tokens(tokenizer, ids, text, ends)
    assert found == [len(ids) if e is None else by_prefixes(tokenizer, ids, e) for e in ends]
    return found


@given(TEXTS, st.sampled_from([1, 2, 5, 64]))
@settings(max_examples=example_count(80))
@pytest.mark.parametrize("name", ["bpe", "characters"])
def test_places_become_tokens_as_by_decoding_every_prefix(
    name: str, parts: list[str], window: int
) -> None:
    tokenizer = tokenizers()[name]
    known = [part for part in parts if name == "bpe" or part.isascii()]
    ids = [i for part in known for i in tokenizer.encode([part], special=False)[0]]
    require_places(tokenizer, ids, "\n\n", window)


@given(st.lists(st.integers(0, 5), max_size=12), st.sampled_from([1, 2, 64]))
@settings(max_examples=example_count(120))
def test_tokens_whose_text_depends_on_those_before_are_counted_right(
    ids: list[int], window: int
) -> None:
    require_places(tokenizers()["words"], ids, "\n\n", window)


class Counting:
    """A tokenizer that counts the tokens which it decodes one row at a time."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.tokens = inner, 0

    def decode(self, ids: Ragged) -> list[str]:
        return self.inner.decode(ids)

    def text(self, ids: Sequence[int]) -> str:
        self.tokens += len(ids)
        return self.inner.text(ids)


def decoded(length: int) -> int:
    """The tokens decoded to place the steps, always four, of an answer of this length."""
    tokenizer = Counting(tokenizers()["characters"])
    text = ("x" * (length // 4 - 2) + "\n\n") * 4
    ids = tokenizer.inner.encode([text], special=False)[0]
    count_tokens(tokenizer, ids, text, cut_at_separators(text, "\n\n")[1])
    return tokenizer.tokens


def test_the_cost_is_linear_in_the_answer() -> None:
    assert decoded(16_000) < 8.5 * decoded(2_000)


class Joined(Counting):
    """A tokenizer whose text of a part is not a part of the text: words with blanks between."""

    def decode(self, ids: Ragged) -> list[str]:
        return [self.text(ids[row].tolist()) for row in range(len(ids))]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join("ab|"[i] for i in ids[::-1])[::-1].replace("a a", "aa")


def test_a_tokenizer_whose_parts_do_not_add_up_is_decoded_from_the_beginning() -> None:
    tokenizer = Joined(tokenizers()["characters"])
    ids = [0, 0, 0, 2, 1, 2, 1]
    assert tokenizer.text(ids) == "aa a | b | b"
    assert require_places(tokenizer, ids, "|", 2) == [4, 6, 7]


def placed(answers: list[str], masks: list[list[int]] | None = None) -> steps.AnswerSteps:
    """Steps at `|` of answers in characters, each with an <eos>."""
    ids = [tokenizers()["characters"].encode([a], special=False)[0] + [EOS] for a in answers]
    mask = ragged(masks or [[1] * len(row) for row in ids], np.uint8)
    return find_steps(tokenizers()["characters"], to_ragged(ids), mask, "|")


def test_a_step_ends_with_its_separator_and_the_last_one_with_the_answer() -> None:
    found = placed(["ab|c", "x|", "", "q"])
    assert found.texts == [["ab", "c"], ["x"], [], ["q"]]
    assert found.token.tolist() == [2, 4, 6, 10]
    assert found.offsets.tolist() == [0, 2, 3, 3, 4]


@pytest.mark.parametrize(("split", "texts", "tokens"), [
    ("\n\n", ["ac", "d", " b"], [1, 2, 3]),
    ("\n", ["ac", "d", " b"], [1, 2, 3]),
    ("c", ["a", "\n\nd\n\n b"], [1, 3]),
])  # fmt: skip
def test_several_steps_may_end_at_one_token(
    split: str, texts: list[str], tokens: list[int]
) -> None:
    ids = to_ragged([[1, 4, 3, 2]])  # "a" "c\n\nd" "\n\n" "b"
    found = find_steps(tokenizers()["words"], ids, ids.like(np.ones(4, np.uint8)), split)
    assert (found.texts, found.token.tolist()) == ([texts], tokens)


@pytest.mark.parametrize("mask, tokens", [
    ([1, 1, 1, 1, 1, 1], [1, 3, 5]),
    ([1, 0, 1, 0, 1, 0], [0, 2, 4]),
    ([1, 1, 0, 0, 1, 1], [1, 1, 5]),
    ([0, 0, 0, 0, 1, 1], [4, 4, 5]),
    ([0, 0, 0, 0, 0, 0], [1, 3, 5]),
])  # fmt: skip
def test_a_number_belongs_on_a_trained_token(mask: list[int], tokens: list[int]) -> None:
    assert placed(["a|b|c"], [mask]).token.tolist() == tokens


def test_rows_without_tokens_have_no_steps() -> None:
    none = Ragged(np.zeros(0, np.int32), np.zeros(3, np.int64))
    found = find_steps(tokenizers()["bpe"], none, none.like(np.zeros(0, np.uint8)), "\n\n")
    assert (found.texts, found.token.tolist()) == ([[], []], [])
