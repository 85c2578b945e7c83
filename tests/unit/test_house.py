"""The shape of the code: sizes, names and the direction of imports."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dataflow", "operators", "graphs", "engine")
LONGEST = 450
"""Lines of a file."""


@cache
def modules() -> dict[str, str]:
    """Each Python file of the repository, and its text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    names = [name for name in listed if (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text() for name in names}


def test_no_file_is_too_long() -> None:
    lengths = {name: text.count("\n") for name, text in modules().items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for name, text in modules().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_imports_in_a_circle() -> None:
    """Neither among modules nor among the folders of engine/."""
    found = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imports = nx.DiGraph(
        (module, other)
        for module in found.modules
        for other in found.find_modules_directly_imported_by(module)
    )
    rooms = nx.quotient_graph(imports, lambda one, other: room(one) == room(other))
    assert [sorted(c) for c in nx.strongly_connected_components(imports) if len(c) > 1] == []
    circles = [c for c in nx.strongly_connected_components(rooms) if len(c) > 1]
    assert [sorted({room(m) for block in c for m in block}) for c in circles] == []


def room(module: str) -> str:
    """The folder of engine/ that a module is in, or its own name there; else the package."""
    top, *rest = module.split(".")
    return f"{top}.{rest[0]}" if top == "engine" and rest else top
