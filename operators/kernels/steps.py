"""Steps of an answer: its text cut at a separator, and the token on which each step ends.

Owns: what a step is, and the way from a place in the text to a token. Does not own: the functions
that score steps (step_scoring.py), tokenizers (text.py).

A step is a piece of the answer's text between separators that is not empty; the text is that of
all tokens, special ones left out. It ends at the token that completes the separator after it, or,
where none follows, at the answer's last token: a separator may begin or end within a token, and
several steps may end at one. Its number belongs on a trained token: the last one up to its end;
if nothing before it is trained (tool output), the first one after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dataflow.batch import Ragged

_WINDOW = 64
"""Tokens decoded at once."""
_PIECES = 8
"""Most tokens that one character is written with: it has at most 4 bytes."""
_PARTIAL = "\ufffd"
"""What decoders write for the bytes of a character that is not complete."""


class Decoding(Protocol):
    """Token ids to text; of a Tokenizer."""

    def decode(self, ids: Ragged) -> list[str]:
        """The text of each row, without special tokens."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of one row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerSteps:
    """texts: of the steps of each row. token int64 [steps]: where the number of each step belongs
    among the flat completion tokens, the steps of all rows in order.
    """

    texts: list[list[str]]
    token: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """int64 [rows + 1]: the steps of row i are those from offsets[i] to offsets[i + 1]."""
        return np.cumsum([0, *map(len, self.texts)])


def find_steps(tokenizer: Decoding, ids: Ragged, mask: Ragged, split: str) -> AnswerSteps:
    """Find the steps of each answer. ids, mask: completion tokens, and 1 where one is trained."""
    texts: list[list[str]] = []
    tokens: list[int] = []
    for row, text in enumerate(tokenizer.decode(ids)):
        pieces, ends = cut_at_separators(text, split)
        counts = count_tokens(tokenizer, ids[row].tolist(), text, ends)
        start = int(ids.offsets[row])
        tokens += [start + token for token in _trained_tokens(mask[row], counts)]
        texts.append(pieces)
    return AnswerSteps(texts=texts, token=np.array(tokens, dtype=np.int64))


def cut_at_separators(text: str, split: str) -> tuple[list[str], list[int | None]]:
    """Cut a text into its steps. Returns also, for each, the place after its separator; None where
    none follows.
    """
    steps: list[str] = []
    ends: list[int | None] = []
    at = 0
    for piece in text.split(split):
        at += len(piece) + len(split)
        if piece:
            steps.append(piece)
            ends.append(at if at <= len(text) else None)
    return steps, ends


def count_tokens(
    tokenizer: Decoding, ids: Sequence[int], text: str, ends: Sequence[int | None]
) -> list[int]:
    """Count, for each place in the text, ascending, the fewest first tokens whose text reaches it;
    None is the end of the answer.

    Text is decoded in windows of tokens, each with the one before as context, since spaces and
    bytes depend on it: the cost is linear in the answer. For a tokenizer whose windows do not add
    up to the text, the one window is the whole answer.
    """
    places = [end for end in ends if end is not None]
    if not places:
        return [len(ids)] * len(ends)
    windows = list(_windows(tokenizer, ids))
    last = windows[-1]
    if last.before + len(last.added_text(tokenizer, ids, len(ids))) != len(text):
        windows = [_Window(first=0, begin=0, end=len(ids), before=0, context="")]
    counts: list[int] = []
    rest = iter(windows)
    window = next(rest)
    for place in places:
        while window.end < len(ids) and not window.reaches(tokenizer, ids, window.end, place):
            window = next(rest)
        counts.append(window.count(tokenizer, ids, place))
    # Places that are None come last: only the last step can lack a separator behind it.
    at_the_end = len(ends) - len(places)
    return counts + [len(ids)] * at_the_end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The tokens from begin to end, decoded together with those from first on. before: characters
    of the answer's text up to begin; context: the text from first to begin.
    """

    first: int
    begin: int
    end: int
    before: int
    context: str

    def added_text(self, tokenizer: Decoding, ids: Sequence[int], count: int) -> str:
        """The text of the tokens from begin to `count`."""
        return tokenizer.text(ids[self.first : count])[len(self.context) :]

    def reaches(self, tokenizer: Decoding, ids: Sequence[int], count: int, place: int) -> bool:
        """Whether the text of the first `count` tokens, whole characters only, reaches a place."""
        added = self.added_text(tokenizer, ids, count)
        whole = added if count == len(ids) else added.rstrip(_PARTIAL)
        return self.before + len(whole) >= place

    def count(self, tokenizer: Decoding, ids: Sequence[int], place: int) -> int:
        """The fewest first tokens that reach a place within this window, by bisection."""
        low = self.begin
        high = self.end
        while high - low > 1:
            middle = (low + high) // 2
            if self.reaches(tokenizer, ids, middle, place):
                high = middle
            else:
                low = middle
        return high


def _windows(tokenizer: Decoding, ids: Sequence[int]) -> Iterator[_Window]:
    first = begin = before = 0
    context = ""
    while begin < len(ids):
        end = min(begin + _WINDOW, len(ids))
        text = tokenizer.text(ids[first:end])
        most = min(end + _PIECES, len(ids))
        while end < most and text.endswith(_PARTIAL):  # do not part the bytes of a character
            end += 1
            text = tokenizer.text(ids[first:end])
        yield _Window(first=first, begin=begin, end=end, before=before, context=context)
        added = text[len(context) :]
        before += len(added)
        if added:  # else only special tokens: what follows needs the context before them
            first = begin
            context = tokenizer.text(ids[begin:end])
        begin = end


def _trained_tokens(mask: np.ndarray, counts: Sequence[int]) -> Iterator[int]:
    """The token for each step's number, given how many tokens end with the step."""
    trained = np.flatnonzero(mask)
    for count in counts:
        if len(trained):
            before = int(np.searchsorted(trained, count))
            yield int(trained[max(0, before - 1)])
        else:
            yield count - 1
