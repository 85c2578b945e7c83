"""Forged run folders, looked at and gone on with through the real command line.

Whoever receives a run folder may look at it: nothing that it names is imported or run. Whatever lies in it, nothing
outside of it is written, cut or deleted. What is refused is refused in one line, and no process stays.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.checkpoint.store import MANIFEST, CheckpointStore
from tests.torture.outcome import Outcome

ROOT = Path(__file__).parents[2]
SHADOWS = ("json", "random", "torch", "numpy", "struct", "selectors", "pyarrow", "msgspec", "transformers", "socket")
LOUD = "forged_module"
"""A module beside the run, and the names of modules that Python and torch import: each writes that it ran."""
LIMIT = 180.0
MARK = "DATAFLOW_TORTURE"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj\u2028x"
HUGE = 10**400
_CALL = "from engine.cli import main; sys.exit(main())"
_MODEL = "from pathlib import Path; from torch_models import save_tiny; save_tiny(Path('model'), layers=1)"
_RUN = [
    *("run", "graphs.grpo:grpo", "--base", "model", "--data", "rows.jsonl", "--reward-fn", "my_rewards:same"),
    *("--n", "2", "--batch", "2", "--max-tokens", "3", "--steps", "2", "--threads", "1", "--no-progress"),
]

Forge = Callable[[Path], None]
"""Given the folder in which the case runs: `run/` is the run folder, `victim/` what must stay as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """words: of the command line. imports: running it imports what it names, which it has to say before. fine: it may
    succeed.
    """

    name: str
    words: tuple[str, ...]
    forge: Forge
    imports: bool = False
    fine: bool = False


def torture(short: bool, seed: int) -> list[Outcome]:
    """Every case in a folder of its own, two at a time."""
    with tempfile.TemporaryDirectory(prefix="dataflow-forged-") as name:
        good = Path(name) / "good"
        _prepare(good)
        cases = list(_cases(random.Random(seed), short))
        with ThreadPoolExecutor(2) as pool:
            at = (Path(name) / f"case{number}" for number in range(len(cases)))
            return list(pool.map(lambda case, folder: _judged(case, good, folder), cases, at))


def _prepare(folder: Path) -> None:
    """A model, data, a reward, a finished run; then the victims, and modules that nobody may run."""
    folder.mkdir()
    rows = [{"prompt": letter * 2, "answer": letter} for letter in "abcdef"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text("def same(completions, answer):\n    return [0.0 for _ in completions]\n")
    for code, words in ((_MODEL, []), (_CALL, [*_RUN, "--name", "run", "--runs", "."])):
        done = _python(folder, f"import sys; sys.path.append({str(ROOT / 'tests' / 'unit')!r}); {code}", *words)
        if done.returncode:
            raise RuntimeError(f"no run to forge: {done.stderr}")
    for module in (*SHADOWS, LOUD):
        (folder / f"{module}.py").write_text(f"open({str(folder.parent)!r} + '/ran', 'a').write('{module}\\n')\n")
    package = folder / "forged_package"
    package.mkdir()
    shutil.copy(folder / f"{LOUD}.py", package / "__init__.py")
    (package / "inner.py").touch()
    victim = folder / "victim"
    (victim / "inside").mkdir(parents=True)
    for file in ("notes.txt", "metrics.jsonl", "inside/thesis.txt", "inside/manifest.json", "inside/main.log"):
        (victim / file).write_text("years of work\n")


def _python(folder: Path, code: str, *words: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    """As the console script does it: the current folder is not on the path by itself."""
    own = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder), MARK: mark}
    command = [sys.executable, "-P", "-c", f"import sys; {code}", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nit hung: {LIMIT:g} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# --- judging ------------------------------------------------------------------------------------------------------


def _judged(case: Case, good: Path, folder: Path) -> Outcome:
    shutil.copytree(good, folder, symlinks=True)
    case.forge(folder)
    before = _state(folder)
    mark, begun = uuid.uuid4().hex, time.monotonic()
    done = _python(folder, _CALL, *case.words, mark=mark)
    said = next((line for line in done.stderr.splitlines() if not line.startswith(("imports ", "whatever "))), "")
    faults = [fault for fault in _faults(case, folder, done, before) if fault]
    faults += [f"process {pid} stayed" for pid in _left(mark)]
    shutil.rmtree(folder)
    return Outcome(
        part="forged", case=case.name, fault="; ".join(faults), said=said[:160], seconds=time.monotonic() - begun
    )


def _faults(case: Case, folder: Path, done: subprocess.CompletedProcess[str], before: Any) -> Iterator[str]:
    shown = done.stdout + done.stderr
    ran = folder.parent / "ran"
    if ran.exists():
        words = ran.read_text().split()
        ran.unlink()
        yield "" if case.imports and set(words) == {LOUD} and f"imports {LOUD} from " in done.stderr else f"ran {words}"
    if "Traceback (most" in shown:
        yield "a traceback"
    if "it hung" in done.stderr:
        yield "hung"
    if any(mark in shown for mark in ("\x1b", "\x9b", "\x07", "\u202e", "\u2028")):
        yield "control characters shown"
    if _state(folder) != before:
        yield "something outside of the run folder changed"
    if done.returncode == 0 and not case.fine:
        yield "it was taken"
    if done.returncode < 0:
        yield f"ended by {signal.Signals(-done.returncode).name}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("imports ", "whatever ", "checkpoint "))]
    if done.returncode > 0 and not lines:
        yield "nothing was said"
    if done.returncode > 0 and len(lines) > 12:
        yield f"{len(lines)} lines were said"


def _state(folder: Path) -> dict[str, Any]:
    """All that is not in the run folder: names, kinds, contents."""
    found: dict[str, Any] = {}
    for here, folders, files in os.walk(folder):
        if Path(here) == folder:
            folders.remove("run")
            folders[:] = [name for name in folders if not name.startswith("made_by_the_case")]
        for name in (*folders, *files):
            path = Path(here) / name
            plain = path.is_file() and not path.is_symlink()
            found[str(path)] = (path.lstat().st_mode, path.read_bytes() if plain else "")
    return found


def _left(mark: str) -> list[int]:
    """Processes of the case that are still there after a moment."""
    end = time.monotonic() + 5.0
    while (found := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# --- cases --------------------------------------------------------------------------------------------------------


def _cases(chance: random.Random, short: bool) -> Iterator[Case]:
    looking = [*_graphs(), *_texts()]
    for number, (name, forge, fine) in enumerate(looking):
        commands = ("draw", "check", "explain") if not short else (("draw", "check", "explain")[number % 3],)
        for command in commands:
            yield Case(
                name=f"{command}: {name}",
                words=(command, "run/graph.json"),
                forge=forge,
                fine=fine or command == "draw",
            )
    for number in range(3 if short else 40):
        forge = _random_edit(chance.randrange(1 << 30))
        yield Case(name=f"check: random edit {number}", words=("check", "run/graph.json"), forge=forge, fine=True)
    for form in ("mermaid",) if short else ("text", "mermaid", "dot", "svg"):
        forge = _edit(_names)
        yield Case(
            name=f"draw {form}: escapes", words=("draw", "run/graph.json", "--form", form), forge=forge, fine=True
        )
    yield Case(
        name="diff: a function that it names",
        words=("diff", "run/graph.json", "run/graph.json"),
        forge=_edit(_reward({"function": f"{LOUD}:f"})),
        fine=True,
    )
    yield from _going_on(short)
    yield from _overwriting(short)


def _edit(change: Callable[[dict[str, Any]], Any], name: str = "graph.json") -> Forge:
    def forge(folder: Path) -> None:
        file = folder / "run" / name
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return forge


def _node(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in document["nodes"] if node["name"] == name)


def _reward(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: _node(d, "score")["params"].update(fns={"tuple": [value]})


def _param(node: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: _node(d, node)["params"].update({key: value})


def _operator(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    """A declared operator of the user's with these fields, in the place of `advantage`'s."""

    def change(document: dict[str, Any]) -> None:
        path = f"{LOUD}:f"
        same = {"record": "dataflow.operator:Same", "fields": {"of": "rows"}}
        fields = {"path": path, "name": "f", "work": "host", "rows": same, "outputs": {"tuple": []}} | changed
        document["declared"]["operators"][path] = {"record": "dataflow.operator:Operator", "fields": fields}
        _node(document, "advantage")["operator"] = path

    return change


def _names(document: dict[str, Any]) -> None:
    document["name"] += ESCAPES
    for entry in (*document["nodes"], *document["states"]):
        entry["name"] += ESCAPES
    _node(document, f"prompts{ESCAPES}")["params"]["data"] += ESCAPES


def _graphs() -> Iterator[tuple[str, Forge, bool]]:
    """Documents that name what they must not. The last: whether a look at it may succeed."""
    yield "an operator os:system", _edit(lambda d: _node(d, "rollout").update(operator="os:system")), False
    yield "an operator of a module beside it", _edit(lambda d: _node(d, "rollout").update(operator=f"{LOUD}:f")), False
    yield "a reward os:system", _edit(_reward({"function": "os:system"})), True
    yield "a reward of a module beside it", _edit(_reward({"function": f"{LOUD}:f"})), True
    yield "a record of a module beside it", _edit(_reward({"record": f"{LOUD}:C", "fields": {"a": 1}})), True
    yield (
        "a class of a module beside it",
        _edit(lambda d: _node(d, "rollout").update(schemas=[{"class": f"{LOUD}:C"}])),
        False,
    )
    yield (
        "a record subprocess:Popen",
        _edit(_reward({"record": "subprocess:Popen", "fields": {"args": "touch x"}})),
        True,
    )
    yield "data read by os:rename", _edit(_operator(work="source", data_columns="os:rename")), False
    yield (
        "a kernel of a package beside it",
        _edit(_operator(kernels={"dict": [["host", "forged_package.inner:K"]]})),
        False,
    )
    yield (
        "a path of ours that is none",
        _edit(lambda d: _node(d, "rollout").update(operator="operators.data_files:os")),
        False,
    )
    yield "a path upwards", _edit(lambda d: _node(d, "rollout").update(operator=f"operators../../{LOUD}:f")), False
    yield "names with escapes", _edit(_names), False
    yield "data that is a pipe", _pipe_as_data, False
    yield "data upwards", _edit(_param("prompts", "data", "../../../../etc/passwd")), False
    yield "data with a null", _edit(_param("prompts", "data", "a\0b")), False
    yield "a gigantic batch", _edit(_param("prompts", "batch", HUGE)), False
    yield "a gigantic n", _edit(_param("rollout", "n", HUGE)), False
    yield "a NaN", _edit(_param("train_policy", "lr", float("nan"))), False
    yield "half a character", _edit(lambda d: d.update(name="\ud800")), True
    yield "a list in the place of a number", _edit(_param("rollout", "n", [8])), False
    yield (
        "a loss that is none",
        _edit(_param("train_policy", "loss", {"record": "dataflow.loss:Loss", "fields": {}})),
        False,
    )
    yield "no parameters", _edit(lambda d: _node(d, "train_policy").update(params={})), False
    yield "nodes in a circle", _edit(lambda d: d["states"][0].update(follows=0)), False
    yield "declarations that are none", _edit(lambda d: d.update(declared=5)), False


def _pipe_as_data(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    _edit(_param("prompts", "data", "pipe.jsonl"))(folder)


def _texts() -> Iterator[tuple[str, Forge, bool]]:
    """Files that are no documents."""
    for name, text in (
        ("nothing", b""),
        ("no text", b"\xff\xfe\x00\x80"),
        ("deep", b"[" * 100_000),
        ("a number of thousands of digits", b'{"format": ' + b"9" * 5000 + b"}"),
        ("a newer format", b'{"format": 99, "nodes": [], "states": [], "sinks": [], "name": "x"}'),
        ("escapes", f'{{"format": "{ESCAPES}"'.encode()),
    ):
        yield f"{name} in graph.json", _written("graph.json", text), False
    yield "a pipe as graph.json", _replaced("graph.json", os.mkfifo), False


def _written(name: str, data: bytes) -> Forge:
    return lambda folder: (folder / "run" / name).write_bytes(data) and None


def _random_edit(seed: int) -> Forge:
    """Some value of the document becomes another."""
    values: tuple[Any, ...] = (
        None,
        True,
        -1,
        HUGE,
        1e300,
        "",
        ESCAPES,
        [],
        {},
        [[]],
        {"tuple": 5},
        {"function": "os:system"},
    )

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


# --- run folders --------------------------------------------------------------------------------------------------


def _replaced(name: str, make: Callable[[Path], Any]) -> Forge:
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


def _link(name: str, to: str) -> Forge:
    return _replaced(name, lambda path: path.symlink_to(path.parents[len(Path(name).parts)] / "victim" / to))


def _hard_link(name: str) -> Forge:
    return _replaced(name, lambda path: os.link(path.parents[len(Path(name).parts)] / "victim" / "notes.txt", path))


_FILES = (
    ".lock", "metrics.jsonl", "trace/run_1.json", "logs/main.log", "samples/step_000003.parquet", ".options.json.tmp",
    "metrics.jsonl.tmp", "checkpoints/step_2/manifest.json", "checkpoints/step_2/cut.json", "checkpoints/.tmp-file",
    "graph.json", "options.json", "versions.json", ".plan.json.tmp", "samples/.step_000003.parquet.tmp", "plan.txt",
)  # fmt: skip
_FOLDERS = (
    "samples", "checkpoints", "checkpoints/step_2", "checkpoints/step_9", "trace", "logs", "checkpoints/.tmp-step_3",
    "checkpoints/.replaced-step_2", "tensorboard", "checkpoints/step_2/train_policy",
)  # fmt: skip
_GO_ON = ("resume", "run", "--steps", "3")


def _going_on(short: bool) -> Iterator[Case]:
    for name in _FILES[:3] if short else _FILES:
        yield Case(name=f"resume: a link at {name}", words=_GO_ON, forge=_link(name, "notes.txt"))
    for name in _FOLDERS[:2] if short else _FOLDERS:
        yield Case(name=f"resume: a link at {name}", words=_GO_ON, forge=_link(name, "inside"))
    for name in _FILES[:1] if short else _FILES:
        yield Case(name=f"resume: a pipe at {name}", words=_GO_ON, forge=_replaced(name, os.mkfifo))
    for name in _FILES[:2] if short else (*_FILES[:4], ".options.json.tmp"):
        fine = name.endswith(".tmp") or name.startswith("trace")
        yield Case(name=f"resume: a hard link at {name}", words=_GO_ON, forge=_hard_link(name), fine=fine)
    odd = [*_options(), *_graphs_to_run(), *_checkpoints()]
    yield from odd[::6] if short else odd


def _options() -> Iterator[Case]:
    for name, change in (
        ("steps", lambda d: d.update(steps="x")),
        ("gigantic steps", lambda d: d.update(seed=HUGE, steps=-1)),
        ("a path that is none", lambda d: d.update(path=5)),
        ("another option", lambda d: d.update(trust_me=1)),
        ("pins", lambda d: d.update(pin={"rollout": 5})),
        ("a cluster", lambda d: d.update(cluster=["x"])),
        ("threads", lambda d: d.update(threads=ESCAPES)),
    ):
        yield Case(name=f"resume: options, {name}", words=("resume", "run"), forge=_edit(change, "options.json"))
    yield Case(name="resume: options are none", words=_GO_ON, forge=_written("options.json", b"[]"))


def _graphs_to_run() -> Iterator[Case]:
    loud = _edit(_reward({"function": f"{LOUD}:f"}))
    yield Case(name="resume: a reward of a module beside it", words=_GO_ON, forge=loud, imports=True)
    words = ("run", "run/graph.json", "--name", "made_by_the_case", "--runs", "made_by_the_case")
    yield Case(name="run: a reward of a module beside it", words=words, forge=loud, imports=True)
    yield Case(
        name="resume: no parameters", words=_GO_ON, forge=_edit(lambda d: _node(d, "train_policy").update(params={}))
    )
    yield Case(name="resume: a loss that is none", words=_GO_ON, forge=_edit(_param("train_policy", "loss", 5)))
    yield Case(name="resume: deep", words=_GO_ON, forge=_written("graph.json", b"[" * 100_000))
    yield Case(name="resume: not UTF-8", words=_GO_ON, forge=_written("graph.json", b"\xff\xfe\x80"))
    yield Case(name="resume: another graph", words=_GO_ON, forge=_edit(_param("train_policy", "lr", 0.5)))


class _Touch:
    """What unpickling it does is seen."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _checkpoints() -> Iterator[Case]:
    def manifest(change: Callable[[dict[str, Any]], Any]) -> Forge:
        return _edit(change, f"checkpoints/step_2/{MANIFEST}")

    out = {"../../../victim/notes.txt": {"bytes": 14, "sha256": "0"}}
    for name, forge in (
        ("a manifest that names files outside", manifest(lambda d: d.update(files=out))),
        ("a manifest with a gigantic number", manifest(lambda d: d.update(step=HUGE))),
        ("a manifest that is a list", _written(f"checkpoints/step_2/{MANIFEST}", b"[]")),
        ("sealed: files outside", _sealed(lambda at: None, files=out)),
        ("sealed: nothing in it", _sealed(lambda at: [_gone(p) for p in at.iterdir()])),
        ("sealed: a cut that is none", _sealed(lambda at: (at / "cut.json").write_text("{}"))),
        ("sealed: a cut with escapes", _sealed(_cut(graph=ESCAPES))),
        ("sealed: a cut of gigantic numbers", _sealed(_cut(step=HUGE))),
        ("sealed: a cut of another kind", _sealed(_cut(sources=[1]))),
        ("sealed: rows of an unknown node", _sealed(lambda at: _rows(at, "nobody", {"a": [1]}))),
        ("sealed: rows of another schema", _sealed(lambda at: _rows(at, "rollout", {"a": [1]}))),
        ("sealed: rows that are none", _sealed(lambda at: _rows(at, "rollout", None))),
        ("sealed: pickles in the place of the optimizer", _sealed(_pickled("optimizer"))),
        ("sealed: pickles in the place of weights", _sealed(_pickled("model"))),
        ("sealed: no weights", _sealed(lambda at: _gone(at / "train_policy"))),
        ("sealed: weights that are none", _sealed(_weights)),
        ("sealed: a config that names code", _sealed(_code)),
    ):
        yield Case(name=f"resume: {name}", words=_GO_ON, forge=forge, fine="config" in name)


def _gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _sealed(change: Callable[[Path], Any], files: dict[str, Any] | None = None) -> Forge:
    """The checkpoint changed, with a manifest that is right for it."""

    def forge(folder: Path) -> None:
        old = folder / "run" / "checkpoints" / "step_2"
        aside = folder / "run" / "aside"
        old.rename(aside)
        (aside / MANIFEST).unlink()
        change(aside)
        store = CheckpointStore(old.parent)
        store.write(2, lambda to: shutil.copytree(aside, to, dirs_exist_ok=True) and None, {"graph": "grpo"})
        shutil.rmtree(aside)
        if files is not None:
            _name_files(old / MANIFEST, files)

    return forge


def _name_files(manifest: Path, files: dict[str, Any]) -> None:
    import msgspec

    from engine.checkpoint import store

    found = msgspec.json.decode(manifest.read_bytes(), type=store._Manifest)
    found = msgspec.structs.replace(found, files=msgspec.convert(files, dict[str, store._File]))
    found.sha256 = found.digest()
    manifest.write_bytes(msgspec.json.encode(found))


def _cut(**changed: Any) -> Callable[[Path], Any]:
    def change(at: Path) -> None:
        cut = json.loads((at / "cut.json").read_text())
        (at / "cut.json").write_text(json.dumps(cut | changed))

    return change


def _rows(at: Path, node: str, columns: dict[str, Any] | None) -> None:
    (at / "rows").mkdir(exist_ok=True)
    file = at / "rows" / f"{node}.arrow"
    if columns is None:
        file.write_bytes(b"ARROW1\0\0 and nothing more")
        return
    table = pa.table(columns)
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _pickled(word: str) -> Callable[[Path], Any]:
    """Pickles that touch a file when they are read."""

    def change(at: Path) -> None:
        data = pickle.dumps(_Touch(str(at.parents[1] / "victim" / "touched")))
        for file in [f for f in at.rglob("*") if f.is_file() and word in f.name and "config" not in f.name]:
            file.write_bytes(data)
            if word == "model":
                file.rename(file.with_name("pytorch_model.bin"))

    return change


def _weights(at: Path) -> None:
    for file in at.rglob("*.safetensors"):
        file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _code(at: Path) -> None:
    for file in at.rglob("config.json"):
        config = json.loads(file.read_text())
        file.write_text(
            json.dumps(config | {"auto_map": {"AutoConfig": f"{LOUD}.C", "AutoModelForCausalLM": f"{LOUD}.M"}})
        )
        shutil.copy(at.parents[1] / f"{LOUD}.py", file.with_name(f"{LOUD}.py"))


def _overwriting(short: bool) -> Iterator[Case]:
    again = (*_RUN, "--name", "run", "--runs", ".", "--overwrite")
    for name in (".lock",) if short else (".lock", "metrics.jsonl", ".graph.json.tmp", "plan.txt"):
        yield Case(
            name=f"run --overwrite: a link at {name}", words=again, forge=_link(name, "notes.txt"), fine=name != ".lock"
        )
    for name in () if short else ("checkpoints", "samples", "logs"):
        yield Case(name=f"run --overwrite: a link at {name}", words=again, forge=_link(name, "inside"), fine=True)
    yield Case(name="run --overwrite: the folder is a link", words=again, forge=_folder_is_a_link)
    yield Case(name="run --overwrite: a foreign file", words=again, forge=_written("thesis.txt", b"years of work"))
    for name in ("../victim", "/tmp/x", "..", "a/b", f"x{ESCAPES}"):
        words = (*_RUN, "--name", name, "--runs", ".", "--overwrite")
        yield Case(name=f"run --name {name!r}", words=words, forge=lambda folder: None)


def _folder_is_a_link(folder: Path) -> None:
    (folder / "run").rename(folder / "victim" / "run")
    (folder / "run").symlink_to(folder / "victim" / "run")
