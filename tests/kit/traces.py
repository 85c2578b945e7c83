"""What has to hold in every trace file, by the Trace Event Format; and its arrows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DrawnArrow:
    """An arrow of a file. source, target: the spans that its ends lie in."""

    kind: str
    source: Event
    target: Event


def sound_arrows(events: Sequence[Event]) -> list[DrawnArrow]:
    """The arrows of a trace, after the proof that it is one: spans of a track follow one another;
    of each arrow there is one beginning and one end, in this order, each within a span that is
    already in the file.
    """
    require_order(e for e in events if e["ph"] == "X")
    begun: dict[int, Event] = {}
    found: list[DrawnArrow] = []
    at = _Spans()
    for event in events:
        match event["ph"]:
            case "X":
                at.add(event)
            case "s":
                assert event["id"] not in begun, f"two arrows have one id: {event}"
                begun[event["id"]] = event
            case "f":
                start = begun.pop(event["id"])
                assert (start["name"], start["cat"]) == (event["name"], event["cat"])
                assert start["ts"] <= event["ts"], f"back in time: {start} {event}"
                assert event["bp"] == "e", f"an end that binds to the next span: {event}"
                ends = {"source": at.around(start), "target": at.around(event)}
                found.append(DrawnArrow(kind=event["cat"], **ends))
    assert not begun, f"arrows without an end: {begun}"
    return found


def require_order(spans: Iterable[Event]) -> None:
    """None begins before another one of its track has ended."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        ordered = sorted(track, key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        for one, other in pairwise(ordered):
            assert round(one["ts"] + one["dur"], 3) <= other["ts"], f"{one} and {other} overlap"


class _Spans:
    """Those of each track so far, by their beginnings."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], list[Event]] = defaultdict(list)

    def add(self, span: Event) -> None:
        self._of[span["pid"], span["tid"]].append(span)

    def around(self, moment: Event) -> Event:
        """The last of the track that is open at this moment; at its end it is closed."""
        at = moment["ts"]
        there = self._of[moment["pid"], moment["tid"]]
        inside = [s for s in there if s["ts"] <= at < s["ts"] + s["dur"] or s["ts"] == at]
        assert inside, f"an arrow outside of every span: {moment}"
        return inside[-1]
