"""`dataflow rerun RUN --node NODE --step N`: run a part of a recorded run again, and compare.

Owns: the flags, the text, the debugger. Does not own: the rerun (engine/replay/rerun.py).
"""

from __future__ import annotations

import pdb
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dataflow.errors import DataError, GraphError, PlanError, RunError
from dataflow.safe_text import one_line
from engine.cli.flag_values import Settings, gather_values, registry
from engine.cli.flags import asks_for_help
from engine.cli.resume import import_run_modules
from engine.cli.screen import read_flags, say
from engine.cli.set_flag import refusing_settings
from engine.cli.target import UsageError

if TYPE_CHECKING:
    from engine.replay.rerun import NodeRerun, Rerun

T = TypeVar("T")
_USAGE = "dataflow rerun RUN_FOLDER --node NODE --step N [flags]"
_ABOUT = (
    "Run nodes of one Step of a recorded run again, in this process, on the rows that were"
    " recorded, with the weights of that Step, and compare what comes out with what came out then."
    " The exit code is 1 where something differs, and 3 where it cannot be run again, as a file is"
    " damaged or missing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOptions:
    """What is run again."""

    node: str = ""
    """The node, or several that hand rows to each other (score,advantage)."""
    step: int = 0
    """The Step; of an evaluation's node the version."""
    set: Settings = ()
    """Parameters with other values than the run had (train_policy.lr=1e-5)."""
    debug: bool = False
    """Where something raises, stop there in Python's debugger (pdb)."""


def main(arguments: Sequence[str]) -> int:
    """Run again, print how it compares; 1 where something differs. Raises RunError where it cannot
    be run again.
    """
    folder, options = _parse(arguments)
    from engine.replay.rerun import rerun_nodes  # here: it imports what runs kernels

    import_run_modules(folder)
    nodes = [name.strip() for name in options.node.split(",") if name.strip()]

    def run_again() -> Rerun:
        return rerun_nodes(folder, nodes, options.step, settings=options.set)

    try:
        with refusing_settings():
            again = _debug(run_again) if options.debug else run_again()
    except (GraphError, PlanError, DataError) as error:
        # Their own exit code would say that something differs.
        raise RunError(str(error)) from error
    say("\n".join(describe_rerun(again)))
    return 0 if again.same else 1


def _parse(arguments: Sequence[str]) -> tuple[Path, RerunOptions]:
    if asks_for_help(arguments[:2]):
        read_flags(RerunOptions, args=["--help"], prog=_USAGE, about=_ABOUT, registry=registry())
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("dataflow rerun", "expected the run's folder first", _USAGE)
    folder = Path(arguments[0])
    if not folder.is_dir():
        fix = "the run folder, such as runs/NAME"
        raise UsageError("dataflow rerun", f"no folder {arguments[0]!r}", fix)
    words = gather_values(arguments[1:], (RerunOptions,))
    options = read_flags(RerunOptions, args=words, prog=_USAGE, about=_ABOUT, registry=registry())
    if not options.node:
        raise UsageError("dataflow rerun", "expected --node", "--node train_policy")
    return folder, options


def _debug(call: Callable[[], T]) -> T:
    """Call it; where it raises, open the debugger at the first cause, then raise."""
    try:
        return call()
    except Exception as error:  # whatever it is, somebody wants to look at it
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        say(one_line(f"{type(cause).__name__}: {cause}"))
        pdb.post_mortem(cause.__traceback__)
        raise


def describe_rerun(again: Rerun) -> Iterator[str]:
    """Say what was run, then write a line for each node."""
    yield f"{again.folder}, step {again.step}: {_beginning(again)}"
    if again.remade:
        yield f"made again, as it was not recorded: {one_line(', '.join(again.remade))}"
    for other in again.others:
        what = one_line(other)
        if not what.startswith("layout: "):
            what = f"installation: {what}"
        yield f"another {what}; bits may differ for that"
    for node in again.nodes:
        yield from _node(node)


def _beginning(again: Rerun) -> str:
    """`from the bases, trained steps 1 to 3`: with which weights it ran."""
    begins = "from the bases"
    if again.checkpoint:
        begins = f"from checkpoint step_{again.checkpoint}"
    if not again.trained:
        return begins
    first, last = again.trained[0], again.trained[-1]
    steps = f"step {first}"
    if first < last:
        steps = f"steps {first} to {last}"
    return f"{begins}, trained {steps}"


def _node(node: NodeRerun) -> Iterator[str]:
    name, compared = one_line(node.node), one_line(node.compared)
    if node.promise == "nothing":
        yield f"{name}: nothing to compare with: {compared}"
    elif node.difference:
        yield f"{name}: differs: {one_line(node.difference)}"
        yield f"  compared: {compared}"
    elif node.promise == "bits":
        yield f"{name}: the same bits: {compared}"
    else:
        yield f"{name}: within the tolerance of its dtype: {compared}"
