"""The shape of the code: sizes, names and the direction of imports."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import grimp
import networkx as nx

from tests.unit.test_docs import named, tracked

PACKAGES = ("dataflow", "operators", "graphs", "engine")
LONGEST = 450
"""Lines of a file."""


@cache
def modules() -> dict[str, str]:
    """Each Python file of the repository, and its text."""
    return {named(path): path.read_text() for path in tracked() if path.suffix == ".py"}


def test_no_file_is_too_long() -> None:
    assert [name for name, text in modules().items() if text.count("\n") > LONGEST] == []


def test_no_two_classes_have_one_name() -> None:
    """Only files with lines that name one class are parsed: all of them take six seconds."""
    files = defaultdict(list)
    for file, text in modules().items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            files[name].append(file)
    assert len(files) > 1000, "this looks at nothing"
    alike = {name: at for name, at in files.items() if len(at) > 1}
    places = defaultdict(set)
    for file in {file for at in alike.values() for file in at}:
        for node in ast.walk(ast.parse(modules()[file])):
            if isinstance(node, ast.ClassDef) and node.name in alike:
                places[node.name].add(f"{file}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


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


def test_no_algorithm_has_a_name_in_the_engine() -> None:
    """Which algorithm a run is stands in its graph alone."""
    files = [Path(name) for name in modules() if name.startswith("graphs/")]
    shipped = [file.stem for file in files if file.stem != "__init__"]
    named = re.compile(rf"(?<![a-z_])({'|'.join(shipped)})(?![a-z_])", re.IGNORECASE)
    engine = {name: text for name, text in modules().items() if name.startswith("engine/")}
    found = {name: named.findall(text) for name, text in engine.items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_no_operator_has_a_long_body() -> None:
    declared = {name: text for name, text in modules().items() if name.startswith("operators/")}
    lengths = {}
    for name, text in declared.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno + 1 - body[0].lineno if body else 0
                lengths[f"{name}:{node.lineno} {node.name}"] = lines
    assert len(lengths) > 500, "this looks at nothing"
    assert {name: lines for name, lines in lengths.items() if lines > 40} == {}


def room(module: str) -> str:
    """The folder of engine/ that a module is in, or its own name there; else the package."""
    top, *rest = module.split(".")
    return f"{top}.{rest[0]}" if top == "engine" and rest else top
