"""Forged run folders, looked at and resumed through the real command line.

Looking imports and runs nothing that a folder names; nothing outside of it is written, cut or
deleted; what is refused is refused in one line, and no process stays.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from engine.checkpoint.store import MANIFEST
from tests.kit.models import save_tiny
from tests.kit.processes import COMMAND_LINE, MARK, call_python, ended, kill, marked, new_mark
from tests.torture import forgeries as f
from tests.torture.forgeries import ESCAPES, HUGE, LOUD, Forge
from tests.torture.outcome import CaseResult, timed

SHADOWS = "json random torch numpy struct selectors pyarrow msgspec transformers socket"
"""Modules that Python and torch import: beside the run lies one of each, which notes if it ran."""
LIMIT = 600.0
_RUN = (
    "run graphs.grpo:grpo --base model --data rows.jsonl --reward-fn my_rewards:same --n 2"
    " --batch 2 --max-tokens 3 --steps 2 --threads 1 --no-progress"
)
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgedCase:
    """imports: it imports what it names, and has to say so before. fine: it may succeed."""

    name: str
    words: tuple[str, ...]
    forge: Forge
    imports: bool = False
    fine: bool = False


def torture(short: bool, seed: int) -> list[CaseResult]:
    """Every case in a folder of its own, two at a time."""
    with tempfile.TemporaryDirectory(prefix="dataflow-forged-") as name:
        good = Path(name) / "good"
        _prepare(good)

        def carried_out(number: int, case: ForgedCase) -> CaseResult:
            folder = Path(name) / f"case{number}"
            return timed("forged", case.name, partial(_judged, case, good, folder))

        cases = list(_cases(random.Random(seed), short))
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(carried_out, range(len(cases)), cases))


def _prepare(folder: Path) -> None:
    """A model, data, a reward, a finished run; then victims, and modules that nobody may run."""
    folder.mkdir()
    rows = [f'{{"prompt": "{letter * 2}", "answer": "{letter}"}}\n' for letter in "abcdef"]
    (folder / "rows.jsonl").write_text("".join(rows))
    zeros = "def same(completions, answer):\n    return [0.0 for _ in completions]\n"
    (folder / "my_rewards.py").write_text(zeros)
    save_tiny(folder / "model", layers=1)
    done = _dataflow(folder, *_RUN.split(), "--name", "run", "--runs", ".")
    if done.returncode:
        raise RuntimeError(f"no run to forge: {done.stderr}")
    for module in (*SHADOWS.split(), LOUD):
        (folder / f"{module}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    package = folder / "forged_package"
    package.mkdir()
    shutil.copy(folder / f"{LOUD}.py", package / "__init__.py")
    (package / "inner.py").touch()
    victim = folder / "victim"
    (victim / "inside").mkdir(parents=True)
    inside = ("inside/thesis.txt", "inside/manifest.json", "inside/main.log")
    for file in ("notes.txt", "metrics.jsonl", *inside):
        (victim / file).write_text("years of work\n")


def _dataflow(folder: Path, *words: str, mark: str = "") -> Done:
    """As the console script does it: the current folder is not on the path by itself."""
    own = {"HOME": str(folder), MARK: mark, "PYTHONDONTWRITEBYTECODE": "1"}
    how = {"cwd": folder, "env": own, "stdin": subprocess.DEVNULL, "timeout": LIMIT}
    return call_python("-P", "-c", COMMAND_LINE, *words, **how)


def _judged(case: ForgedCase, good: Path, folder: Path) -> tuple[str, str]:
    """What is wrong (empty where nothing is), and the first line that was said."""
    shutil.copytree(good, folder, symlinks=True)
    options = folder / "run" / "options.json"
    options.write_text(options.read_text().replace(str(good), str(folder)))  # where it imports from
    case.forge(folder)
    before, mark = _state(folder), new_mark()
    done = _dataflow(folder, *case.words, mark=mark)
    faults = [*_of_imports(case, folder, done), *_of_saying(done), *_of_ending(case, done)]
    if _state(folder) != before:
        faults.append("something outside of the run folder changed")
    faults += [f"process {pid} stayed" for pid in marked(mark) if not ended(pid, 5.0)]
    kill(marked(mark))
    shutil.rmtree(folder)
    return "; ".join(faults), next(iter(_said(done)), "")


def _said(done: Done, *others: str) -> list[str]:
    """Its errors, without what a run says before it begins."""
    before = ("imports ", "whatever ", *others)
    return [line for line in done.stderr.splitlines() if not line.startswith(before)]


def _of_imports(case: ForgedCase, folder: Path, done: Done) -> Iterator[str]:
    ran = [path.relative_to(folder) for path in folder.rglob("*.ran")]
    for path in ran:
        (folder / path).unlink()
    if ran and not (case.imports and {path.name for path in ran} == {f"{LOUD}.py.ran"}):
        yield f"ran: {', '.join(map(str, ran))}"
    if ran and f"imports {LOUD} from " not in done.stderr:
        yield "it did not say what it imports"


def _of_saying(done: Done) -> Iterator[str]:
    shown = done.stdout + done.stderr
    if "Traceback (most" in shown:
        yield "a traceback"
    if any(mark in shown for mark in ("\x1b", "\x9b", "\x07", "\u202e", "\u2028")):
        yield "control characters shown"
    lines = _said(done, "checkpoint ")
    if done.returncode > 0 and not lines:
        yield "nothing was said"
    if done.returncode > 0 and len(lines) > 12:
        yield f"{len(lines)} lines were said"


def _of_ending(case: ForgedCase, done: Done) -> Iterator[str]:
    if done.returncode == 0 and not case.fine:
        yield "it was taken"
    if done.returncode == -signal.SIGKILL:
        yield f"hung: {LIMIT:g} s, or killed"
    elif done.returncode < 0:
        yield f"ended by {signal.Signals(-done.returncode).name}"


def _state(folder: Path) -> dict[str, Any]:
    """All that is not in the run folder: names, kinds, contents."""
    state: dict[str, Any] = {}
    for here, folders, files in os.walk(folder):
        if Path(here) == folder:
            folders.remove("run")
            folders[:] = [name for name in folders if not name.startswith("made_by_the_case")]
        for name in (*folders, *files):
            path = Path(here) / name
            plain = path.is_file() and not path.is_symlink()
            state[str(path)] = (path.lstat().st_mode, path.read_bytes() if plain else "")
    return state


def _cases(chance: random.Random, short: bool) -> Iterator[ForgedCase]:
    looks = ("draw", "check", "explain")
    for number, (name, forge, fine) in enumerate([*f.graphs(), *f.texts()][:: 3 if short else 1]):
        for command in (looks[number % 3],) if short else looks:
            allowed = fine or command == "draw"
            yield _case(f"{command}: {name}", f"{command} run/graph.json", forge, fine=allowed)
    for number in range(1 if short else 40):
        forge = f.random_edit(chance.randrange(1 << 30))
        yield _case(f"check: random edit {number}", "check run/graph.json", forge, fine=True)
    for form in ("mermaid",) if short else ("text", "mermaid", "dot", "svg"):
        words = f"draw run/graph.json --form {form}"
        yield _case(f"draw {form}: escapes", words, f.edit(f.names), fine=True)
    words = "diff run/graph.json run/graph.json"
    yield _case("diff: a function that it names", words, f.edit(_LOUD_REWARD), fine=True)
    yield from _going_on(short)
    yield from _overwriting(short)


def _case(name: str, words: str, forge: Forge, **how: bool) -> ForgedCase:
    return ForgedCase(name=name, words=tuple(words.split()), forge=forge, **how)


_FILES = [
    ".lock", "metrics.jsonl", "trace/run_1.json", "logs/main.log", "samples/step_000003.parquet",
    ".options.json.tmp", "metrics.jsonl.tmp", "checkpoints/step_2/manifest.json",
    "checkpoints/step_2/cut.json", "checkpoints/.tmp-file", "graph.json", "options.json",
    "versions.json", ".plan.json.tmp", "samples/.step_000003.parquet.tmp", "plan.txt", "ended.json",
]  # fmt: skip
_FOLDERS = [
    "samples", "checkpoints", "checkpoints/step_2", "checkpoints/step_9", "trace", "logs",
    "checkpoints/.tmp-step_3", "checkpoints/.replaced-step_2", "tensorboard",
    "checkpoints/step_2/train_policy",
]  # fmt: skip
_LOUD_REWARD = f.reward({"function": f"{LOUD}:f"})
KEYED = {
    "key.position": pa.array([0], pa.int64()),
    "key.sample": pa.array([0], pa.int32()),
    "key.attempt": pa.array([0], pa.int32()),
}
_LATE = ("sealed", "manifest", "module beside", "another graph")
"""Cases that begin a run, which takes ten times as long."""
_GO_ON = "resume run --steps 3"


def _going_on(short: bool) -> Iterator[ForgedCase]:
    links, folders = (_FILES[:2], _FOLDERS[1:2]) if short else (_FILES, _FOLDERS)
    pipes = _FILES[:1] if short else _FILES
    hard = _FILES[1:2] if short else (*_FILES[:4], ".options.json.tmp")
    for name in links:
        yield _case(f"resume: a link at {name}", _GO_ON, f.link(name, "notes.txt"))
    for name in folders:
        yield _case(f"resume: a link at {name}", _GO_ON, f.link(name, "inside"))
    for name in pipes:
        yield _case(f"resume: a pipe at {name}", _GO_ON, f.replaced(name, os.mkfifo))
    for name in hard:
        fine = name.endswith(".tmp") or name.startswith("trace")
        yield _case(f"resume: a hard link at {name}", _GO_ON, f.hard_link(name), fine=fine)
    odd = [*_options(), *_graphs_to_run(), *_checkpoints()]
    quick = [case for case in odd if not any(word in case.name for word in _LATE)]
    yield from quick[::4] if short else odd


def _options() -> Iterator[ForgedCase]:
    for name, changes in (
        ("steps", {"steps": "x"}),
        ("gigantic steps", {"seed": HUGE, "steps": -1}),
        ("a path that is none", {"path": 5}),
        ("another option", {"trust_me": 1}),
        ("pins", {"pin": {"rollout": 5}}),
        ("a cluster", {"cluster": ["x"]}),
        ("threads", {"threads": ESCAPES}),
    ):
        forge = f.edit(lambda document, changes=changes: document.update(changes), "options.json")
        yield _case(f"resume: options, {name}", "resume run", forge)
    yield _case("resume: options are none", _GO_ON, f.written("options.json", b"[]"))


def _graphs_to_run() -> Iterator[ForgedCase]:
    loud = f.edit(_LOUD_REWARD)
    yield _case("resume: a reward of a module beside it", _GO_ON, loud, imports=True)
    words = "run run/graph.json --name made_by_the_case --runs made_by_the_case"
    yield _case("run: a reward of a module beside it", words, loud, imports=True)
    train = "train_policy"
    for name, forge in (
        ("no parameters", f.edit(f.node(train, params={}))),
        ("a loss that is none", f.edit(f.param(train, "loss", 5))),
        ("deep", f.written("graph.json", b"[" * 100_000)),
        ("not UTF-8", f.written("graph.json", b"\xff\xfe\x80")),
        ("another graph", f.edit(f.param(train, "lr", 0.5))),
    ):
        yield _case(f"resume: {name}", _GO_ON, forge)


def _checkpoints() -> Iterator[ForgedCase]:
    manifest = f"checkpoints/step_2/{MANIFEST}"

    def changed(**fields: Any) -> Forge:
        return f.edit(lambda document: document.update(fields), manifest)

    def rows(node: str, columns: dict[str, Any] | None) -> Forge:
        return f.sealed(lambda at: f.rows(at, node, columns))

    out = {"../../../victim/notes.txt": {"bytes": 14, "sha256": "0"}}
    for name, forge in (
        ("a manifest that names files outside", changed(files=out)),
        ("a manifest with a gigantic number", changed(step=HUGE)),
        ("a manifest that is a list", f.written(manifest, b"[]")),
        ("sealed: files outside", f.sealed(lambda at: None, files=out)),
        ("sealed: nothing in it", f.sealed(lambda at: [f.remove(p) for p in at.iterdir()])),
        ("sealed: a cut that is none", f.sealed(lambda at: (at / "cut.json").write_text("{}"))),
        ("sealed: a cut with escapes", f.sealed(f.cut(graph=ESCAPES, record=None))),
        ("sealed: a cut of gigantic numbers", f.sealed(f.cut(step=HUGE))),
        ("sealed: a cut of another kind", f.sealed(f.cut(sources=[1]))),
        ("sealed: rows of an unknown node", rows("nobody", {"a": [1]})),
        ("sealed: rows of another schema", rows("rollout", {"a": [1]})),
        ("sealed: rows without their columns", rows("rollout", KEYED | {"a": [1]})),
        ("sealed: rows that are none", rows("rollout", None)),
        ("sealed: pickles in the place of the optimizer", f.sealed(f.pickled("optimizer"))),
        ("sealed: pickles in the place of weights", f.sealed(f.pickled("model"))),
        ("sealed: no weights", f.sealed(lambda at: f.remove(at / "train_policy"))),
        ("sealed: weights that are none", f.sealed(f.weights)),
        ("sealed: a config that names code", f.sealed(f.code_in_config)),
    ):
        yield _case(f"resume: {name}", _GO_ON, forge, fine="config" in name)


def _overwriting(short: bool) -> Iterator[ForgedCase]:
    again = f"{_RUN} --name run --runs . --overwrite"
    for name in (".lock",) if short else (".lock", "metrics.jsonl", ".graph.json.tmp", "plan.txt"):
        forge, fine = f.link(name, "notes.txt"), name != ".lock"
        yield _case(f"run --overwrite: a link at {name}", again, forge, fine=fine)
    for name in () if short else ("checkpoints", "samples", "logs"):
        yield _case(f"run --overwrite: a link at {name}", again, f.link(name, "inside"), fine=True)
    yield _case("run --overwrite: the folder is a link", again, f.folder_is_a_link)
    foreign = f.written("thesis.txt", b"years of work")
    yield _case("run --overwrite: a foreign file", again, foreign)
    wrong = ("../victim", "/x", "..", "a/b", f"x{ESCAPES}")
    for name in wrong[::4] if short else wrong:
        words = (*_RUN.split(), "--name", name, "--runs", ".", "--overwrite")
        yield ForgedCase(name=f"run --name {name!r}", words=words, forge=lambda folder: None)
