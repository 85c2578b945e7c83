"""`dataflow resume RUN_FOLDER`: go on from the last checkpoint.

Owns: which options may change, and what is said where no Step is left to do. Does not own: the
options (engine.plan.options), which parameters may change (operators), the run
(engine.session.calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Suppress

from dataflow.peer_parameters import Known
from engine.cli.flag_values import Settings, gather_values, registry
from engine.cli.flags import asks_for_help, options_in
from engine.cli.run import print_end
from engine.cli.screen import read_flags, say
from engine.cli.set_flag import refusing_settings
from engine.cli.target import GRAPH, UsageError, import_named, tell_imports
from engine.cli.unknown_flags import refuse_node_flags, refuse_peer_names
from engine.cli.watch import watching
from engine.keep.untrusted_files import OPTIONS, kept_options, list_imports
from engine.plan.options import OF_ITS_START, RunOptions
from engine.run.loop.signals import ending_command

if TYPE_CHECKING:
    from engine.session.calls import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions(RunOptions):
    """Those of a run that may change, and three of its own; no others are listed."""

    seed: Suppress[int] = 0
    name: Suppress[str | None] = None
    runs: Suppress[Path] = field(default=Path("runs"))
    overwrite: Suppress[bool] = False
    set: Settings = ()
    """Parameters of nodes with other values from the next Step on (train_policy.lr=1e-5)."""
    watch: bool = False
    """Serve a page that shows the run (dataflow watch), until it ends."""
    accept_changes: bool = False
    """Go on where parameters, data, models or source files differ from what they were."""


def main(arguments: Sequence[str]) -> int:
    """Resume; raises CheckpointError where there is nothing to go on from."""
    folder, flags = _split_folder(arguments)
    if not asks_for_help(flags) and (folder / GRAPH).is_file():
        refuse_node_flags("resume", str(folder), flags, (ResumeOptions,))
    options, changes = changed_options(flags)
    with ending_command():
        from engine.session.calls import resume  # here: it imports what runs kernels

        import_run_modules(folder)
        place = folder.resolve()
        with refusing_settings(), watching(place.parent, place.name, wanted=options.watch):
            end = resume(
                folder,
                accept_changes=options.accept_changes,
                settings=options.set,
                **changes,
            )
            return _print_end(end, options)


def import_run_modules(folder: Path) -> None:
    """Say what a run imports and from where, then import it; nothing if the folder lacks the
    files that name it.
    """
    imported = _imports_of(folder)
    tell_imports(imported)
    if imported:
        import_named(folder / GRAPH, kept_options(folder)[1])


def _imports_of(folder: Path) -> list[str]:
    """List what a run imports, and from where; empty if the folder lacks the files."""
    graph, options = folder / GRAPH, folder / OPTIONS
    if not (graph.is_file() and options.is_file()):
        return []
    return list_imports(graph, kept_options(folder)[1])


def _split_folder(arguments: Sequence[str]) -> tuple[Path, Sequence[str]]:
    if arguments and arguments[0] in ("-h", "--help"):
        changed_options(["--help"])
    if not arguments or arguments[0].startswith("-"):
        fix = "dataflow resume runs/NAME [flags]"
        raise UsageError("dataflow resume", "expected the run's folder first", fix)
    path = Path(arguments[0])
    if not path.is_dir():
        fix = "the run folder, such as runs/NAME"
        raise UsageError("dataflow resume", f"no folder {str(path)!r}", fix)
    return path, arguments[1:]


def changed_options(flags: Sequence[str]) -> tuple[ResumeOptions, dict[str, Any]]:
    """Read the flags. Also returns the run's options that some flag gives, by name; the run keeps
    its others. Raises UsageError for an option that a resume does not have.
    """
    about = (
        "Go on from a run folder's last checkpoint. Options that are not given stay as the run had"
        " them. --set changes parameters from the next Step on. Where a parameter, data, a model or"
        " a source file is another than it was, and no --set says so, that is refused; with"
        " --accept-changes it holds from the next Step on. changes.json has all that changed."
    )
    changed = options_in(flags)
    for name in changed:
        if name not in OF_ITS_START:
            continue
        problem = f"--{name} does not change in a resume: {OF_ITS_START[name]}"
        fix = f"leave --{name} out, or start another run"
        raise UsageError("dataflow resume", problem, fix)
    known = Known(options=list(ResumeOptions.__dataclass_fields__))
    refuse_peer_names("resume", flags, known)
    words = gather_values(flags, (ResumeOptions,))
    prog = "dataflow resume RUN_FOLDER"
    options = read_flags(ResumeOptions, args=words, prog=prog, about=about, registry=registry())
    changes = {name: getattr(options, name) for name in changed}
    return options, changes


def _print_end(ended_run: Result, options: ResumeOptions) -> int:
    """Print how it ended; in one line, if nothing was left to do."""
    from engine.session.finished_run import NOTHING  # here: it imports what runs kernels

    if not ended_run.reason.startswith(NOTHING):
        return print_end(ended_run)
    end = f"{ended_run.reason}: step {ended_run.step}"
    if options.set:
        end += f"; {' '.join(options.set)} was not set"
    fix = f"dataflow resume {ended_run.folder} --steps {2 * ended_run.step}"
    if "phases" in ended_run.reason:  # a Program's phases have Steps of their own
        fix = "start another run"
    say(f"{end}. To go on: {fix}")
    return 0
