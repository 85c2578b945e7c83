"""How dense the code of each room is to read, in ratios that no formatter can move.

    .venv/bin/python scripts/density.py [--write]

Owns: the rooms, the measures, and the values that are kept in density.json. Does not own: the test
that no room gets worse (tests/unit/test_density.py).

    expressions    expressions in a simple statement, or in the head of a compound one: mean, p90
    deep           statements with calls, comprehensions and conditionals nested four deep, percent
    conditionals   conditional expressions in 1,000 statements
    nested         comprehensions with two loops, or within another, in 1,000 lines of code
    splats         calls with `**` of a local name: the type checker does not see the keywords
    empty          variables and parameters whose name says nothing
    comments       comments in 100 lines of code, without pragmas and rulers; not held

--write: keep today's values of all rooms.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUES = Path(__file__).with_suffix(".json")
DEEP = 4
EMPTY_NAMES = frozenset(
    ["found", "told", "said", "own", "given", "kept", "there", "made"]
    + ["result", "data", "items", "value"]
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NESTING = (ast.Call, ast.IfExp, *_COMPREHENSIONS)
_PRAGMA = re.compile(r"#\s*(---|===|type:|noqa|pyright|!)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomDensity:
    """Of one room. All but `comments` are better when lower."""

    expressions: float
    expressions_p90: int
    deep: float
    conditionals: float
    nested: float
    splats: int
    empty: int
    comments: float


def rooms() -> dict[str, list[Path]]:
    """The files of each room: a folder of engine/, or one that lies beside it."""
    files: dict[str, list[Path]] = {}
    for package in ("dataflow", "engine", "graphs", "operators"):
        for path in sorted((ROOT / package).rglob("*.py")):
            folders = path.relative_to(ROOT).parts[:-1]
            inner = package == "engine" or folders[1:2] == ("kernels",)
            room = "/".join(folders[:2] if inner else folders[:1])
            files.setdefault(room, []).append(path)
    return files


def density(paths: Sequence[Path]) -> RoomDensity:
    """What these files measure, together."""
    lines = statements = deep = conditionals = nested = splats = empty = comments = 0
    sizes: list[int] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        lines += _code_lines(text, nodes)
        comments += _comments(text)
        for node in nodes:
            conditionals += isinstance(node, ast.IfExp)
            nested += _is_nested(node)
            splats += _has_splat(node)
            empty += _has_empty_name(node)
            if _is_counted_statement(node):
                statements += 1
                sizes.append(len(_head_expressions(node)))
                deep += _depth(node) >= DEEP
    sizes.sort()
    return RoomDensity(
        expressions=round(sum(sizes) / max(1, len(sizes)), 1),
        expressions_p90=sizes[int(0.9 * len(sizes))] if sizes else 0,
        deep=round(100 * deep / max(1, statements), 1),
        conditionals=round(1000 * conditionals / max(1, statements), 0),
        nested=round(1000 * nested / max(1, lines), 1),
        splats=splats,
        empty=empty,
        comments=round(100 * comments / max(1, lines), 1),
    )


def _is_counted_statement(node: ast.AST) -> bool:
    """Docstrings and imports are no thoughts."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False
    return isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom)


def _head_expressions(statement: ast.AST) -> list[ast.expr]:
    """The expressions of a statement without those of the statements in it."""
    expressions: list[ast.expr] = []
    inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
    waiting = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, inner)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            expressions.append(node)
        waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    return expressions


def _depth(node: ast.AST) -> int:
    """How deep calls, comprehensions and conditionals are nested within."""
    children = (n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt))
    below = max((_depth(child) for child in children), default=0)
    return below + isinstance(node, _NESTING)


def _is_nested(node: ast.AST) -> bool:
    if not isinstance(node, _COMPREHENSIONS):
        return False
    inner = (child for child in ast.walk(node) if child is not node)
    return len(node.generators) > 1 or any(isinstance(n, _COMPREHENSIONS) for n in inner)


def _has_splat(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return any(k.arg is None and isinstance(k.value, ast.Name) for k in node.keywords)


def _has_empty_name(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg in EMPTY_NAMES
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES


def _code_lines(text: str, nodes: Sequence[ast.AST]) -> int:
    """Lines that are neither blank, nor a comment, nor of a docstring."""
    docstrings: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    code = (n for n, line in numbered if line.strip() and not line.strip().startswith("#"))
    return sum(number not in docstrings for number in code)


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return sum(not _PRAGMA.match(comment) for comment in comments)


def table(values: dict[str, RoomDensity]) -> Iterator[str]:
    """A line for each room below a head."""
    names = [name.replace("_", " ") for name in RoomDensity.__slots__]
    wide = max(map(len, values))
    yield " ".join([" " * wide, *(name.rjust(15) for name in names)])
    for room, room_density in values.items():
        cells = [str(cell).rjust(15) for cell in asdict(room_density).values()]
        yield " ".join([room.ljust(wide), *cells])


def main(arguments: Sequence[str]) -> int:
    """Print the table; with --write keep it."""
    values = {room: density(paths) for room, paths in sorted(rooms().items())}
    print("\n".join(table(values)))
    if "--write" in arguments:
        rows = {room: asdict(each) for room, each in values.items()}
        VALUES.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
