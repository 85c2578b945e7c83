"""Shell completion: `dataflow --completion bash|zsh|fish`, and the words that the scripts ask for.

Owns: the three scripts, and what may stand at the end of a command line. Does not own: commands,
flags. A target's flags are read from its file; only --set calls the graph function, for its nodes.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from dataflow.errors import nearest_or_all
from dataflow.set_expressions import settable
from engine.cli.flags import LanguageOptions, parse_own
from engine.cli.graphs import shipped
from engine.cli.screen import say
from engine.cli.set_flag import NodeOptions
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
    candidates = dict.fromkeys(_candidates(line_words[1:], commands))
    start = 0
    if shell == "bash":
        start = max(current.rfind(":"), current.rfind("=")) + 1
    matches = [word for word in candidates if word.startswith(current)]
    say("".join(f"{word[start:]}\n" for word in matches), end="")
    return 0


def _words(line: str) -> list[str]:
    """The words of a line; the last is empty behind a space."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:  # a quote that is still open
            continue
        return words if words and not (line[-1].isspace() and not end) else [*words, ""]
    return [""]


def _candidates(line_words: Sequence[str], commands: Mapping[str, str]) -> Iterator[str]:
    """line_words: those after `dataflow`, of which the last is not finished."""
    *before, current = line_words or [""]
    if not before:
        yield from [*commands, "--help", "--version", "--completion"]
        return
    command, *words = before
    if command not in commands:
        return
    places = 2 if command == "diff" else 1
    if current.startswith("-"):
        yield from _flags(command, words[:places])
    elif command == "graphs" and not words:
        yield from shipped()
    elif command in _TARGETS and len(words) < places:
        yield from _targets(current)
    elif command == "watch" or (command == "top" and not words):
        yield from _runs(Path("runs"))
    elif command == "report" and not words:
        yield from (f"runs/{name}" for name in _runs(Path("runs")))
    elif (command == "peek" and len(words) == 1) or _names_a_node(command, words):
        yield from (node.name for node in settable(load_target(words[0]).graph()))
    elif command in (*_TARGETS, "resume", "rerun") and words and _last_flag(words) == "--set":
        yield from _parameters(command, words)


def _names_a_node(command: str, words: Sequence[str]) -> bool:
    """Whether the next word follows `rerun RUN --node`."""
    return command == "rerun" and len(words) > 1 and words[-1] == "--node"


def _last_flag(words: Sequence[str]) -> str:
    return next((word for word in reversed(words) if word.startswith("-")), "")


def _targets(current: str) -> Iterator[str]:
    """The graphs that come with it; the functions of a module or file before a colon."""
    place, colon, _ = current.partition(":")
    yield from (f"graphs.{name}:{name}" for name in shipped())
    if colon:
        yield from (f"{place}:{function.name}" for function in functions_in(place))


def _runs(root: Path) -> Iterator[str]:
    """Names of the runs there."""
    if root.is_dir():
        yield from sorted(path.name for path in root.iterdir() if is_run(path))


def _flags(command: str, targets: Sequence[str]) -> Iterator[str]:
    """Of the command's options, and of the functions that the targets name."""
    names: list[str] = []
    for kind in _options(command):
        names += _fields(kind)
    if command in _TARGETS:
        for target in targets:
            names += _parameters_of(target)
    if command == "resume":
        names = [name for name in names if name.removeprefix("no_") not in OF_ITS_START]
    yield from dict.fromkeys(f"--{name.replace('_', '-')}" for name in [*names, "help"])


def _parameters_of(target: str) -> list[str]:
    """Those of the function that a target names; nothing is imported."""
    place, _, name = target.rpartition(":")
    parameters: list[str] = []
    for function in functions_in(place):
        if function.name == name:
            arguments = [*function.args.args, *function.args.kwonlyargs]
            parameters += [argument.arg for argument in arguments]
    return parameters


def _options(command: str) -> list[type[Any]]:
    """The option classes of a command."""
    module = importlib.import_module(f"engine.cli.{command}")
    classes = [kind for name, kind in vars(module).items() if name.endswith("Options")]
    if command in _GRAPHS:
        classes += [NodeOptions, LanguageOptions]
    return classes


def _fields(kind: type[Any]) -> Iterator[str]:
    """The flags of an option class, without what has a place in the line instead."""
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            continue
        yield name
        if hint is bool:
            yield f"no_{name}"


def _parameters(command: str, words: Sequence[str]) -> Iterator[str]:
    """`NODE.PARAM=` of all that --set may change, once the line has what the graph needs."""
    places = 2 if command in ("diff", "peek") else 1
    target = load_target(words[1] if command == "diff" else words[0])
    graph = target.graph(**parse_own(command, target, words[places:]))
    for node in settable(graph):
        yield from (f"{node.name}.{parameter.name}=" for parameter in node.parameters)
