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
from html import escape

from dataflow.draw import shapes
from dataflow.draw.arrange import panels
from dataflow.draw.boxes import BEHIND
from dataflow.draw.colours import fill_of
from dataflow.draw.measure import sans
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


def svg(picture: Picture, overlay: Overlay | None = None) -> str:
    """Valid XML; the same bytes for the same picture."""
    overlay = overlay or Overlay()
    return written(scene(picture, overlay), life=overlay.life)


def svg_of_program(program: ProgramPicture, overlays: Sequence[Overlay] = ()) -> str:
    """The same, for each phase below the one before, with what it begins with under its heading."""
    overlays = overlays or [Overlay()] * len(program.phases)
    return written(scene_of_program(program, overlays), life=any(o.life for o in overlays))


def scene(picture: Picture, overlay: Overlay) -> Scene:
    """The picture with every place decided."""
    width, height, titles, found = _titled(picture.name, picture, overlay, _PAD, ())
    return Scene(
        name=picture.name,
        width=width,
        height=height + _PAD,
        titles=tuple(titles),
        panels=tuple(found),
    )


def scene_of_program(program: ProgramPicture, overlays: Sequence[Overlay]) -> Scene:
    """The picture of all phases with every place decided."""
    y, width = _PAD, 0.0
    titles: list[Words] = []
    found: list[Panel] = []
    for phase, overlay in zip(program.phases, overlays, strict=True):
        wide, y, words, more = _titled(phase.title, phase.picture, overlay, y, phase.begins)
        width, y = max(width, wide), y + _PAD
        titles, found = titles + words, found + more
    return Scene(
        name=program.name, width=width, height=y, titles=tuple(titles), panels=tuple(found)
    )


def _titled(
    title: str, picture: Picture, overlay: Overlay, top: float, begins: Sequence[str]
) -> tuple[float, float, list[Words], list[Panel]]:
    """A title, lines below it, and the panels: width, lower end, words, panels."""
    wide = sans(title, 19.0, bold=True)
    titles = [Words(x=_PAD, y=top + 14, text=title, kind="title", width=wide, size=19.0)]
    for note in begins:
        top += _NOTE
        width = sans(note, 11.0)
        titles.append(Words(x=_PAD, y=top + 17, text=note, kind="begins", width=width))
    found = panels(picture, overlay)
    x, y = _PAD, top + _TITLE
    abreast = sum(panel.width + _PAD for panel in found) <= _ABREAST
    width, bottom = max(words.rect.right for words in titles) + _PAD, y
    for panel in found:
        panel.at = (x, y)
        width = max(width, x + panel.width + _PAD)
        bottom = max(bottom, y + panel.height)
        x, y = (x + panel.width + _PAD, y) if abreast else (x, y + panel.height + _PAD)
    return width, bottom, titles, found


def written(scene: Scene, *, life: bool) -> str:
    """A scene as SVG."""
    body = [shapes.text(words) for words in scene.titles]
    for panel in scene.panels:
        x, y = panel.at
        body += [f'<g transform="translate({x:.1f},{y:.1f})">', *_panel(panel, life), "</g>"]
    role = "group" if life else "img"
    title = f"drawing of {scene.name}"
    return shapes.document(scene.width, scene.height, title, body, role=role)


def _panel(panel: Panel, life: bool) -> Iterator[str]:
    yield shapes.rectangle(Rect(x=0, y=0, width=panel.width, height=panel.height), "panel", 10)
    yield from map(_worker, panel.workers)
    yield shapes.text(panel.title)
    yield from (_edge(edge, life) for edge in panel.edges)
    yield from map(_cut, panel.cuts)
    yield from map(_state, panel.states)
    yield from (_node(node, life) for node in panel.nodes)


def _named(words: Sequence[Words], label: str) -> dict[str, str]:
    """A part that can be opened: named by the words that are seen, as one would speak to it."""
    seen = " ".join(each.text.strip() for each in words)
    return {**_REACHED, "aria_label": f"{seen}. {label}" if seen else label}


def _apart(words: Sequence[Words]) -> str:
    """Lines of text, with a space between them for those who do not see where they stand."""
    return " ".join(map(shapes.text, words))


def _worker(mark: WorkerMark) -> str:
    inside = [shapes.rectangle(mark.rect, "frame", 8), *map(shapes.text, mark.words)]
    return shapes.group(
        "worker",
        inside,
        data_worker=" ".join(mark.workers),
        data_host=" ".join(mark.hosts),
        data_devices=" ".join(map(str, mark.devices)),
        aria_label=mark.label,
    )


def _cut(mark: CutMark) -> str:
    inside = []
    if mark.line:
        (x0, y0), (x1, y1) = mark.line
        inside.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')
    inside.append(shapes.text(mark.words))
    inside += [shapes.strip(mark.life, "life")] if mark.life else []
    return shapes.group("cut", inside, data_source=mark.source, aria_label=mark.words.text)


def _edge(mark: EdgeMark, life: bool) -> str:
    inside = [shapes.arrow(mark.points, round_corners=mark.round), _apart(mark.words)]
    if mark.queue:
        x, y = mark.queue
        inside.append(f'<g class="queue" data-x="{x:.1f}" data-y="{y:.1f}"></g>')
    names = {
        "data": {
            "data_edge": f"{mark.source}->{mark.target}",
            "data_producer": mark.source,
            "data_consumer": mark.target,
        },
        "reads": {"data_model": mark.source, "data_reader": mark.target},
        "writes": {"data_model": mark.target, "data_writer": mark.source},
        "follows": {"data_model": mark.source, "data_follower": mark.target},
    }[mark.kind]
    if mark.kind == "data" and life:
        return shapes.group("edge data", inside, **names, **_named(mark.words, mark.label))
    kind = "edge data" if mark.kind == "data" else f"edge weight {mark.kind}"
    return shapes.group(kind, inside, **names, role="img", aria_label=mark.label)


def _state(mark: StateMark) -> str:
    inside = [shapes.drum(mark.rect), _apart(mark.words)]
    name = mark.state.name
    return shapes.group("state", inside, data_state=name, role="img", aria_label=mark.label)


def _node(mark: NodeMark, life: bool) -> str:
    box, rect = mark.box, mark.rect
    tip = f"<title>{escape(mark.label)}</title>"
    inside = [tip, shapes.rectangle(rect, "box", 7), _apart(mark.words)]
    inside += [shapes.strip(mark.life, "life")] if mark.life else []
    names = {"data_node": box.name}
    kind = f"node work-{box.work} kind-{fill_of(box.work)}"
    if box.members:
        behind = Rect(x=rect.x + BEHIND, y=rect.y + BEHIND, width=rect.width, height=rect.height)
        inside.insert(1, shapes.rectangle(behind, "under", 7))
        names = {"data_nodes": " ".join(member.name for member in box.members)}
        kind = "node folded"
    reached = _named(mark.words, mark.label) if life else {"aria_label": mark.label}
    return shapes.group(kind, inside, **names, **reached)
