"""Digests of what a run reads and does not own: data, models, the user's source files.

Owns: what counts as a change of each. Does not own: which files a graph names (provenance.py).

    what          digest of                                                     does not count
    data          every byte of its files, in the order in which they are read  names, folders, dates
    model         its files by name; of one above 64 MiB its size, its first    where it is; what is no weights, config
                  and last MiB (a safetensors header among them), and 64        or tokenizer
                  pieces of 64 KiB between, at equal distances
    source file   its text                                                      its place; comments, blank lines

Reading a 70B model in full would take a minute at each start and each resume. What trains or
converts weights changes all of them, so that pieces at equal distances see it; an edit of a few
bytes inside a large file may go unseen.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

_MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".pt")
_IN_FULL = 64 << 20
_ENDS = 1 << 20
_PIECE, _PIECES = 64 << 10, 64


def data_digest(files: Iterable[Path]) -> str:
    """Of the content of these files, one after another. Raises OSError where one cannot be read."""
    whole = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:32]


def model_digest(base: str) -> str | None:
    """Of a model's directory; None where it is no directory, but a name that is looked up
    elsewhere.
    """
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return None
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES and p.is_file()):
        whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        whole.update(_file_digest(path))
    return whole.hexdigest()[:32]


def _file_digest(path: Path) -> bytes:
    """In full, or in pieces at equal distances."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _IN_FULL:
            return hashlib.file_digest(file, "sha256").digest()
        found = hashlib.sha256(file.read(_ENDS))
        for piece in range(_PIECES):
            file.seek(_ENDS + (size - 2 * _ENDS) * piece // _PIECES)
            found.update(file.read(_PIECE))
        file.seek(size - _ENDS)
        found.update(file.read(_ENDS))
        return found.digest()


def code_digest(text: str) -> str:
    """Of source code, comments and blank lines left out; of text that is no Python, as it is."""
    return hashlib.sha256(_code(text).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _code(text: str) -> str:
    lines = text.splitlines()
    whole: set[int] = set()
    """Lines within a text that spans several: whatever stands there counts."""
    opened = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            (first, column), (last, _) = token.start, token.end
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT":
                lines[first - 1] = lines[first - 1][:column]
            elif kind == "STRING":
                whole.update(range(first, last))
            elif kind == "FSTRING_START":
                opened = first
            elif kind == "FSTRING_END":
                whole.update(range(opened, last))
    except (tokenize.TokenError, SyntaxError):
        return text
    kept = [
        line if number in whole else line.rstrip() for number, line in enumerate(lines, start=1)
    ]
    return "\n".join(line for number, line in enumerate(kept, start=1) if line or number in whole)
