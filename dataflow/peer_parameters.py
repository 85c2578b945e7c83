"""Other systems' names for our parameters.

Owns: reading the tables behind "unknown parameter 'num_generations' (TRL's name). Fix: n=8" and
behind docs/from-trl.md and docs/from-verl.md. Does not own: the names (peer_names/*.txt), the
pages (scripts/peer_pages.py). These names are not accepted.

A line of a table is `names MARK ours | note`: names with commas; MARK `=` if the value may stay as
it is, `~` if it means something else here, `-` if nothing takes its place (then the rest is why).
Ours is `operator(parameter=)`, `graphs.name`, a flag of `dataflow run`, or a command. A dotted name
may end in `.*`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SYSTEMS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "others": ""}
"""Table -> its system, in the order in which a name is looked up; others name it in a heading."""

_FOLDER = Path(__file__).parent / "peer_names"
_OURS = re.compile(r"--[\w-]+|dataflow \w+|graphs\.\w+|\w+\([^)]*\)|\w+")
_LINE = re.compile(r"(.+?) ([=~-]) (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What can be given in a place: parameters of a function of the language or of a graph, and
    options of a run.
    """

    parameters: Collection[str] = ()
    options: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerName:
    """A name of another system, and what has its place here.

    mark: `=` the same value, `~` another meaning, `-` nothing. ours: as in the table. note: what
    differs, or why there is nothing.
    """

    name: str
    system: str
    section: str
    mark: Literal["=", "~", "-"]
    ours: tuple[str, ...] = ()
    note: str = ""

    @property
    def parameters(self) -> list[str]:
        """Names of parameters of operators, losses and the like."""
        return [name for each in self.ours for name in re.findall(r"(\w+)=", each)]

    @property
    def options(self) -> list[str]:
        """Names of options of a run."""
        flags = (each for each in self.ours if each.startswith("--"))
        return [flag.removeprefix("--").replace("-", "_") for flag in flags]

    def find_ours(self, known: Known) -> str | None:
        """The name of ours that can be given in this place."""
        for name in self.parameters:
            if name in known.parameters:
                return name
        return next((name for name in self.options if name in known.options), None)

    def write_fix(self, known: Known, argument: Any, *, flag: bool) -> str:
        """Write the fix of an error about this name, in a call with this argument or among flags
        (flag).
        """
        name = self.find_ours(known)
        note = f" ({self.note})" if self.note else ""
        if name is None:
            return self._write_fix_elsewhere(note, flag=flag)
        as_flag = f"--{name.replace('_', '-')}"
        if self.mark == "=" or not self.note:
            return as_flag if flag else f"{name}={argument!r}"
        if not flag and f"{name}=" in self.note:
            return self.note
        return f"{as_flag}{note}" if flag else f"{name}={note}"

    def _write_fix_elsewhere(self, note: str, *, flag: bool) -> str:
        """The fix where nothing can be given in this place."""
        if not self.ours:
            return f"leave it out: {self.note}"
        if not flag:
            return f"{', '.join(map(_in_python, self.ours))}{note}"
        names = ", ".join(self.ours)
        where = "" if names.startswith("--") else " in the graph"
        return f"{names}{where}{note}"


def _in_python(ours: str) -> str:
    """A name of ours as it is given in Python: an option of a run is one of RunOptions."""
    if not ours.startswith("--"):
        return ours
    return f"RunOptions({ours.removeprefix('--').replace('-', '_')}=)"


@functools.cache
def read_peer_names(stem: str) -> tuple[PeerName, ...]:
    """Read the names of one of SYSTEMS, in the order of its file."""
    peer_names: list[PeerName] = []
    section = ""
    for line in (_FOLDER / f"{stem}.txt").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line and not line.startswith("#"):
            peer_names += _read_line(line, SYSTEMS[stem] or section, section)
    return tuple(peer_names)


def _read_line(line: str, system: str, section: str) -> Iterator[PeerName]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"expected `names = ours | note`, found {line!r}")
    names, mark, rest = match.groups()
    ours, _, note = rest.partition(" | ")
    if mark == "-":
        ours, note = "", rest
    for name in names.split(", "):
        yield PeerName(
            name=name,
            system=system,
            section=section,
            mark=mark,  # type: ignore[arg-type]
            ours=tuple(_OURS.findall(ours)),
            note=note,
        )


_NOTHING = Known()


@functools.cache
def _peers_by_name() -> dict[str, tuple[PeerName, ...]]:
    """The peers' names by themselves, and by their last parts."""
    peers: dict[str, tuple[PeerName, ...]] = {}
    for stem in SYSTEMS:
        for peer in read_peer_names(stem):
            for key in dict.fromkeys((peer.name, _last_part(peer.name))):
                peers[key] = (*peers.get(key, ()), peer)
    return peers


def _last_part(name: str) -> str:
    """The last part of a dotted name; of `x.*` all of it."""
    return name if name.endswith("*") else name.rpartition(".")[2]


def peer_name(name: str, known: Known = _NOTHING) -> PeerName | None:
    """What another system means by this name: a whole one, the longest `x.*`, or a last part; if
    several do, the one with a name in `known`. None for a name of ours, for a stranger's, and
    for a last part of one word (`path`, `size`) that means nothing here.
    """
    peers_by_name = _peers_by_name()
    dots = [i for i, mark in enumerate(name) if mark == "."]
    starts = [f"{name[:dot]}.*" for dot in reversed(dots)]
    keys = (name, *starts, _last_part(name))
    matches = next((peers_by_name[key] for key in keys if key in peers_by_name), ())
    # A name that means the same here needs no translation.
    peers = [peer for peer in matches if name not in (*peer.parameters, *peer.options)]
    for peer in peers:
        if peer.find_ours(known):
            return peer
    # A last part of one word, such as `size`, says too little to be taken for a peer's.
    return next((peer for peer in peers if peer.name in keys[:-1] or "_" in name), None)
