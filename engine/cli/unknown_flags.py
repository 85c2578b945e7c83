"""Flags that neither a command nor a graph function has, and what to write in their place.

Owns: refusing another system's names, and parameters of nodes written as flags. Does not own: which
names other systems have (dataflow/peer_parameters.py), any other unknown flag, which tyro refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dataflow.peer_parameters import Known, peer_name
from engine.cli.flag_values import name_of_flag, option_names
from engine.cli.set_flag import settable_paths
from engine.cli.target import UsageError, load_target

_TEXTS = ("--set", "--what-if", "--what_if")
"""Flags with the names of nodes and parameters in their texts."""


def refuse_node_flags(
    command: str, text: str, flags: Sequence[str], options: Sequence[type[Any]]
) -> None:
    """Raise UsageError for a flag that a kept graph does not have, where --set changes what it
    names, by our name or another system's. text: the run folder or graph.json.
    """
    known = Known(options=option_names(options))
    for word, next_word in pairwise([*flags, "--"]):
        flag, _, text_of_value = word.partition("=")
        name = name_of_flag(flag)
        if not word.startswith("--") or name.removeprefix("no_") in known.options:
            continue
        if not text_of_value and next_word.startswith("--"):
            text_of_value = "..."
        elif not text_of_value:
            text_of_value = next_word
        parameter_names = _parameter_names(name, known)
        fixes: list[str] = []
        for path in settable_paths(load_target(text).graph()):
            if path.rpartition(".")[2] in parameter_names:
                fixes.append(f"--set {path}={text_of_value}")
        if fixes:
            problem = f"unknown flag {flag!r}: of a kept graph, parameters are set by node"
            raise UsageError(f"dataflow {command}", problem, " or ".join(fixes[:3]))


def _parameter_names(name: str, known: Known) -> set[str]:
    """List the names of ours that a flag's name may mean: itself, and what another system's name
    stands for where that is no option.
    """
    names = {name}
    peer = peer_name(name, known)
    if peer and not peer.find_ours(known):
        names.update(peer.parameters)
    return names


def refuse_peer_names(command: str, arguments: Sequence[str], known: Known) -> None:
    """Raise UsageError for a flag that is another system's name, and for verl's `trainer.x=1`."""
    of_flag = ""
    for word in arguments:
        if word.startswith("--"):
            of_flag = word
        if of_flag in _TEXTS and word != of_flag:  # NODE.PARAM=VALUE, which settings read
            continue
        written = word.partition("=")[0].lstrip("+")
        name = written.removeprefix("--").replace("-", "_")
        override = "=" in word and "." in written and not written.startswith("-")
        is_ours = name in known.parameters or name in known.options
        if is_ours or not (written.startswith("--") or override):
            continue
        peer = peer_name(name, known)
        if peer is not None and _is_meant(peer.name, name, override):
            kind = "flag"
            if override:
                kind = "override"
            problem = f"unknown {kind} {word!r} ({peer.system}'s name)"
            fix = peer.write_fix(known, None, flag=True)
            raise UsageError(f"dataflow {command}", problem, fix)


def _is_meant(peer: str, name: str, override: bool) -> bool:
    """Of a word without dashes, only a whole name is taken for another system's."""
    return not override or peer == name or peer.endswith(".*")
