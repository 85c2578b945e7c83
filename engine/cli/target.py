"""What a command works on: a graph function, a run folder, or a snapshot.

Owns: finding `module:function`, `file.py:function`, a run folder and `graph.json`. Does not own:
flags, what is read from a run folder (engine/keep/untrusted_files.py).
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.errors import DataflowError, nearest
from dataflow.import_order import find_module, import_from
from dataflow.program import AnyGraph
from dataflow.program_snapshot import named_modules, read
from dataflow.safe_text import one_line
from engine.keep.run_folder import is_run
from engine.keep.untrusted_files import kept_options, list_imports, read_document, reading

FUNCTIONS = "module:function or file.py:function"
FORMS = "module:function, file.py:function, a run folder or its graph.json"
GRAPH = "graph.json"
_PLANNED = (
    "Options that a plan is made of (places, cluster, threads, seed) are by default those of that"
    " run, and a flag overrides each; all others have the defaults below. `run` begins a new run;"
    " `dataflow resume` goes on with the old one."
)


class UsageError(DataflowError):
    """The command line itself is wrong; exit code 2."""

    def __init__(self, where: str, problem: str, fix: str) -> None:
        super().__init__(f"{where}: {problem}. Fix: {fix}.")


class SourceError(DataflowError):
    """The user's file raised something as it was imported, or its graph function did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function that makes a graph or a Program, with the name it was asked for by."""

    text: str
    function: Callable[..., Any]

    def graph(self, **arguments: Any) -> AnyGraph:
        """Call it. Raises UsageError if it makes no Graph and no Program, SourceError if user code
        raises.
        """
        with _users_own(self.text):
            graph = self.function(**arguments)
        if not isinstance(graph, AnyGraph):
            returned = f"{type(graph).__name__} {graph!r:.60}"
            problem = f"expected a function that returns a Graph or a Program, found {returned}"
            raise UsageError(self.text, problem, "return Graph(...)")
        return graph


def load_target(text: str, *, runs: bool = False) -> Target:
    """The function that a TARGET names; that of a run folder, or of a snapshot, takes no
    parameters. runs: the graph will run; only then is what a snapshot names imported, and said
    first. Raises UsageError, GraphError, RunError.
    """
    if not is_received(text):
        return Target(text=text, function=load_function(text, "TARGET", FORMS))
    folder, path = run_folder(text), Path(text)
    if os.path.isdir(text):
        path = path / GRAPH
        if not path.is_file():
            problem = f"no {GRAPH} in it: the run was killed before it was written"
            raise UsageError(f"run folder {text}", problem, "the module:function that it ran")
    return Target(text=text, function=_snapshot(_existing(path, "snapshot"), folder, runs=runs))


def is_received(text: str) -> bool:
    """Whether a TARGET is a run folder or a graph.json, which others may have written."""
    return text.endswith(".json") or os.path.isdir(text)


def run_folder(text: str) -> Path | None:
    """The run folder that a TARGET is, or that its graph.json lies in; None for any other TARGET.
    Raises UsageError for a folder that is no run's.
    """
    path = Path(text)
    if os.path.isdir(text):
        if is_run(path):
            return path
        runs = sorted(str(folder) for folder in path.glob("*") if is_run(folder))[:4]
        problem = "expected a run folder (with versions.json in it), found another folder"
        fix = f"one of: {', '.join(runs)}" if runs else FORMS
        raise UsageError(f"TARGET {text!r}", problem, fix)
    return path.parent if path.name == GRAPH and is_run(path.parent) else None


def _snapshot(path: Path, folder: Path | None, *, runs: bool) -> Callable[[], AnyGraph]:
    def snapshot() -> AnyGraph:
        if runs:
            further = kept_options(folder)[1] if folder else ()
            import_from([str(Path.cwd())])
            tell_imports(list_imports(path, further))
            import_named(path, further)
        with reading(path):
            return read(read_document(path), str(path), imports=runs)

    snapshot.__doc__ = f"The graph kept in {path}."
    if folder is not None:
        snapshot.__doc__ += f" {_PLANNED}"
    return snapshot


def tell_imports(lines: Sequence[str]) -> None:
    """Say what is going to be imported, before it is."""
    for line in lines:
        print(one_line(line), file=sys.stderr, flush=True)


def import_named(path: Path, folders: Sequence[str]) -> None:
    """Import the user's modules that a graph.json names, so that what they raise is told as theirs.
    A module that is not found is left to the reader, which names what wants it. Raises UsageError,
    SourceError. folders: where they are also looked for, last.
    """
    import_from(folders)
    with reading(path):
        names = named_modules(read_document(path))
    for name in names:
        if find_module(name) is not None:
            with _users_own(f"{path}, which imports {name!r}"):
                importlib.import_module(name)


def load_function(text: str, what: str, forms: str = FUNCTIONS) -> Callable[..., Any]:
    """The function at `module:function` or `file.py:function`. forms: all that may stand there.
    Raises UsageError, SourceError.
    """
    place, mark, name = text.rpartition(":")
    if not mark or not place or not name:
        near = _folder_near(text) or " or ".join(_graphs_in(text.rstrip(":")))
        fix = near or "my_module:my_graph, or my_file.py:my_graph"
        raise UsageError(f"{what} {text!r}", f"expected {forms}", fix)
    with _users_own(f"{what} {text!r}"):
        file = _existing(Path(place), what) if place.endswith(".py") else None
        module = _file_module(file) if file else _named_module(place, what)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise _missing(module, name, what, text)
    return function


def functions_in(place: str) -> list[ast.FunctionDef]:
    """The public functions that a module or a file defines itself; nothing is imported."""
    file = _file_of(place)
    if not file.endswith(".py"):
        return []
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    return [function for function in functions if not function.name.startswith("_")]


def _file_of(place: str) -> str:
    """The file of a module, or the file itself; empty if there is none."""
    if not place or place.endswith(".py"):
        return place
    spec = find_module(place, (str(Path.cwd()),))
    return (spec and spec.origin) or ""


def _graphs_in(place: str) -> list[str]:
    """`place:function` of each function there that says that it returns a graph, else of each; at
    most four.
    """
    public = functions_in(place)
    makers = [f for f in public if f.returns and ast.unparse(f.returns) in ("Graph", "Program")]
    return [f"{place}:{function.name}" for function in (makers or public)[:4]]


def _folder_near(text: str) -> str:
    """The folder that a path may have meant; empty if none is like it."""
    folder, name = os.path.split(text)
    if not os.path.isdir(folder):
        return ""
    near = nearest(name, [path.name for path in Path(folder).glob("*") if path.is_dir()])
    return os.path.join(folder, near) if near else ""


@contextmanager
def _users_own(what: str) -> Iterator[None]:
    """The user's own errors as one line with its place; sys.exit does not end the command."""
    try:
        yield
    except DataflowError:
        raise
    except SystemExit as stop:
        problem = f"expected a module and a function that return, found sys.exit({stop.code!r})"
        fix = "if __name__ == '__main__' in front of it"
        raise UsageError(f"{raised_at(stop)} {what}", problem, fix) from stop
    except Exception as error:
        message = error.msg if isinstance(error, SyntaxError) else error
        cause = " ".join(f"{type(error).__name__}: {message}".split())
        fix = "mend that line; --traceback shows how it was reached"
        raise SourceError(f"{raised_at(error)} {what}: raised {cause}. Fix: {fix}.") from error


def raised_at(error: BaseException) -> str:
    """`my_file.py:12`: the innermost line of an exception that is in no installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    installed = (sys.prefix, sys.base_prefix, "<")
    user_frames = [frame for frame in frames if not frame[0].startswith(installed)] or frames
    if not user_frames:
        return "?"
    file, line = user_frames[-1]
    return f"{Path(file).name}:{line}"


def _missing(module: ModuleType, name: str, what: str, text: str) -> UsageError:
    place = module.__name__
    functions: list[str] = []
    for key, member in vars(module).items():
        if callable(member) and getattr(member, "__module__", None) == place:
            functions.append(key)
    fix = f"one of: {', '.join(functions) or '(it has no function)'}"
    near = nearest(name, functions)
    if near:
        fix = f"{text.rpartition(':')[0]}:{near}"
    return UsageError(f"{what} {text!r}", f"no function {name!r} in {place}", fix)


def _existing(path: Path, what: str) -> Path:
    try:
        if path.is_file():
            return path.resolve()
        folder = path.parent
        siblings = folder.glob(f"*{path.suffix}") if folder.is_dir() else ()
        names = [sibling.name for sibling in siblings]
    except OSError as error:  # a name that is too long, a folder that is closed
        problem = f"{str(path)[:80]!r} cannot be read: {error.strerror}"
        raise UsageError(what, problem, "another path") from error
    near = nearest(path.name, names)
    fix = str(path.with_name(near)) if near else f"a path from {Path.cwd()}"
    raise UsageError(what, f"no file {str(path)!r}", fix)


def _named_module(name: str, what: str) -> ModuleType:
    import_from([str(Path.cwd())])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there, and something that it imports is not
        file = Path(*name.split(".")).with_suffix(".py")
        fix = "a module that Python finds from here, or file.py:function"
        if file.is_file():
            fix = f"{file}:... names a file"
        raise UsageError(what, f"no module {error.name!r} (for {name!r})", fix) from None


def _file_module(path: Path) -> ModuleType:
    """Import a file by the name that a Worker finds it by: from its package's root, if any."""
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    import_from([str(folder)])
    importlib.invalidate_caches()
    spec = find_module(name)
    origin = spec.origin if spec else None
    if origin is None or Path(origin).resolve() != path:  # refused before the other is imported
        place = origin or "a folder, or built in"
        problem = f"Python has another module {name!r} ({place})"
        raise UsageError(path.name, problem, "give the file another name")
    return importlib.import_module(name)
