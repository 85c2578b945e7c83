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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_NO_ARGUMENTS: Mapping[str, Any] = {}
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

    def graph(self, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> AnyGraph:
        """Call the function. Raises UsageError if it makes no Graph and no Program, SourceError if
        user code raises.
        """
        with _users_errors(self.text):
            graph = self.function(**arguments)
        if not isinstance(graph, AnyGraph):
            returned = f"{type(graph).__name__} {graph!r:.60}"
            problem = f"expected a function that returns a Graph or a Program, found {returned}"
            raise UsageError(self.text, problem, "return Graph(...)")
        return graph


def load_target(text: str, *, runs: bool = False) -> Target:
    """Load the function that a TARGET names; that of a run folder, or of a snapshot, takes no
    parameters. runs: the graph will run; only then is what a snapshot names imported, and said
    first. Raises UsageError, GraphError, RunError.
    """
    if not is_received(text):
        return Target(text=text, function=load_function(text, "TARGET", FORMS))
    folder = run_folder(text)
    path = Path(text)
    if os.path.isdir(text):
        path = path / GRAPH
        if not path.is_file():
            problem = f"no {GRAPH} in it: the run was killed before it was written"
            raise UsageError(f"run folder {text}", problem, "the module:function that it ran")
    file = _require_file(path, "snapshot")
    return Target(text=text, function=_snapshot_reader(file, folder, runs=runs))


def is_received(text: str) -> bool:
    """Whether a TARGET is a run folder or a graph.json, which others may have written."""
    return text.endswith(".json") or os.path.isdir(text)


def run_folder(text: str) -> Path | None:
    """Find the run folder that a TARGET is, or that its graph.json lies in; None for any other
    TARGET. Raises UsageError for a folder that is no run's.
    """
    path = Path(text)
    if os.path.isdir(text):
        if is_run(path):
            return path
        runs = sorted(str(folder) for folder in path.glob("*") if is_run(folder))[:4]
        problem = "expected a run folder (with versions.json in it), found another folder"
        fix = FORMS
        if runs:
            fix = f"one of: {', '.join(runs)}"
        raise UsageError(f"TARGET {text!r}", problem, fix)
    if path.name == GRAPH and is_run(path.parent):
        return path.parent
    return None


def _snapshot_reader(path: Path, folder: Path | None, *, runs: bool) -> Callable[[], AnyGraph]:
    """Return a function that reads a graph.json; its docstring is what --help shows of it."""

    def snapshot() -> AnyGraph:
        if runs:
            import_folders: Sequence[str] = ()
            if folder is not None:
                _, import_folders = kept_options(folder)
            import_from([str(Path.cwd())])
            tell_imports(list_imports(path, import_folders))
            import_named(path, import_folders)
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
            with _users_errors(f"{path}, which imports {name!r}"):
                importlib.import_module(name)


def load_function(
    text: str, what: str, forms: str = FUNCTIONS, kinds: tuple[type[Any], ...] = ()
) -> Callable[..., Any]:
    """Load the function at `module:function` or `file.py:function`. forms: all that may stand
    there. kinds: of what may stand there beside functions. Raises UsageError, SourceError.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        near = _folder_near(text) or " or ".join(_graphs_in(text.rstrip(":")))
        fix = near or "my_module:my_graph, or my_file.py:my_graph"
        raise UsageError(f"{what} {text!r}", f"expected {forms}", fix)
    with _users_errors(f"{what} {text!r}"):
        if place.endswith(".py"):
            module = _import_file(_require_file(Path(place), what))
        else:
            module = _import_module(place, what)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not (callable(function) or isinstance(function, kinds)):
        raise _no_function(module, name, what, text)
    return function


def functions_in(place: str) -> list[ast.FunctionDef]:
    """List the public functions that a module or a file defines itself; nothing is imported."""
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
    """Find the file of a module, or the file itself; empty if there is none."""
    if not place or place.endswith(".py"):
        return place
    spec = find_module(place, (str(Path.cwd()),))
    if spec is None:
        return ""
    return spec.origin or ""


def _graphs_in(place: str) -> list[str]:
    """List `place:function` of each function there that says that it returns a graph, else of each;
    at most four.
    """
    functions = functions_in(place)
    makers: list[ast.FunctionDef] = []
    for function in functions:
        if function.returns and ast.unparse(function.returns) in ("Graph", "Program"):
            makers.append(function)
    likely = makers or functions
    return [f"{place}:{function.name}" for function in likely[:4]]


def _folder_near(text: str) -> str:
    """Find the folder that a path may have meant; empty if none is like it."""
    folder, name = os.path.split(text)
    if not os.path.isdir(folder):
        return ""
    siblings = [path.name for path in Path(folder).glob("*") if path.is_dir()]
    near = nearest(name, siblings)
    if not near:
        return ""
    return os.path.join(folder, near)


@contextmanager
def _users_errors(what: str) -> Iterator[None]:
    """Raise what user code raises as one line with its place; sys.exit does not end the command.
    Raises SourceError, UsageError.
    """
    try:
        yield
    except DataflowError:
        raise
    except SystemExit as stop:
        problem = f"expected a module and a function that return, found sys.exit({stop.code!r})"
        fix = "if __name__ == '__main__' in front of it"
        raise UsageError(f"{raised_at(stop)} {what}", problem, fix) from stop
    except Exception as error:
        message: object = error
        if isinstance(error, SyntaxError):  # its text has the place, too, which comes first here
            message = error.msg
        cause = " ".join(f"{type(error).__name__}: {message}".split())
        fix = "mend that line; --traceback shows how it was reached"
        raise SourceError(f"{raised_at(error)} {what}: raised {cause}. Fix: {fix}.") from error


def raised_at(error: BaseException) -> str:
    """`my_file.py:12`: the innermost line of an exception that is in no installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    installed = (sys.prefix, sys.base_prefix, "<")
    frames = list(traceback.extract_tb(error.__traceback__))
    user_frames = [frame for frame in frames if not frame.filename.startswith(installed)]
    if not frames:
        return "?"
    innermost = (user_frames or frames)[-1]
    return f"{Path(innermost.filename).name}:{innermost.lineno}"


def _no_function(module: ModuleType, name: str, what: str, text: str) -> UsageError:
    """Make the error for a module that lacks the function."""
    functions: list[str] = []
    for key, member in vars(module).items():
        if callable(member) and getattr(member, "__module__", None) == module.__name__:
            functions.append(key)
    fix = f"one of: {', '.join(functions) or '(it has no function)'}"
    near = nearest(name, functions)
    if near:
        place = text.rpartition(":")[0]
        fix = f"{place}:{near}"
    return UsageError(f"{what} {text!r}", f"no function {name!r} in {module.__name__}", fix)


def _require_file(path: Path, what: str) -> Path:
    """Return the whole path of a file. Raises UsageError where there is none, with the file beside
    it that it may have meant.
    """
    try:
        if path.is_file():
            return path.resolve()
        folder = path.parent
        names: list[str] = []
        if folder.is_dir():
            names = [sibling.name for sibling in folder.glob(f"*{path.suffix}")]
    except OSError as error:  # a name that is too long, a folder that is closed
        problem = f"{str(path)[:80]!r} cannot be read: {error.strerror}"
        raise UsageError(what, problem, "another path") from error
    near = nearest(path.name, names)
    fix = f"a path from {Path.cwd()}"
    if near:
        fix = str(path.with_name(near))
    raise UsageError(what, f"no file {str(path)!r}", fix)


def _import_module(name: str, what: str) -> ModuleType:
    """Import a module that Python finds from the current folder. Raises UsageError if there is
    none.
    """
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


def _import_file(path: Path) -> ModuleType:
    """Import a file by the name that a Worker finds it by: from its package's root, if any."""
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    import_from([str(folder)])
    importlib.invalidate_caches()
    spec = find_module(name)
    origin = spec.origin if spec else None
    # Refused before the other module is imported, which may do anything.
    if origin is None or Path(origin).resolve() != path:
        place = origin or "a folder, or built in"
        problem = f"Python has another module {name!r} ({place})"
        raise UsageError(path.name, problem, "give the file another name")
    return importlib.import_module(name)
