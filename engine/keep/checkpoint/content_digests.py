"""Digests of a run's inputs: data, models, the user's source files.

Owns: what counts as a change of each. Does not own: which files a graph names (provenance.py).

    what     digest of                                              does not count
    data     every byte of its files, in the order of reading;      names, folders, dates
             of a data set of the hub, the rows that are read
    model    its files by name; above 64 MiB the size, the first    its place; files other than
             and last MiB (with a safetensors header), and 64       weights, config, tokenizer
             pieces of 64 KiB between, at equal distances
    source   its text                                               its place, comments, blank lines

Reading a 70B model in full would take a minute at each start and resume. Training or converting
changes all weights, which samples show; an edit of a few bytes in a large file may go unnoticed.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTENT = "content "
"""Prefix of a content's value."""
_MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".pt")
_IN_FULL = 64 << 20
_ENDS = 1 << 20
_PIECE, _PIECES = 64 << 10, 64
_PART = 16
"""Characters of a part's digest: it only says which part changed."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A digest, and those of its parts by name: files, or definitions of a source file."""

    digest: str
    parts: Mapping[str, str]


class Files:
    """Where the files of a run are, and the digests of their parts, by what names them."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.parts: dict[str, Mapping[str, str]] = {}

    def content(self, name: str, place: str, content: Content) -> str:
        """Note a content; returns its value."""
        self.places[name] = place
        self.parts[name] = content.parts
        return f"{CONTENT}{content.digest}"


def data_content(files: Iterable[Path | str]) -> Content:
    """The content of these files, in order; a single one has no parts. A text is itself the digest
    of rows that are in no file of the user's. Raises OSError.
    """
    whole_hash, parts = hashlib.sha256(), {}
    for path in files:
        if isinstance(path, str):
            whole_hash.update(path.encode())
            continue
        with open(path, "rb") as file:
            file_hash = hashlib.file_digest(file, "sha256")
        whole_hash.update(file_hash.digest())
        parts[path.name] = file_hash.hexdigest()[:_PART]
    return Content(digest=whole_hash.hexdigest()[:32], parts=parts if len(parts) > 1 else {})


def model_content(base: str, *, whole: bool = False) -> Content | None:
    """The content of a model's directory; None for a name that is not one. whole: read large files
    in full, too.
    """
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return None
    whole_hash, parts = hashlib.sha256(), {}
    for path in sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES and p.is_file()):
        digest_parts = (
            f"{path.name} {path.stat().st_size}\n".encode(),
            file_digest(path, whole=whole),
        )
        whole_hash.update(digest_parts[0])
        whole_hash.update(digest_parts[1])
        parts[path.name] = hashlib.sha256(b"".join(digest_parts)).hexdigest()[:_PART]
    return Content(digest=whole_hash.hexdigest()[:32], parts=parts)


def code_content(text: str) -> Content:
    """The content of a source file, and of each function and class at its top level."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        body = []
    lines = text.splitlines()
    parts: dict[str, str] = {}
    for statement in body:
        if isinstance(statement, _DEFINITIONS):
            source = "\n".join(lines[_first(statement) - 1 : statement.end_lineno])
            parts[statement.name] = code_digest(source)[:_PART]
    return Content(digest=code_digest(text), parts=parts)


def _first(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """The line of its first decorator, or its own."""
    lines = [decorator.lineno for decorator in definition.decorator_list]
    return min([definition.lineno, *lines])


def file_digest(path: Path, *, whole: bool = False) -> bytes:
    """The digest of a small file in full, of a large one in samples unless all of it is wanted."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if whole or size <= _IN_FULL:
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
    code = _code(text).encode("utf-8", "surrogateescape")
    return hashlib.sha256(code).hexdigest()[:32]


def _code(text: str) -> str:
    try:
        comments, string_lines = _find_marks(text)
    except (tokenize.TokenError, SyntaxError):
        return text
    lines = text.splitlines()
    for number, column in comments:
        lines[number - 1] = lines[number - 1][:column]
    numbered = enumerate(lines, start=1)
    kept_lines = ((n, line if n in string_lines else line.rstrip()) for n, line in numbered)
    return "\n".join(line for n, line in kept_lines if line or n in string_lines)


def _find_marks(text: str) -> tuple[list[tuple[int, int]], set[int]]:
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
