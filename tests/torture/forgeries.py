"""Forgeries: what somebody may put into a run folder, and how to make each."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from engine.keep.checkpoint import store
from engine.keep.checkpoint.store import MANIFEST, CheckpointStore

LOUD = "forged_module"
"""A module beside the run that writes that it ran."""
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj\u2028x"
HUGE = 10**400

Forge = Callable[[Path], None]
"""Given the folder of the case: `run/` is the run folder, `victim/` must stay as it is."""


def edit(change: Callable[[dict[str, Any]], Any], name: str = "graph.json") -> Forge:
    def forge(folder: Path) -> None:
        file = folder / "run" / name
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return forge


def node_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in document["nodes"] if node["name"] == name)


def reward(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: node_of(d, "score")["params"].update(fns={"tuple": [value]})


def param(node: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: node_of(d, node)["params"].update({key: value})


def node(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: node_of(d, name).update(fields)


def operator(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    """A declared operator of the user's with these fields, in the place of `advantage`'s."""

    def change(document: dict[str, Any]) -> None:
        path = f"{LOUD}:f"
        same = {"record": "dataflow.operator:Same", "fields": {"of": "rows"}}
        usual = {"path": path, "name": "f", "work": "host", "rows": same, "outputs": {"tuple": []}}
        declared = {"record": "dataflow.operator:Operator", "fields": usual | changed}
        document["declared"]["operators"][path] = declared
        node_of(document, "advantage")["operator"] = path

    return change


def names(document: dict[str, Any]) -> None:
    document["name"] += ESCAPES
    for entry in (*document["nodes"], *document["states"]):
        entry["name"] += ESCAPES
    node_of(document, f"prompts{ESCAPES}")["params"]["data"] += ESCAPES


def graphs() -> Iterator[tuple[str, Forge, bool]]:
    """Documents that name what they must not. The last: whether a look at it may succeed."""
    popen = {"record": "subprocess:Popen", "fields": {"args": "touch x"}}
    loss = {"record": "dataflow.loss:Loss", "fields": {}}
    kernels = {"dict": [["host", "forged_package.inner:K"]]}
    for name, change in (
        ("a reward os:system", reward({"function": "os:system"})),
        ("a reward of a module beside it", reward({"function": f"{LOUD}:f"})),
        ("a record of a module beside it", reward({"record": f"{LOUD}:C", "fields": {"a": 1}})),
        ("a record subprocess:Popen", reward(popen)),
        ("half a character", lambda d: d.update(name="\ud800")),
    ):
        yield name, edit(change), True
    for name, change in (
        ("an operator os:system", node("rollout", operator="os:system")),
        ("an operator of a module beside it", node("rollout", operator=f"{LOUD}:f")),
        ("a class of a module beside it", node("rollout", schemas=[{"class": f"{LOUD}:C"}])),
        ("data read by os:rename", operator(work="source", data_columns="os:rename")),
        ("a kernel of a package beside it", operator(kernels=kernels)),
        ("a path of ours that is none", node("rollout", operator="operators.data_files:os")),
        ("a path upwards", node("rollout", operator=f"operators../../{LOUD}:f")),
        ("names with escapes", names),
        ("data upwards", param("prompts", "data", "../../../../etc/passwd")),
        ("data with a null", param("prompts", "data", "a\0b")),
        ("a gigantic batch", param("prompts", "batch", HUGE)),
        ("a gigantic n", param("rollout", "n", HUGE)),
        ("a NaN", param("train_policy", "lr", float("nan"))),
        ("a list in the place of a number", param("rollout", "n", [8])),
        ("a loss that is none", param("train_policy", "loss", loss)),
        ("no parameters", node("train_policy", params={})),
        ("nodes in a circle", lambda d: d["states"][0].update(follows=0)),
        ("declarations that are none", lambda d: d.update(declared=5)),
    ):
        yield name, edit(change), False
    yield "data that is a pipe", pipe_as_data, False


def pipe_as_data(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    edit(param("prompts", "data", "pipe.jsonl"))(folder)


def texts() -> Iterator[tuple[str, Forge, bool]]:
    """Files that are no documents; more: TARGETS of data.py."""
    for name, text in (
        ("a number of thousands of digits", b'{"format": ' + b"9" * 5000 + b"}"),
        ("a newer format", b'{"format": 99, "nodes": [], "states": [], "sinks": [], "name": "x"}'),
        ("escapes", f'{{"format": "{ESCAPES}"'.encode()),
    ):
        yield f"{name} in graph.json", written("graph.json", text), False


def written(name: str, data: bytes) -> Forge:
    def forge(folder: Path) -> None:
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return forge


def random_edit(seed: int) -> Forge:
    """Some value of the document becomes another."""
    numbers: tuple[Any, ...] = (None, True, -1, HUGE, 1e300)
    values = (*numbers, "", ESCAPES, [], {}, [[]], {"tuple": 5}, {"function": "os:system"})

    def forge(folder: Path) -> None:
        chance = random.Random(seed)
        file = folder / "run" / "graph.json"
        at: Any = (document := json.loads(file.read_text()))
        while True:
            key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not (isinstance(at[key], (dict, list)) and at[key] and chance.random() < 0.9):
                break
            at = at[key]
        at[key] = chance.choice(values)
        file.write_text(json.dumps(document))

    return forge


def replaced(name: str, make: Callable[[Path], Any]) -> Forge:
    """Something else in the place of a file or folder of the run."""

    def forge(folder: Path) -> None:
        path = folder / "run" / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)

    return forge


def link(name: str, to: str) -> Forge:
    return replaced(name, lambda path: path.symlink_to(_victim(path, name) / to))


def hard_link(name: str) -> Forge:
    return replaced(name, lambda path: os.link(_victim(path, name) / "notes.txt", path))


def _victim(path: Path, name: str) -> Path:
    """What lies beside the run folder in which this path has that name."""
    return path.parents[len(Path(name).parts)] / "victim"


class Touch:
    """What unpickling it does is seen."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def sealed(change: Callable[[Path], Any], files: dict[str, Any] | None = None) -> Forge:
    """The checkpoint changed, with a manifest that is right for it."""

    def forge(folder: Path) -> None:
        old = folder / "run" / "checkpoints" / "step_2"
        aside = folder / "run" / "aside"
        old.rename(aside)
        (aside / MANIFEST).unlink()
        change(aside)
        copy = lambda to: shutil.copytree(aside, to, dirs_exist_ok=True) and None
        CheckpointStore(old.parent).write(2, copy, {"graph": "grpo"})
        shutil.rmtree(aside)
        if files is not None:
            name_files(old / MANIFEST, files)

    return forge


def name_files(manifest: Path, files: dict[str, Any]) -> None:
    forged = msgspec.json.decode(manifest.read_bytes(), type=store._Manifest)
    forged = msgspec.structs.replace(forged, files=msgspec.convert(files, dict[str, store._File]))
    forged.sha256 = forged.digest()
    manifest.write_bytes(msgspec.json.encode(forged))


def cut(**changed: Any) -> Callable[[Path], Any]:
    def change(at: Path) -> None:
        cut = json.loads((at / "cut.json").read_text())
        (at / "cut.json").write_text(json.dumps(cut | changed))

    return change


def rows(at: Path, node: str, columns: dict[str, Any] | None) -> None:
    (at / "rows").mkdir(exist_ok=True)
    file = at / "rows" / f"{node}.arrow"
    if columns is None:
        file.write_bytes(b"ARROW1\0\0 and nothing more")
        return
    table = pa.table(columns)
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def pickled(word: str) -> Callable[[Path], Any]:
    """Pickles that touch a file when they are read."""

    def change(at: Path) -> None:
        data = pickle.dumps(Touch(str(at.parents[1] / "victim" / "touched")))
        named = [path for path in at.rglob("*") if word in path.name and "config" not in path.name]
        for file in [path for path in named if path.is_file()]:
            file.write_bytes(data)
            if word == "model":
                file.rename(file.with_name("pytorch_model.bin"))

    return change


def weights(at: Path) -> None:
    for file in at.rglob("*.safetensors"):
        file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def code_in_config(at: Path) -> None:
    for file in at.rglob("config.json"):
        code = {"AutoConfig": f"{LOUD}.C", "AutoModelForCausalLM": f"{LOUD}.M"}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": code}))
        shutil.copy(at.parents[1] / f"{LOUD}.py", file.with_name(f"{LOUD}.py"))


def folder_is_a_link(folder: Path) -> None:
    (folder / "run").rename(folder / "victim" / "run")
    (folder / "run").symlink_to(folder / "victim" / "run")
