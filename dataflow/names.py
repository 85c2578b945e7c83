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
        given = (each for each in self.ours if each.startswith("--"))
        return [each.removeprefix("--").replace("-", "_") for each in given]

    def here(self, known: Known) -> str | None:
        """The name of ours that can be given in this place."""
        fits = [name for name in self.parameters if name in known.parameters]
        fits += [name for name in self.options if name in known.options]
        return fits[0] if fits else None

    def told(self, known: Known, given: Any, *, flag: bool) -> str:
        """The fix of an error about this name, in a call or among flags."""
        here = self.here(known)
        if here is not None and (self.mark == "=" or not self.note):
            return f"--{here.replace('_', '-')}" if flag else f"{here}={given!r}"
        if here is not None and not flag and f"{here}=" in self.note:
            return self.note
        if not self.ours:
            return f"leave it out: {self.note}"
        shown = ", ".join(_in_python(each) if not flag else each for each in self.ours)
        if here is not None:
            shown = f"--{here.replace('_', '-')}" if flag else f"{here}="
        where = "" if here is not None or not flag or shown.startswith("--") else " in the graph"
        return f"{shown}{where}{f' ({self.note})' if self.note else ''}"


def _in_python(ours: str) -> str:
    if not ours.startswith("--"):
        return ours
    return f"RunOptions({ours.removeprefix('--').replace('-', '_')}=)"


@functools.cache
def table(stem: str) -> tuple[PeerName, ...]:
    """The names of one of SYSTEMS, in the order of its file."""
    found: list[PeerName] = []
    section = ""
    for line in (_FOLDER / f"{stem}.txt").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line and not line.startswith("#"):
            found += _read(line, SYSTEMS[stem] or section, section)
    return tuple(found)


def _read(line: str, system: str, section: str) -> Iterator[PeerName]:
    matched = _LINE.fullmatch(line)
    if matched is None:
        raise ValueError(f"expected `names = ours | note`, found {line!r}")
    names, mark, rest = matched.groups()
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
def _by_name() -> dict[str, tuple[PeerName, ...]]:
    found: dict[str, tuple[PeerName, ...]] = {}
    for stem in SYSTEMS:
        for peer in table(stem):
            for key in dict.fromkeys((peer.name, _last(peer.name))):
                found[key] = (*found.get(key, ()), peer)
    return found


def _last(name: str) -> str:
    """The last part of a dotted name; of `x.*` all of it."""
    return name if name.endswith("*") else name.rpartition(".")[2]


def peer_name(name: str, known: Known = _NOTHING) -> PeerName | None:
    """What another system means by this name: a whole one, the longest `x.*`, or a last part; if
    several do, the one with a name in `known`. None for a name of ours, for a stranger's, and
    for a last part of one word (`path`, `size`) that means nothing here.
    """
    names = _by_name()
    starts = [f"{name[: at.start()]}.*" for at in reversed(list(re.finditer(r"\.", name)))]
    found = next((names[key] for key in (name, *starts, _last(name)) if key in names), ())
    ours = [peer for peer in found if name not in (*peer.parameters, *peer.options)]
    if (fits := next((p for p in ours if p.here(known)), None)) is not None:
        return fits
    return next((p for p in ours if p.name in (name, *starts) or "_" in name), None)
