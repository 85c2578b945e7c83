"""What nodes have in common with the process of a run: every difference is named."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engine.plan.looked import Looked, look, refusal, stamp


def looked(**changes: Any) -> Looked:
    versions = {"Python": "3.11", "dataflow-rl": "0.1.0", "torch": "2.9.0"}
    paths = {"/data/a.parquet": "file of 12 bytes", "/runs/mark": "file of 27 bytes"}
    return replace(Looked(memory=1, gpus=(), versions=versions, paths=paths), **changes)


def test_what_is_alike_is_not_refused() -> None:
    assert refusal(looked(), looked()) == ""
    assert refusal(looked(), looked(memory=2, gpus=(80,))) == "", "nodes differ in what they have"
    more = looked(versions=looked().versions | {"vllm": "1"}, paths=looked().paths | {"/x": "y"})
    assert refusal(looked(), more) == "", "only what was asked for counts"


VERSION = "expected {name} {here} as here, found {other}. Fix: the same version on every node."
PATH = "expected {name} as here ({here}), found {other}. Fix: a file system that every node mounts"


@pytest.mark.parametrize("kind", ["versions", "paths"])
@pytest.mark.parametrize("found", ["another", "", None])
def test_what_is_not_the_same_is_named(kind: str, found: str | None) -> None:
    here = looked()
    for name, mark in getattr(here, kind).items():
        others = {key: value for key, value in getattr(here, kind).items() if key != name}
        if found is not None:
            others[name] = found
        told = refusal(here, looked(**{kind: others}))
        expected, nothing = (VERSION, "none") if kind == "versions" else (PATH, "nothing")
        assert told.startswith(expected.format(name=name, here=mark, other=found or nothing))


def test_looking_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("12 bytes, so")
    versions = {"dataflow-rl": "0.1.0", "torch": "2.9.0+cu130"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    here = look([str(tmp_path / "a"), str(tmp_path / "b")])
    minor = ".".join(platform.python_version_tuple()[:2])
    assert here.versions == {"Python": minor, "dataflow-rl": "0.1.0", "torch": "2.9.0"}
    assert here.paths == {str(tmp_path / "a"): "file of 12 bytes", str(tmp_path / "b"): ""}
    assert here.memory > 0
    versions.pop("torch")
    assert look([]).versions["torch"] == ""


def test_a_path_is_stamped_without_being_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name, size in (("config.json", 3), ("model.safetensors", 40)):
        (tmp_path / "model" / name).write_bytes(bytes(size))
    (tmp_path / "model/inner").mkdir()
    assert stamp(str(tmp_path / "model")) == "folder with 2 files of 43 bytes"
    assert stamp(str(tmp_path / "nothing")) == ""
