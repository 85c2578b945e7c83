"""Digests of a run's inputs: data, models, the user's source files.

Owns: what counts as a change of each. Does not own: which files a graph names (provenance.py).

    what     digest of                                              does not count
    data     every byte of its files, in the order of reading       names, folders, dates
    model    its files by name; above 64 MiB the size, the first    its place; files other than
             and last MiB (with a safetensors header), and 64       weights, config, tokenizer
             pieces of 64 KiB between, at equal distances
    source   its text                                               its place, comments, blank lines

Reading a 70B model in full would take a minute at each start and resume. Training or converting
changes all weights, which samples show; an edit of a few bytes in a large file may go unnoticed.
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
    """The digest of these files' content, in order. Raises OSError."""
    whole = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:32]


def model_digest(base: str) -> str | None:
    """The digest of a model's directory; None for a name that is not one."""
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return None
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES and p.is_file()):
        whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        whole.update(_file_digest(path))
    return whole.hexdigest()[:32]


def _file_digest(path: Path) -> bytes:
    """The digest of a small file in full, of a large one in samples."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _IN_FULL:
            return hashlib.file_digest(file, "sha256").digest()
        samples = hashlib.sha256(file.read(_ENDS))
        for piece in range(_PIECES):
            file.seek(_ENDS + (size - 2 * _ENDS) * piece // _PIECES)
            samples.update(file.read(_PIECE))
        file.seek(size - _ENDS)
        samples.update(file.read(_ENDS))
        return samples.digest()


def code_digest(text: str) -> str:
    """The digest of source code without comments and blank lines; of other text as it is."""
    return hashlib.sha256(_code(text).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _code(text: str) -> str:
    try:
        comments, within = _marked(text)
    except (tokenize.TokenError, SyntaxError):
        return text
    lines = text.splitlines()
    for number, column in comments:
        lines[number - 1] = lines[number - 1][:column]
    numbered = enumerate(lines, start=1)
    kept = ((n, line if n in within else line.rstrip()) for n, line in numbered)
    return "\n".join(line for n, line in kept if line or n in within)


def _marked(text: str) -> tuple[list[tuple[int, int]], set[int]]:
    """(line, column) of each comment; the lines that end in a string, where spaces count."""
    comments: list[tuple[int, int]] = []
    within: set[int] = set()
    opened = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match tokenize.tok_name[token.type]:
            case "COMMENT":
                comments.append(token.start)
            case "STRING":
                within.update(range(token.start[0], token.end[0]))
            case "FSTRING_START":
                opened = token.start[0]
            case "FSTRING_END":
                within.update(range(opened, token.end[0]))
    return comments, within
