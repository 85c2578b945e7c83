"""Reading a graph.json or a run folder that may come from an untrusted source.

Owns: listing what it would import before that happens, and one error for a document that says
something impossible. Does not own: the documents (dataflow/snapshot.py, engine/options.py), nor how
they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import DataflowError
from dataflow.importing import import_path, located
from dataflow.snapshot import modules
from dataflow.written import unread

_IMPOSSIBLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
"""What our own code raises for a value of a kind that no run writes."""


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Turn errors of our own code while it reads an untrusted graph into a GraphError that names
    the document. Errors that say more by themselves stay as they are.
    """
    try:
        yield
    except DataflowError:
        raise
    except _IMPOSSIBLE as error:
        problem = f"it is not as a run writes it: {type(error).__name__}: {error!s:.200}"
        raise unread(problem, "name the module:function that made it", str(what)) from error


def text_of(path: Path) -> str:
    """A document's text. Raises GraphError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"expected a graph, found what cannot be read: {error}"
        raise unread(problem, "give a run's graph.json", str(path)) from None


def imports(path: Path, folders: Sequence[str] = ()) -> list[str]:
    """What running the graph of this file will import, and from where, a line each; imports
    nothing. folders: those that the run's options name, searched last.
    """
    with reading(path):
        named = modules(text_of(path))
    lines = [f"imports {name} from {_place(name, folders)}" for name in named]
    further = [folder for folder in folders if folder not in import_path()]
    if further and lines:
        lines.append(f"what these import is also looked for in {', '.join(further)}")
    return lines


def _place(name: str, folders: Sequence[str]) -> str:
    found = located(name, folders)
    if found is None:
        return "nowhere: it is not found"
    return found.origin or ", ".join(found.submodule_search_locations or ()) or "Python itself"
