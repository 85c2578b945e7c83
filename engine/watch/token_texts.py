"""What token ids say, by the tokenizer in one of the run's own checkpoints.

Owns: reading a tokenizer.json's vocabulary, and the pieces of text of a row's ids. Does not own:
tokenizing, which takes the library (transformers needs more memory than the whole server).

Known are byte-level vocabularies (GPT-2, Llama 3, Qwen) and those with word marks (SentencePiece).
A character that several tokens make up is told at its last one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from engine.keep.reader.open_folder import OpenFolder, inside

_LARGEST = 48 << 20
"""Bytes of a tokenizer.json."""
_STEP = re.compile(r"step_([0-9]+)")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct):
    model: _TokenModel
    added_tokens: list[_Added] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of each token, one after another, since there may be a quarter of a million."""

    pieces: bytes
    ends: np.ndarray
    special: dict[int, str]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id in a row; unknown ids as their number."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return [self._text(number, decode) for number in ids]

    def _text(self, number: int, decode: Any) -> str:
        if number in self.special:
            return decode(b"") + self.special[number]
        if not 0 <= number < len(self.ends):
            return f"<{number}>"
        if number:
            begin = int(self.ends[number - 1])
        else:
            begin = 0
        return decode(self.pieces[begin : int(self.ends[number])])


def find_vocabulary(run: OpenFolder, model: str) -> Vocabulary | None:
    """Of the newest checkpoint that has a tokenizer, that of a train node `train_<model>` first;
    None where none has one that is known.
    """
    with inside(run, "checkpoints") as checkpoints:
        if checkpoints is None:
            return None
        for name in sorted(checkpoints.names(), key=_number, reverse=True):
            if _STEP.fullmatch(name):
                content = _tokenizer(checkpoints, name, model)
            else:
                content = None
            if content is not None:
                return read_vocabulary(content)
    return None


def _number(name: str) -> int:
    match = _STEP.fullmatch(name)
    if match:
        return int(match[1])
    return -1


def _tokenizer(checkpoints: OpenFolder, name: str, first: str) -> bytes | None:
    with inside(checkpoints, name) as folder:
        if folder is None:
            return None
        names = sorted(folder.names(), key=lambda each: (each != first, each))
        for each in names:
            mark = folder.mark(each)
            if mark is None or "." in each:
                continue
            with inside(folder, each) as model:
                if model is not None:
                    content = model.read("tokenizer.json", _LARGEST)
                else:
                    content = None
            if content is not None:
                return content
    return None


def read_vocabulary(content: bytes) -> Vocabulary | None:
    """A tokenizer.json's vocabulary; None for one of another form."""
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        known = vocab
    else:
        known = {t: i for i, (t, _) in enumerate(vocab)}
    if not known or max(known.values()) > 2_000_000:
        return None
    alphabet = _alphabet().keys()
    byte_level = all(alphabet >= set(token) for token in islice(known, 2000))
    pieces = [b""] * (max(known.values()) + 1)
    for token, number in known.items():
        if number >= 0:
            pieces[number] = _bytes_of(token) if byte_level else _marked(token)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    special = {added.id: added.content for added in file.added_tokens}
    return Vocabulary(pieces=b"".join(pieces), ends=ends, special=special)


@cache
def _alphabet() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte, and that byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes_of(token: str) -> bytes:
    alphabet = _alphabet()
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode("utf-8", "replace")


def _marked(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
