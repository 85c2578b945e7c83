"""What nodes have in common with the process of a run: every difference is named."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engine.keep.checkpoint import content_digests as contents
from engine.run.hosts.host_requirements import Looked, describe_difference, look, stamp
from engine.run.hosts.ray_cluster import _paths
from operators.losses import clipped_policy_loss
from tests.kit import rewards
from tests.kit.graphs import compared, graph_of, sampled


def looked(**changes: Any) -> Looked:
    versions = {"Python": "3.11", "dataflow-rl": "0.1.0", "torch": "2.9.0"}
    paths = {"/data/a.parquet": "file of 12 bytes", "/runs/mark": "file of 27 bytes"}
    return replace(Looked(memory=1, gpus=(), versions=versions, paths=paths), **changes)


def test_what_is_alike_is_not_refused() -> None:
    assert describe_difference(looked(), looked()) == ""
    assert describe_difference(looked(), looked(memory=2, gpus=(80,))) == "", (
        "nodes differ in what they have"
    )
    more = looked(versions=looked().versions | {"vllm": "1"}, paths=looked().paths | {"/x": "y"})
    assert describe_difference(looked(), more) == "", "only what was asked for counts"


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
        told = describe_difference(here, looked(**{kind: others}))
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
    code = here.versions["the code of dataflow-rl"]
    assert re.fullmatch("[0-9a-f]{12}", code)
    expected = {"Python": minor, "dataflow-rl": "0.1.0", "torch": "2.9.0"}
    assert here.versions == {**expected, "the code of dataflow-rl": code}
    assert here.paths[str(tmp_path / "a")].startswith("file of 12 bytes, content ")
    assert here.paths[str(tmp_path / "b")] == ""
    assert here.memory > 0
    versions.pop("torch")
    assert look([]).versions["torch"] == ""


def test_other_contents_of_the_same_sizes_are_not_the_same(tmp_path: Path) -> None:
    """What a node would compute other numbers with, though its paths are the same."""
    stamps: list[dict[str, str]] = []
    for number, comment in (("1", "# one"), ("2", "# two"), ("2", "# of another length")):
        folder = tmp_path / comment
        (folder / "model").mkdir(parents=True)
        texts = {
            "model/config.json": f'{{"layers": {number}}}',
            "data.jsonl": f'{{"prompt": "{number}"}}',
            "rewards.py": f"def reward():  {comment}\n    return {number}\n",
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        stamps.append({n: stamp(str(folder / n)) for n in ("model", "data.jsonl", "rewards.py")})
    one, two, same = stamps
    assert one["model"].startswith("folder with 1 files of 13 bytes, content ")
    assert [name for name in one if one[name] == two[name]] == []
    assert two == same, "comments are no code"
    assert stamp(str(tmp_path / "nothing")) == ""


def test_of_a_large_file_the_middle_counts_where_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_IN_FULL", 100)
    monkeypatch.setattr(contents, "_ENDS", 10)
    monkeypatch.setattr(contents, "_PIECE", 1)
    path = tmp_path / "model.safetensors"
    stamps = []
    for middle in (b"a", b"b"):
        path.write_bytes(b"0" * 5050 + middle + b"0" * 4950)
        stamps.append((stamp(str(path)), stamp(str(path), whole=True)))
    (sampled, every), (sampled_again, every_again) = stamps
    assert sampled == sampled_again
    assert every != every_again


def test_a_node_has_to_have_the_users_modules(tmp_path: Path) -> None:
    rollout = sampled()
    graph = graph_of(rollout, clipped_policy_loss(compared(rollout)))
    assert rewards.__file__ in list(_paths(graph))
