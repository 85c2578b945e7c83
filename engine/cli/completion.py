"""Shell completion: `dataflow --completion bash|zsh|fish`, and the words that the scripts ask for.

Owns: the three scripts, and what may stand at the end of a command line. Does not own: commands,
flags. A target's flags are read from its file; only --set calls the graph function, for its nodes.

tyro writes a completion script, too (--tyro-print-completion), but of one command with one target:
the script is fixed text, so that it knows neither another target's flags, nor the functions of a
file, run folders, nodes or the parameters of --set. What follows here is asked anew at each Tab.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from dataflow.errors import nearest_or_all
from dataflow.program import AnyGraph
from dataflow.set_expressions import settable
from engine.cli.flags import LanguageOptions, parse_own
from engine.cli.graphs import shipped_graphs
from engine.cli.screen import say
from engine.cli.set_flag import NodeOptions, settable_paths
from engine.cli.target import UsageError, functions_in, load_target
from engine.keep.run_folder import is_run
from engine.plan.options import OF_ITS_START

_BASH = """\
# In ~/.bashrc: eval "$(dataflow --completion bash)"
_dataflow() {
    local IFS=$'\\n'
    COMPREPLY=($(dataflow --complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[.:=] ]] && compopt -o nospace
}
complete -o default -F _dataflow dataflow
"""
_ZSH = """\
# In ~/.zshrc, after compinit: eval "$(dataflow --completion zsh)"
_dataflow() {
    local -a found open
    found=("${(@f)$(dataflow --complete zsh "$LBUFFER" 2>/dev/null)}")
    open=(${(M)found:#*[.:=]})
    found=(${found:#*[.:=]})
    (( $#open + $#found )) || { _files; return }
    (( $#open )) && compadd -S '' -- $open
    (( $#found )) && compadd -- $found
}
compdef _dataflow dataflow
"""
_FISH = """\
# In ~/.config/fish/config.fish: dataflow --completion fish | source
function _dataflow
    set -l found (dataflow --complete fish (commandline -cp) 2>/dev/null)
    test (count $found) -gt 0; and printf '%s\\n' $found; or __fish_complete_path (commandline -ct)
end
complete -c dataflow -f -a '(_dataflow)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Shell -> what it reads at its start; the first line says how."""

_GRAPHS = ("check", "draw", "explain", "simulate", "profile", "run")
_TARGETS = (*_GRAPHS, "peek", "diff")


def print_script(words: Sequence[str]) -> int:
    """`--completion SHELL`: print the script. Raises UsageError for another shell."""
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        fix = f"dataflow --completion {nearest_or_all(shell, list(SCRIPTS))}"
        raise UsageError("dataflow --completion", f"no shell {shell!r}", fix)
    say(SCRIPTS[shell], end="")
    return 0


def print_candidates(words: Sequence[str], commands: Mapping[str, str]) -> int:
    """`--complete SHELL LINE`: print the words that the line's last one may become, one a line.

    bash sees `:` and `=` as ends of words, so that it is told only what follows them.
    """
    shell, line = words
    line_words = _words(line)
    current = line_words[-1]
    start = 0
    if shell == "bash":
        start = max(current.rfind(":"), current.rfind("=")) + 1
    lines: dict[str, None] = {}
    for word in _candidates(line_words[1:], commands):
        if word.startswith(current):
            lines[f"{word[start:]}\n"] = None
    say("".join(lines), end="")
    return 0


def _words(line: str) -> list[str]:
    """Split a line into words; the last is empty behind a space."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:  # a quote that is still open
            continue
        is_behind_space = not end and line[-1:].isspace()
        if not words or is_behind_space:
            words.append("")
        return words
    return [""]


def _candidates(line_words: Sequence[str], commands: Mapping[str, str]) -> Iterator[str]:
    """List what may stand for the last word. line_words: those after `dataflow`."""
    *before, current = line_words or [""]
    if not before:
        yield from [*commands, "--help", "--version", "--completion"]
    elif before[0] in commands:
        yield from _candidates_of(before[0], before[1:], current)


def _candidates_of(command: str, words: Sequence[str], current: str) -> Iterator[str]:
    """List what may stand behind a command and these words, where `current` is begun."""
    places = 2 if command == "diff" else 1
    if current.startswith("-"):
        yield from _flags(command, words[:places])
    elif command in _TARGETS and len(words) < places:
        yield from _targets(current)
    elif _expects_node(command, words):
        for node in settable(load_target(words[0]).graph()):
            yield node.name
    elif _expects_setting(command, words):
        for path in settable_paths(_edited_graph(command, words)):
            yield f"{path}="
    else:
        yield from _names(command, words)


def _names(command: str, words: Sequence[str]) -> Iterator[str]:
    """List the graphs or runs that a command takes by name; none behind its last one."""
    if command == "graphs" and not words:
        yield from shipped_graphs()
    elif command == "watch" or (command == "top" and not words):
        yield from _runs(Path("runs"))
    elif command == "report" and not words:
        for name in _runs(Path("runs")):
            yield f"runs/{name}"


def _expects_node(command: str, words: Sequence[str]) -> bool:
    """Whether the next word follows `peek TARGET` or `rerun RUN --node`."""
    if command == "peek":
        return len(words) == 1
    return command == "rerun" and len(words) > 1 and words[-1] == "--node"


def _expects_setting(command: str, words: Sequence[str]) -> bool:
    """Whether the next word is one of --set."""
    if command not in (*_TARGETS, "resume", "rerun") or not words:
        return False
    flags = [word for word in words if word.startswith("-")]
    return flags[-1:] == ["--set"]


def _targets(current: str) -> Iterator[str]:
    """List the graphs that come with it, and the functions of a module or file before a colon."""
    for name in shipped_graphs():
        yield f"graphs.{name}:{name}"
    place, colon, _ = current.partition(":")
    if colon:
        for function in functions_in(place):
            yield f"{place}:{function.name}"


def _runs(root: Path) -> list[str]:
    """List the names of the runs in a folder; none where there is no such folder."""
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if is_run(path))


def _flags(command: str, targets: Sequence[str]) -> list[str]:
    """List those of the command's options, and of the functions that the targets name."""
    names: list[str] = []
    for kind in _options(command):
        names += _fields(kind)
    if command in _TARGETS:
        for target in targets:
            names += _parameters_of(target)
    if command == "resume":
        names = [name for name in names if name.removeprefix("no_") not in OF_ITS_START]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    return list(dict.fromkeys([*flags, "--help"]))


def _parameters_of(target: str) -> list[str]:
    """List those of the function that a target names; nothing is imported."""
    place, _, name = target.rpartition(":")
    parameters: list[str] = []
    for function in functions_in(place):
        if function.name == name:
            arguments = [*function.args.args, *function.args.kwonlyargs]
            parameters += [argument.arg for argument in arguments]
    return parameters


def _options(command: str) -> list[type[Any]]:
    """List the option classes of a command."""
    module = importlib.import_module(f"engine.cli.{command}")
    classes = [kind for name, kind in vars(module).items() if name.endswith("Options")]
    if command in _GRAPHS:
        classes += [NodeOptions, LanguageOptions]
    return classes


def _fields(kind: type[Any]) -> Iterator[str]:
    """List the flags of an option class, without what has a place in the line instead."""
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            continue
        yield name
        if hint is bool:
            yield f"no_{name}"


def _edited_graph(command: str, words: Sequence[str]) -> AnyGraph:
    """Make the graph that --set edits. Raises SystemExit where the line lacks what it needs."""
    if command == "diff":
        text, flags = words[1], words[2:]
    elif command == "peek":
        text, flags = words[0], words[2:]
    else:
        text, flags = words[0], words[1:]
    target = load_target(text)
    return target.graph(parse_own(command, target, flags))
