"""Writes the tables of docs/from-trl.md and docs/from-verl.md.

    .venv/bin/python scripts/peer_pages.py [FOLDER]

Each page is what a person wrote, up to the heading `## Every name`, and below it the tables made of
dataflow/peer_names. FOLDER: where to write, docs/ by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from dataflow.peer_parameters import SYSTEMS, PeerName, read_peer_names  # noqa: E402

PAGES = {"from-trl.md": ("trl",), "from-verl.md": ("verl", "openrlhf")}
"""Page -> the tables of names on it."""

MARK = "## Every name\n"

HEAD = """
`scripts/peer_pages.py` writes these tables from the one that error messages read, so a call or a
flag with a name of {systems} says the same. `=`: the value stays as it is. `~`: it means something
else, or is written in another way. `-`: nothing takes its place. `operator(parameter=)` is written
in a graph, `--flag` is an option of `dataflow run` and a field of `RunOptions`.
"""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name in PAGES:
        (folder / name).write_text(page(name))


def page(name: str) -> str:
    """The page as it should be: what it says above the tables, and the tables."""
    written, mark, _ = (ROOT / "docs" / name).read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"docs/{name}: expected the heading {MARK!r}, found none.")
    systems = " or ".join(SYSTEMS[stem] for stem in PAGES[name])
    parts = [written + MARK + HEAD.format(systems=systems)]
    for stem in PAGES[name]:
        for title, peers in groupby(read_peer_names(stem), key=lambda peer: peer.section):
            parts.append(section(f"{SYSTEMS[stem]}: {title[0].lower()}{title[1:]}", peers))
    return "".join(parts)


def section(title: str, peers: Iterable[PeerName]) -> str:
    """A table; names that are told the same share a line."""
    rows = groupby(peers, key=lambda peer: (peer.mark, peer.ours, peer.note))
    lines = [line([p.name for p in same], *told) for told, same in rows]
    head = "| name | | here | |\n|---|---|---|---|\n"
    return f"\n### {title}\n\n{head}" + "\n".join(lines) + "\n"


def line(names: list[str], mark: str, ours: tuple[str, ...], note: str) -> str:
    return f"| {', '.join(short(names))} | {mark} | {', '.join(map(code, ours))} | {note} |"


def short(names: list[str]) -> Iterator[str]:
    """Of neighbours with the same beginning, the later ones by their last part."""
    before = None
    for name in names:
        start, _, last = name.rpartition(".")
        yield code(last if start and start == before else name)
        before = start


def code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    main()
