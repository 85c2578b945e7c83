"""The cut of a panel: its line, and what each source gives a Step, in words.

Owns: where these stand. Does not own: which layer is the first below the cut (arrange.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dataflow.draw.measure import measure_sans
from dataflow.draw.panel_sheet import PAD, PanelSheet
from dataflow.draw.picture import StepShare
from dataflow.draw.scene import CutMark, Rect, Words

_CUT, _CUT_LINE = 20.0, 18.0
_GAUGE = 260.0
"""Room beside the words of a cut for a page's figures."""
_SMALL = 11.0


def cut_room(sheet: PanelSheet) -> float:
    """The height that the cut needs below the last layer above it."""
    return _CUT + _CUT_LINE * len(_shares(sheet))


def _shares(sheet: PanelSheet) -> tuple[StepShare, ...]:
    return sheet.picture.shares or (StepShare(source="", words=""),)


def _line_height(sheet: PanelSheet) -> float:
    return sheet.levels.bottom[sheet.cut - 1] + 14.0


def mark_cut(sheet: PanelSheet) -> Iterator[CutMark]:
    """Set the words of each source at the cut, where no edge crosses them."""
    if not sheet.cut:
        return
    lines = _write_lines(sheet)
    width = max(measure_sans(line, _SMALL) for line in lines)
    x = _find_free_place(sheet, width + (_GAUGE if sheet.overlay.life else 0.0))
    for number, (share, line) in enumerate(zip(_shares(sheet), lines, strict=True)):
        y = _line_height(sheet) + 16.0 + _CUT_LINE * number
        words = Words(x=x, y=y, text=line, kind="words", width=measure_sans(line, _SMALL))
        life = None
        if sheet.overlay.life:
            life = Rect(x=x + width + 10, y=y - 12, width=_GAUGE - 20, height=15)
        yield CutMark(source=share.source, words=words, life=life)


def _write_lines(sheet: PanelSheet) -> list[str]:
    """`the cut: 64 prompts x8 = 512 rows`, `and 32 demos make a Step`."""
    shares = _shares(sheet)
    lines: list[str] = []
    for number, share in enumerate(shares):
        lead = "and " if number else "the cut: "
        lines.append(lead + (share.words or share.source or "what"))
    has_number = any(share.words for share in shares)
    lines[-1] += " make a Step" if has_number else " makes a Step"
    return lines


def _find_free_place(sheet: PanelSheet, width: float) -> float:
    """The leftmost x at which words of a width are crossed by no edge below the cut's line."""
    layers, row = sheet.layers, sheet.cut - 1
    crossings: set[float] = set()
    for (source, target), path in layers.paths.items():
        first_row = layers.layer[source]
        if first_row <= row < layers.layer[target]:
            waypoint = [source, *path][row - first_row]
            crossings.add(layers.x[waypoint] + PAD)
    start = 14.0
    for crossing in sorted(crossings):
        if start + width < crossing - 10.0:
            break
        start = crossing + 10.0
    return start


def right_end(cut: CutMark) -> float:
    """Where what stands at the cut ends."""
    right = cut.life.right if cut.life else cut.words.rect.right
    return right + 6.0


def draw_line(sheet: PanelSheet, cut: CutMark, width: float) -> CutMark:
    """The same with the line across a panel of a width."""
    y = _line_height(sheet)
    return replace(cut, line=((0.0, y), (width, y)))
