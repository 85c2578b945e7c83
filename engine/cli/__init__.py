"""The command line: `dataflow COMMAND TARGET [flags]`.

Owns: the list of commands, and how an error ends a process. Does not own: any command or flag.

Exit codes: 0 done, 1 a wrong graph, plan or data, 2 a wrong command line, 3 a run that failed, 4 an
unexpected error, which is our fault, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. The first cause is the
last line on the screen; `--traceback` and a run's log show its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from dataflow.errors import CheckpointError, DataflowError, KernelError, RunError, nearest
from dataflow.importing import import_path
from dataflow.shown import printable
from dataflow.storage import CANNOT
from engine.cli.target import FORMS, UsageError, raised_at
from engine.received import reading

COMMANDS = {
    "check": "prove that a graph or a Program can be run, and draw it",
    "draw": "draw a graph: text, Mermaid, DOT or SVG",
    "explain": "show the plan: devices, memory, seconds, what was rejected",
    "run": "run a graph or a Program",
    "resume": "go on from a run folder's last checkpoint",
    "peek": "show the first rows of one node's output",
    "diff": "show what changes from one graph to another",
    "test": "test what an operator or a loss promises, on generated rows",
    "graphs": "list the algorithms that come with it, or print one's file",
    "keys": "make the key file of a cluster of hosts",
    "host": "let runs that are started on another host use this one",
}
"""Command -> what it does. Each is a module here, imported when it is asked for."""

LOOKING = ("check", "draw", "explain", "diff")
"""Commands that look at a graph and run nothing of it."""

_FAILED_RUN = (RunError, KernelError, CheckpointError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. arguments: those of the process by default."""
    # Read when torch is first imported. OpenMP threads that wait spin shortly, then sleep: spinning
    # on made runs up to ten times slower where another process wanted a core, and sleeping at once
    # half as slow again where none did.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if arguments is None:
        # In a process of its own, nothing in the current folder may shadow what is installed.
        sys.path[:] = import_path()
        arguments = sys.argv[1:]
    try:
        code = _command([argument for argument in arguments if argument != "--traceback"])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # `dataflow draw ... | head` has seen enough
        _without_output()
        return 0
    except SystemExit as stop:  # how the parser of flags ends --help (0) and wrong flags (2)
        return stop.code if isinstance(stop.code, int) else 2
    except Exception as error:  # the last place where one can be shown as a line
        if "--traceback" in arguments:
            raise
        return _shown(error)


def _shown(error: Exception) -> int:
    """Print what ended the command as its last line; returns the exit code."""
    lost = _lost_output("\n" if isinstance(error, OSError) else "")
    if isinstance(error, DataflowError):
        _say(str(error))
        return 2 if isinstance(error, UsageError) else 3 if isinstance(error, _FAILED_RUN) else 1
    if isinstance(error, OSError) and lost is not None:
        fix = "another file for it, or a disk with room"
        _say(f"standard output {CANNOT}: {lost.strerror}. Fix: {fix}.")
        return 3
    told = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError):
        told = "not enough memory"
    fix = "report what it shows when run again with --traceback"
    _say(f"internal error: {told} ({raised_at(error)}). Fix: {fix}.")
    return 4


def _say(text: str) -> None:
    """Print the message that ends a command."""
    print(printable(text), file=sys.stderr)


def _lost_output(more: str) -> OSError | None:
    """Flush standard output before a message; its error where it takes no more."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        _without_output()
        return error
    return None


def _without_output() -> None:
    """Send standard output nowhere, so that Python's own flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if given else 2
    if given[0] == "--version":
        from importlib.metadata import version

        print(version("dataflow-rl"))
        return 0
    name, words = given[0], given[1:]
    command = _main_of(name)
    received = [w for w in words[:2] if w.endswith(".json")] if name in LOOKING else []
    with reading(received[0]) if received else nullcontext():
        return command(words)


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        fix = f"dataflow {near}" if near else f"one of: {', '.join(COMMANDS)}"
        raise UsageError("dataflow", f"no command {name!r}", fix)
    return importlib.import_module(f"engine.cli.{name}").main


def usage() -> str:
    """What `dataflow --help` prints."""
    wide = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name.ljust(wide)}{does}" for name, does in COMMANDS.items())
    return (
        f"usage: dataflow COMMAND TARGET [flags]\n\n{commands}\n\nTARGET is {FORMS}.\n"
        "Its flags are its function's parameters: dataflow run TARGET --help.\n"
        "--traceback shows where an error was raised."
    )
