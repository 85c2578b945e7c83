"""Rooms get lighter to read, never heavier (scripts/density.py)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.density import VALUES, density, rooms

_NOT_HELD = "comments"


@pytest.mark.parametrize("room", rooms())
def test_no_room_gets_heavier(room: str) -> None:
    """Who makes one lighter lowers its values: `scripts/density --write`."""
    limits = json.loads(VALUES.read_text())[room]
    measured = asdict(density(rooms()[room]))
    heavier = {
        name: f"{measured[name]}, at most {limits[name]}"
        for name in limits
        if name != _NOT_HELD and measured[name] > limits[name]
    }
    assert heavier == {}


def test_what_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "dense.py"
    path.write_text(
        '"""A docstring."""\n'
        "import os  # why\n"
        "found = [f(g(h(x))) if x else y for x in [z for z in w]]\n"
        "call(**found)\n"
    )
    measured = density([path])
    assert (measured.deep, measured.conditionals) == (50.0, 500.0)
    assert (measured.nested, measured.splats, measured.empty) == (333.3, 1, 1)
    assert measured.comments == 33.3
