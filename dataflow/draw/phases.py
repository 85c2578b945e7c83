"""What a drawing shows of a Program: a picture of each phase, and the weights that go on.

Owns: these facts. Does not own: what is worth showing of one graph (picture.py), any syntax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.draw.picture import Picture
from dataflow.program import Program, beginnings
from dataflow.safe_text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedWeights:
    """An arrow from a State of a phase, both by number, to one of a later phase."""

    source: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPhase:
    """One phase. number: from 1. prefix: of its names in a drawing of all. begins: in words."""

    number: int
    prefix: str
    title: str
    picture: Picture
    begins: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPicture:
    """A Program to draw."""

    name: str
    phases: tuple[DrawnPhase, ...]
    carried: tuple[CarriedWeights, ...]


def program_picture(program: Program, pictures: Sequence[Picture]) -> ProgramPicture:
    """Gather the facts that every form of drawing shows. pictures: of each phase's graph."""
    phases: list[DrawnPhase] = []
    for number, picture in zip(program.numbers, pictures, strict=True):
        begins = tuple(map(one_line, beginnings(program, number)))
        phase = DrawnPhase(
            number=number,
            prefix=f"p{number}_",
            title=one_line(program.title(number)),
            picture=picture,
            begins=begins,
        )
        phases.append(phase)
    carried: list[CarriedWeights] = []
    for phase in phases:
        for name, weights in program.begins[phase.number - 1].items():
            source_phase = phases[weights.phase - 1]
            arrow = CarriedWeights(
                source=(weights.phase, _find_state(source_phase, weights.model)),
                target=(phase.number, _find_state(phase, name)),
            )
            carried.append(arrow)
    return ProgramPicture(name=one_line(program.name), phases=tuple(phases), carried=tuple(carried))


def _find_state(phase: DrawnPhase, name: str) -> int:
    """The number of a State in a phase's picture."""
    shown_name = one_line(name)
    return next(state.index for state in phase.picture.states if state.name == shown_name)
