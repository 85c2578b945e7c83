"""`dataflow watch [RUN ...]`: a page that shows runs, live and afterwards.

Owns: the command's options, and starting it beside a run (`run --watch`). Does not own: the server
(engine/watch), the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dataflow.signals import hold_back_signals
from engine.cli.screen import read_flags, say
from engine.cli.target import UsageError
from engine.keep.run_folder import is_run

if TYPE_CHECKING:
    from engine.watch.server import Serving

_NEEDED = ("starlette", "uvicorn")
_ROOT = Path("runs")
_BESIDE = (
    "import sys; from engine.watch.server import serve_beside_run; serve_beside_run(*sys.argv[1:])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Show runs on a page of this machine's browser: the graph with what flows through it, curves,
    samples, several runs side by side; while they go on and afterwards. It only reads.
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ()
    """Runs to open first: names in the root, or run folders that are all in one folder."""
    root: Path = _ROOT
    """Folder that holds run folders; all of them can be opened."""
    port: int = 0
    """Port on 127.0.0.1; 0: any that is free."""
    open: bool = False
    """Open the page in the browser."""
    token_file: Path | None = None
    """File that keeps the URL's token, made if it is not there; for what asks without a browser, as
    Prometheus. By default each start has a new one.
    """


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; raises UsageError for runs that are not there."""
    about = WatchOptions.__doc__ or ""
    options = read_flags(WatchOptions, args=arguments, prog="dataflow watch", about=about)
    require_ui("dataflow watch")
    serving = _serving_of(options)
    from engine.watch.server import serve  # here: it imports the server

    def tell(url: str) -> None:
        say(url, fold=False)
        sys.stdout.flush()
        if options.open:
            webbrowser.open(url)

    serve(serving, tell)
    return 0


def require_ui(where: str) -> None:
    """Raise UsageError where the packages of the extra [ui] are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        problem = f"needs {' and '.join(missing)}, which {verb} not installed"
        raise UsageError(where, problem, "pip install 'dataflow-rl[ui]'")


def _serving_of(options: WatchOptions) -> Serving:
    """Say what is served, and where, for these options. Raises UsageError."""
    from engine.watch.server import Serving
    from engine.watch.token_file import kept_token

    root, names = _split_runs(options.root, options.run)
    if not root.is_dir():
        fix = "dataflow watch --root FOLDER, a folder with run folders in it"
        raise UsageError("dataflow watch", f"no folder {str(root)!r}", fix)
    for name in names:
        if not is_run(root / name):
            runs = sorted(path.name for path in root.iterdir() if is_run(path))[:4]
            fix = "a run folder"
            if runs:
                fix = f"one of: {', '.join(runs)}"
            raise UsageError("dataflow watch", f"no run {name!r} in {root}", fix)
    if not 0 <= options.port < 65536:
        problem = f"expected a port from 0 to 65535, found {options.port}"
        raise UsageError("dataflow watch --port", problem, "--port 0")
    token = ""
    if options.token_file:
        token = kept_token(options.token_file)
    return Serving(root=root, first=names, port=options.port, token=token)


def _split_runs(root: Path, runs: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Split runs, which are names or paths, into the folder of all of them and their names in it.
    Raises UsageError for runs of several folders.
    """
    if len(runs) == 1 and os.path.isdir(runs[0]) and not is_run(Path(runs[0])):
        return Path(runs[0]), ()
    paths: list[Path] = []
    for run in runs:
        path = Path(run)
        if not is_run(path):
            path = root / run
        paths.append(path)
    folders = list(dict.fromkeys(path.resolve().parent for path in paths))
    if len(folders) > 1:
        problem = f"expected runs of one folder, found some in {folders[0]} and in {folders[1]}"
        raise UsageError("dataflow watch", problem, "put them into one folder, or watch one")
    names = tuple(path.resolve().name for path in paths)
    if folders:
        return folders[0], names
    return root, names


@contextmanager
def watching(root: Path, name: str, *, wanted: bool) -> Iterator[None]:
    """Serve a run's page from a process beside it while it goes on, if that is wanted.

    That process ends after this one, however this one ends: its standard input is a pipe from here.
    Ctrl-C and other stop signals are the run's.
    """
    if not wanted:
        yield
        return
    require_ui("--watch")
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _BESIDE, str(root.resolve()), name]
    pipe = subprocess.PIPE
    with hold_back_signals():
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    url = child.stdout.readline().strip()
    if url:
        say(f"watch  {url}", fold=False)
    else:
        say("the page could not be served; the run goes on", fold=False)
    try:
        yield
    finally:
        child.stdin.close()
        child.stdout.close()
        child.poll()
