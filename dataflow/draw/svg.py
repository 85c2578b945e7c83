"""A graph as an SVG picture.

Owns: which element, class and attribute stands for what: pages bring the picture to life by these.
Does not own: places (arrange.py), shapes' syntax (shapes.py), colours (style.py).

    <g class="node work-decode" data-node="rollout">
    <g class="node folded" data-nodes="a b c">
    <g class="edge data" data-edge="a->b" data-producer="a" data-consumer="b">
    <g class="edge weight" data-model="policy" data-reader="rollout">    or data-writer, -follower
    <g class="state" data-state="policy">
    <g class="cut" data-source="prompts">
    <g class="worker" data-worker="gen" data-host="" data-devices="0">

With `life`, each can be reached by the keyboard, and empty groups say where a page may draw: `life`
in boxes and cuts, `queue` on edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dataflow.draw import shapes
from dataflow.draw.arrange import arrange_panels
from dataflow.draw.boxes import BEHIND
from dataflow.draw.colours import fill_of
from dataflow.draw.measure import measure_sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.phases import ProgramPicture
from dataflow.draw.picture import Picture
from dataflow.draw.scene import (
    CutMark,
    EdgeMark,
    NodeMark,
    Panel,
    Rect,
    Scene,
    StateMark,
    Words,
    WorkerMark,
)

_PAD = 26.0
_TITLE, _NOTE = 36.0, 17.0
_ABREAST = 1500.0
"""Width up to which panels stand side by side; wider, they stand one below the other."""
_REACHED = {"tabindex": "0", "role": "button"}
"""What lets the keyboard reach a part."""


def draw_svg(picture: Picture, overlay: Overlay | None = None) -> str:
    """Draw valid XML; the same bytes for the same picture."""
    overlay = overlay or Overlay()
    return write_scene(make_scene(picture, overlay), life=overlay.life)


def draw_program_svg(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """Draw each phase below the one before, with what it begins with under its heading."""
    overlays = overlays or [Overlay()] * len(program.phases)
    scene = make_program_scene(program, overlays)
    return write_scene(scene, life=any(overlay.life for overlay in overlays))


# --- places ---------------------------------------------------------------------------------------


def make_scene(picture: Picture, overlay: Overlay) -> Scene:
    """Decide every place of a picture."""
    part = _arrange_part(picture.name, picture, overlay, _PAD, ())
    return Scene(
        name=picture.name,
        width=part.width,
        height=part.bottom + _PAD,
        titles=tuple(part.titles),
        panels=tuple(part.panels),
    )


def make_program_scene(program: ProgramPicture, overlays: Sequence[Overlay]) -> Scene:
    """Decide every place of the picture of all phases."""
    width, top = 0.0, _PAD
    titles: list[Words] = []
    panels: list[Panel] = []
    for phase, overlay in zip(program.phases, overlays, strict=True):
        part = _arrange_part(phase.title, phase.picture, overlay, top, phase.begins)
        width = max(width, part.width)
        top = part.bottom + _PAD
        titles += part.titles
        panels += part.panels
    return Scene(
        name=program.name, width=width, height=top, titles=tuple(titles), panels=tuple(panels)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScenePart:
    """A picture below its title. bottom: its lower end."""

    width: float
    bottom: float
    titles: list[Words]
    panels: list[Panel]


def _arrange_part(
    title: str, picture: Picture, overlay: Overlay, top: float, begins: Sequence[str]
) -> _ScenePart:
    """Put the panels below a title and the lines that follow it."""
    title_width = measure_sans(title, 19.0, bold=True)
    titles = [Words(x=_PAD, y=top + 14, text=title, kind="title", width=title_width, size=19.0)]
    for line in begins:
        top += _NOTE
        line_width = measure_sans(line, 11.0)
        titles.append(Words(x=_PAD, y=top + 17, text=line, kind="begins", width=line_width))
    panels = arrange_panels(picture, overlay)
    abreast = sum(panel.width + _PAD for panel in panels) <= _ABREAST
    x, y = _PAD, top + _TITLE
    width, bottom = max(words.rect.right for words in titles) + _PAD, y
    for panel in panels:
        panel.at = (x, y)
        width = max(width, x + panel.width + _PAD)
        bottom = max(bottom, y + panel.height)
        if abreast:
            x += panel.width + _PAD
        else:
            y += panel.height + _PAD
    return _ScenePart(width=width, bottom=bottom, titles=titles, panels=panels)


# --- syntax ---------------------------------------------------------------------------------------


def write_scene(scene: Scene, *, life: bool) -> str:
    """Write a scene as SVG."""
    body = [shapes.write_words(words) for words in scene.titles]
    for panel in scene.panels:
        x, y = panel.at
        body.append(f'<g transform="translate({x:.1f},{y:.1f})">')
        body += _write_panel(panel, life)
        body.append("</g>")
    role = "group" if life else "img"
    title = f"drawing of {scene.name}"
    return shapes.write_document(scene.width, scene.height, title, body, role=role)


def _write_panel(panel: Panel, life: bool) -> Iterator[str]:
    """What comes later covers what came before."""
    frame = Rect(x=0, y=0, width=panel.width, height=panel.height)
    yield shapes.write_rectangle(frame, "panel", 10)
    yield from map(_write_worker, panel.workers)
    yield shapes.write_words(panel.title)
    yield from (_write_edge(edge, life) for edge in panel.edges)
    yield from map(_write_cut, panel.cuts)
    yield from map(_write_state, panel.states)
    yield from (_write_node(node, life) for node in panel.nodes)


def _name_button(words: Sequence[Words], label: str) -> dict[str, str]:
    """Attributes of a part that can be opened: named by the words that are seen, as one would speak
    to it.
    """
    seen_words = " ".join(line.text.strip() for line in words)
    name = f"{seen_words}. {label}" if seen_words else label
    return {**_REACHED, "aria-label": name}


def _write_lines(words: Sequence[Words]) -> str:
    """Lines of text, with a space between them for those who do not see where they stand."""
    return " ".join(map(shapes.write_words, words))


def _write_worker(mark: WorkerMark) -> str:
    inside = [shapes.write_rectangle(mark.rect, "frame", 8)]
    inside += map(shapes.write_words, mark.words)
    attributes = {
        "data-worker": " ".join(mark.workers),
        "data-host": " ".join(mark.hosts),
        "data-devices": " ".join(map(str, mark.devices)),
        "aria-label": mark.label,
    }
    return shapes.write_group("worker", inside, attributes)


def _write_cut(mark: CutMark) -> str:
    inside: list[str] = []
    if mark.line:
        (x0, y0), (x1, y1) = mark.line
        start, end = f'x1="{x0:.1f}" y1="{y0:.1f}"', f'x2="{x1:.1f}" y2="{y1:.1f}"'
        inside.append(f"<line {start} {end}/>")
    inside.append(shapes.write_words(mark.words))
    if mark.life:
        inside.append(shapes.write_strip(mark.life, "life"))
    attributes = {"data-source": mark.source, "aria-label": mark.words.text}
    return shapes.write_group("cut", inside, attributes)


def _write_edge(mark: EdgeMark, life: bool) -> str:
    arrow = shapes.write_arrow(mark.points, round_corners=mark.round)
    inside = [arrow, _write_lines(mark.words)]
    if mark.queue:
        x, y = mark.queue
        inside.append(f'<g class="queue" data-x="{x:.1f}" data-y="{y:.1f}"></g>')
    attributes = _name_ends(mark)
    if mark.kind == "data" and life:
        attributes |= _name_button(mark.words, mark.label)
    else:
        attributes |= {"role": "img", "aria-label": mark.label}
    kind = "edge data" if mark.kind == "data" else f"edge weight {mark.kind}"
    return shapes.write_group(kind, inside, attributes)


def _name_ends(mark: EdgeMark) -> dict[str, str]:
    """The attributes that say what an edge joins."""
    match mark.kind:
        case "data":
            return {
                "data-edge": f"{mark.source}->{mark.target}",
                "data-producer": mark.source,
                "data-consumer": mark.target,
            }
        case "reads":
            return {"data-model": mark.source, "data-reader": mark.target}
        case "writes":
            return {"data-model": mark.target, "data-writer": mark.source}
        case "follows":
            return {"data-model": mark.source, "data-follower": mark.target}


def _write_state(mark: StateMark) -> str:
    inside = [shapes.write_drum(mark.rect), _write_lines(mark.words)]
    attributes = {"data-state": mark.state.name, "role": "img", "aria-label": mark.label}
    return shapes.write_group("state", inside, attributes)


def _write_node(mark: NodeMark, life: bool) -> str:
    box, rect = mark.box, mark.rect
    inside = [f"<title>{escape(mark.label)}</title>"]
    if box.members:
        behind = Rect(x=rect.x + BEHIND, y=rect.y + BEHIND, width=rect.width, height=rect.height)
        inside.append(shapes.write_rectangle(behind, "under", 7))
        names = {"data-nodes": " ".join(member.name for member in box.members)}
        kind = "node folded"
    else:
        names = {"data-node": box.name}
        kind = f"node work-{box.work} kind-{fill_of(box.work)}"
    inside += [shapes.write_rectangle(rect, "box", 7), _write_lines(mark.words)]
    if mark.life:
        inside.append(shapes.write_strip(mark.life, "life"))
    reached = _name_button(mark.words, mark.label) if life else {"aria-label": mark.label}
    return shapes.write_group(kind, inside, names | reached)
