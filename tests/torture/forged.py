"""Forged run folders, looked at and resumed through the real command line.

Looking imports and runs nothing that a folder names; nothing outside of it is written, cut or
deleted; what is refused is refused in one line, and no process stays.
"""

from __future__ import annotations

import contextlib
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

from engine.keep.checkpoint.store import MANIFEST
from tests.kit.forked import own_interpreters
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

        cases = list(_cases(random.Random(seed), short))
        firsts = {case.words[0]: case for case in reversed(cases)}

        def carried_out(number: int, case: ForgedCase) -> CaseResult:
            folder = Path(name) / f"case{number}"
            # Where Python looks for modules is the same in all cases of a command.
            own = case is firsts[case.words[0]]
            with own_interpreters() if own else contextlib.nullcontext():
                return timed("forged", case.name, partial(_judged, case, good, folder))

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
    own = {"HOME": str(folder), MARK: mark}
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
    """All that is not in the run folder: names, kinds, contents; bytecode apart, as what runs is
    seen by itself.
    """
    state: dict[str, Any] = {}
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
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
    yield from _overwriting()


def _case(name: str, words: str, forge: Forge, **how: bool) -> ForgedCase:
    return ForgedCase(name=name, words=tuple(words.split()), forge=forge, **how)


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
    """Of links and pipes one of each kind: tests/unit/test_runfolder.py has them everywhere."""
    for name, forge in (
        ("a link at .lock", f.link(".lock", "notes.txt")),
        ("a link at options.json", f.link("options.json", "notes.txt")),
        ("a link at checkpoints", f.link("checkpoints", "inside")),
        ("a pipe at .lock", f.replaced(".lock", os.mkfifo)),
        ("a hard link at metrics.jsonl", f.hard_link("metrics.jsonl")),
    ):
        yield _case(f"resume: {name}", _GO_ON, forge)
    yield from _records(short)
    odd = [*_options(), *_graphs_to_run(), *_checkpoints()]
    quick = [case for case in odd if not any(word in case.name for word in _LATE)]
    yield from quick[::4] if short else odd


def _records(short: bool) -> Iterator[ForgedCase]:
    """What is recorded keeps no run from going on; only a life that no run has cannot be counted
    on.
    """
    words = "resume run --steps 3 --record all"
    for life in (b"9" * 30,) if short else (b"9" * 30, b"-1", b"2147483647", b"", b"\xff"):
        yield _case(f"{words}: life {life[:10]!r}", words, f.written("recorded/_life", life))
    for name in () if short else ("_assignments/step_000001", "rollout/1-2-2-main"):
        forge = f.written(f"recorded/{name}.parquet", b"PAR1")
        yield _case(f"{words}: {name} is none", words, forge, fine=True)


def _options() -> Iterator[ForgedCase]:
    """More: RUNS of data.py."""
    for name, changes in (
        ("gigantic steps", {"seed": HUGE, "steps": -1}),
        ("pins", {"pin": {"rollout": 5}}),
        ("a cluster", {"cluster": ["x"]}),
        ("threads", {"threads": ESCAPES}),
    ):
        forge = f.edit(lambda document, changes=changes: document.update(changes), "options.json")
        yield _case(f"resume: options, {name}", "resume run", forge)


def _graphs_to_run() -> Iterator[ForgedCase]:
    loud = f.edit(_LOUD_REWARD)
    yield _case("resume: a reward of a module beside it", _GO_ON, loud, imports=True)
    words = "run run/graph.json --name made_by_the_case --runs made_by_the_case"
    yield _case("run: a reward of a module beside it", words, loud, imports=True)
    train = "train_policy"
    for name, forge in (
        ("no parameters", f.edit(f.node(train, params={}))),
        ("a loss that is none", f.edit(f.param(train, "loss", 5))),
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


def _overwriting() -> Iterator[ForgedCase]:
    again = f"{_RUN} --name run --runs . --overwrite"
    for name, forge in (
        ("a link at .lock", f.link(".lock", "notes.txt")),
        ("the folder is a link", f.folder_is_a_link),
        ("a foreign file", f.written("thesis.txt", b"years of work")),
    ):
        yield _case(f"run --overwrite: {name}", again, forge)
    for name in ("../victim", f"x{ESCAPES}"):
        words = (*_RUN.split(), "--name", name, "--runs", ".", "--overwrite")
        yield ForgedCase(name=f"run --name {name!r}", words=words, forge=lambda folder: None)
