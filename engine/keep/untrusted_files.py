"""Reading a graph.json or a run folder that may come from an untrusted source.

Owns: listing what it would import before that happens, and the error for a document that says
something impossible. Does not own: how it is read (dataflow/snapshot.py, engine/plan/options.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import DataflowError, RunError
from dataflow.import_order import find_module, import_path
from dataflow.json_values import snapshot_error
from dataflow.program_snapshot import named_modules
from engine.plan.options import RunOptions, decode_options

_IMPOSSIBLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""What our own code raises for a value that no run writes."""

OPTIONS = "options.json"
PROFILE = "profile.json"
"""The copy of the profile that a run was planned by."""


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Turn errors of our own code, as it reads an untrusted document, into a GraphError."""
    try:
        yield
    except DataflowError:
        raise
    except _IMPOSSIBLE as error:
        problem = f"it is not as a run writes it: {type(error).__name__}: {error!s:.200}"
        raise snapshot_error(problem, "name the module:function that made it", str(what)) from error


def read_document(path: Path) -> str:
    """A document's text. Raises GraphError if it cannot be read as text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if path.name == OPTIONS:
            what = "options"
        else:
            what = "a graph"
        problem = f"expected {what}, found what cannot be read: {error}"
        raise snapshot_error(problem, f"give a run's {path.name}", str(path)) from None


def kept_options(folder: Path) -> tuple[RunOptions, tuple[str, ...]]:
    """A run folder's options, and the folders that the run imported from. Raises RunError, and
    GraphError where the file is no text.
    """
    path = folder / OPTIONS
    if not path.is_file():
        problem = "expected the options of the run, found no such file"
        fix = "restore it, or name the module:function that made the graph"
        raise RunError(f"{path}: {problem}. Fix: {fix}.")
    with reading(path):
        return decode_options(read_document(path), {}, str(path), folder)


def list_imports(path: Path, folders: Sequence[str] = ()) -> list[str]:
    """What running this file's graph will import, and from where. folders: searched last."""
    with reading(path):
        named = named_modules(read_document(path))
    lines = [f"imports {name} from {_place(name, folders)}" for name in named]
    further = [folder for folder in folders if folder not in import_path()]
    if further and lines:
        lines.append(f"what these import is also looked for in {', '.join(further)}")
    return lines


def _place(name: str, folders: Sequence[str]) -> str:
    spec = find_module(name, folders)
    if spec is None:
        return "nowhere: it is not found"
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or "Python itself"
