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
_GREATEST_ID = 2_000_000
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
    """Read the vocabulary of the newest checkpoint that has a tokenizer, that of a train node
    `train_<model>` first; None where none has one that is known.
    """
    with inside(run, "checkpoints") as checkpoints:
        if checkpoints is None:
            return None
        for name in sorted(checkpoints.names(), key=_number, reverse=True):
            if not _STEP.fullmatch(name):
                continue
            content = _read_tokenizer(checkpoints, name, model)
            if content is not None:
                return read_vocabulary(content)
    return None


def _number(name: str) -> int:
    match = _STEP.fullmatch(name)
    if match:
        return int(match[1])
    return -1


def _read_tokenizer(checkpoints: OpenFolder, name: str, first: str) -> bytes | None:
    """A checkpoint's tokenizer.json; that of the folder `first`, if it has one."""
    with inside(checkpoints, name) as folder:
        if folder is None:
            return None
        names = sorted(folder.names(), key=lambda each: (each != first, each))
        for each in names:
            if folder.mark(each) is None or "." in each:
                continue
            content = None
            with inside(folder, each) as model:
                if model is not None:
                    content = model.read("tokenizer.json", _LARGEST)
            if content is not None:
                return content
    return None


def read_vocabulary(content: bytes) -> Vocabulary | None:
    """Read a tokenizer.json's vocabulary; None for one of another form."""
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        ids = vocab
    else:
        ids = {token: number for number, (token, _) in enumerate(vocab)}
    # The file is somebody else's: a single great number must not take all the memory.
    if not ids or max(ids.values()) > _GREATEST_ID:
        return None
    alphabet = _alphabet().keys()
    first_tokens = islice(ids, 2000)
    is_byte_level = all(alphabet >= set(token) for token in first_tokens)
    pieces = [b""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        if number >= 0:
            pieces[number] = _bytes_of(token) if is_byte_level else _unmark(token)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    special = {added.id: added.content for added in file.added_tokens}
    return Vocabulary(pieces=b"".join(pieces), ends=ends, special=special)


@cache
def _alphabet() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte, and that byte."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet: dict[str, int] = {}
    others = 0
    # Bytes that cannot be printed are written as the letters from 256 on, in their order.
    for byte in range(256):
        if byte in printed:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + others)] = byte
            others += 1
    return alphabet


def _bytes_of(token: str) -> bytes:
    alphabet = _alphabet()
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode("utf-8", "replace")


def _unmark(token: str) -> bytes:
    """The bytes of a token with word marks: U+2581 stands for a space."""
    byte = _BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
