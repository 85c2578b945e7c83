"""The command line: `dataflow COMMAND TARGET [flags]`.

Owns: the list of commands, and how an error ends a process. Does not own: any command or flag.

Exit codes: 0 done, 1 a wrong graph, plan or data, 2 a wrong command line, 3 a run that failed, 4 an
unexpected error, which is our fault, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP; of `rerun` 1 is a
difference, and 3 all that keeps it from comparing. The first cause is the
last line on the screen; `--traceback` and a run's log show its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from dataflow.errors import CheckpointError, DataflowError, KernelError, RunError, nearest
from dataflow.import_order import describe_hidden_modules, import_path
from dataflow.safe_text import printable
from dataflow.storage import CANNOT
from dataflow.width import fold_lines, screen_width
from engine.cli.process_limits import EXHAUSTED, PANIC, is_exhausted
from engine.cli.target import FORMS, UsageError, is_received, raised_at
from engine.keep.untrusted_files import reading

COMMANDS = {
    "check": "prove that a graph or a Program can be run, and draw it",
    "draw": "draw a graph: text, Mermaid, DOT or SVG",
    "explain": "show the plan: devices, memory, seconds, what was rejected",
    "simulate": "run a plan in simulated time: seconds, utilisation, cost, what-if",
    "profile": "measure a plan's Models here, and write what their passes take",
    "run": "run a graph or a Program",
    "resume": "go on from a run folder's last checkpoint",
    "rerun": "run nodes of a recorded run again, and compare bit by bit",
    "peek": "show the first rows of one node's output",
    "watch": "show runs on a page of the browser, while they go on and afterwards",
    "report": "write what a run did as one HTML file",
    "runs": "list run folders: how far each is, and how it ended",
    "top": "show what a run does, live or afterwards: who waits for whom",
    "diff": "show what changes from one graph, or run, to another",
    "merge": "merge an adapter into its base, and write a whole model",
    "test": "test what an operator or a loss promises, on generated rows",
    "init": "make a small project of your own that runs as it is",
    "graphs": "list the algorithms that come with it, or print one's file",
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
    if os.environ.get("NO_COLOR"):  # tyro does not look at it, but reads this as it is imported
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    if arguments is None:
        # In a process of its own, nothing in the current folder may shadow what is installed.
        sys.path[:] = import_path()
        arguments = sys.argv[1:]
        _tell_hidden()
    try:
        code = _run_command([argument for argument in arguments if argument != "--traceback"])
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
        return _print_error(error)
    except BaseException as error:
        if type(error).__name__ != PANIC or "--traceback" in arguments:
            raise
        return _print_error(error)


def _tell_hidden() -> None:
    """Say which modules of the current folder targets cannot import."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return
    notice = describe_hidden_modules(here)
    if notice:
        _say(notice)


def _print_error(error: BaseException) -> int:
    """Print what ended the command as its last line; returns the exit code."""
    # An OSError may have come in the middle of a line that was printed.
    lost = _flush_output("\n" if isinstance(error, OSError) else "")
    if is_exhausted(error):
        _say(EXHAUSTED)
        return 3
    if isinstance(error, DataflowError):
        _say(str(error))
        return _code_of(error)
    if isinstance(error, OSError) and lost is not None:
        fix = "another file for it, or a disk with room"
        _say(f"standard output {CANNOT}: {lost.strerror}. Fix: {fix}.")
        return 3
    if isinstance(error, MemoryError):
        fix = "smaller numbers of rows and tokens, or a machine with more memory"
        _say(f"not enough memory ({raised_at(error)}). Fix: {fix}.")
        return 3
    message = " ".join(f"{type(error).__name__}: {error}".split())
    fix = "report what it shows when run again with --traceback"
    _say(f"internal error: {message} ({raised_at(error)}). Fix: {fix}.")
    return 4


def _code_of(error: DataflowError) -> int:
    """Choose the exit code of a command that an error of ours ended."""
    if isinstance(error, UsageError):
        return 2
    if isinstance(error, _FAILED_RUN):
        return 3
    return 1


def _say(text: str) -> None:
    """Print the message that ends a command."""
    lines = fold_lines(text, screen_width(sys.maxsize, sys.stderr))
    print(printable(lines), file=sys.stderr)


def _flush_output(end: str) -> OSError | None:
    """Flush standard output before a message, with this behind it. Returns the error where it takes
    no more.
    """
    try:
        sys.stdout.write(end)
        sys.stdout.flush()
    except OSError as error:
        _without_output()
        return error
    return None


def _without_output() -> None:
    """Send standard output nowhere, so that Python's own flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(fold_lines(usage(), screen_width(sys.maxsize)))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import dataflow

        print(dataflow.__version__)
        return 0
    name, words = arguments[0], arguments[1:]
    if name in ("--completion", "--complete"):
        from engine.cli.completion import print_candidates, print_script

        if name == "--completion":
            return print_script(words)
        return print_candidates(words, COMMANDS)
    command = _main_of(name)
    _require_current_folder()
    with _reading_received(name, words):
        return command(words)


def _reading_received(command: str, words: Sequence[str]) -> AbstractContextManager[None]:
    """Hold a command that only looks at files of others to the limits for such files: `diff` has
    two targets, all others have one.
    """
    if command in LOOKING:
        for word in words[:2]:
            if is_received(word):
                return reading(word)
    return nullcontext()


def _require_current_folder() -> None:
    """Raise UsageError where it was deleted: nothing that is named from it can be there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        fix = "cd to a folder that is there"
        raise UsageError("dataflow", "the current folder was deleted", fix) from error


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    """Import a command. Raises UsageError where there is none of this name."""
    if name not in COMMANDS:
        fix = f"one of: {', '.join(COMMANDS)}"
        near = nearest(name, COMMANDS)
        if near:
            fix = f"dataflow {near}"
        raise UsageError("dataflow", f"no command {name!r}", fix)
    return importlib.import_module(f"engine.cli.{name}").main


def usage() -> str:
    """Write what `dataflow --help` prints."""
    wide = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(wide)}{does}" for name, does in COMMANDS.items()]
    commands = "\n".join(lines)
    return (
        f"usage: dataflow COMMAND TARGET [flags]\n\n{commands}\n\nTARGET is {FORMS}.\n"
        "Its flags are its function's parameters: dataflow run TARGET --help. With the required\n"
        "ones that also lists the nodes, of which --set NODE.PARAM=VALUE changes any parameter.\n"
        "Of a run folder, what a plan is made of (places, cluster, threads, seed) is that run's\n"
        "by default.\n"
        "--traceback shows where an error was raised; --completion SHELL prints what makes bash,\n"
        "zsh or fish complete commands, flags and nodes."
    )
