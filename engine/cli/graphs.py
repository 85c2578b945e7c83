"""`dataflow graphs`: the algorithms that come with it, each a file to copy and change.

Owns: finding and listing them by what their files say; nothing is imported. Does not own: any.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.errors import nearest
from engine.cli.screen import read_flags, say
from engine.cli.target import UsageError

_PACKAGE = "graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsOptions:
    """List the algorithms that come with dataflow; with NAME, print its file.

    `dataflow graphs NAME > mine.py` makes a file of your own: `dataflow check mine.py:NAME ...`.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ""


def main(arguments: Sequence[str]) -> int:
    """List them, or print one."""
    about = inspect.getdoc(GraphsOptions) or ""
    options = read_flags(GraphsOptions, args=arguments, prog="dataflow graphs", about=about)
    graphs = shipped_graphs()
    if not options.name:
        wide = max(map(len, graphs)) + 2
        lines = [f"{name.ljust(wide)}{summary(path)}" for name, path in graphs.items()]
        say("\n".join(lines))
    elif options.name in graphs:
        say(graphs[options.name].read_text(encoding="utf-8"), end="", fold=False)
    else:
        fix = f"one of: {', '.join(graphs)}"
        near = nearest(options.name, graphs)
        if near:
            fix = f"dataflow graphs {near}"
        raise UsageError("dataflow graphs", f"no graph {options.name!r}", fix)
    return 0


def shipped_graphs() -> dict[str, Path]:
    """Find the files of the graphs that come with it, by name. Each has the graph function of its
    name.
    """
    files: list[Path] = []
    package = find_spec(_PACKAGE)
    if package is not None:
        for folder in package.submodule_search_locations or ():
            files += Path(folder).glob("*.py")
    return {file.stem: file for file in sorted(files) if file.stem != "__init__"}


def summary(path: Path) -> str:
    """Read the first line of a file's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]
