"""Forged run folders, looked at and gone on with through the real command line.

Whoever receives a run folder may look at it: nothing that it names is imported or run. Whatever
lies in it, nothing outside of it is written, cut or deleted. What is refused is refused in one
line, and no process stays.
"""

from __future__ import annotations

import json
import os
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

from engine.checkpoint.store import MANIFEST
from tests.torture.forgeries import (
    ESCAPES,
    HUGE,
    LOUD,
    Forge,
    code_in_config,
    cut,
    edit,
    folder_is_a_link,
    gone,
    graphs,
    hard_link,
    link,
    names,
    node_of,
    param,
    pickled,
    random_edit,
    replaced,
    reward,
    rows,
    sealed,
    texts,
    weights,
    written,
)
from tests.torture.outcome import Outcome

ROOT = Path(__file__).parents[2]
SHADOWS = (
    "json",
    "random",
    "torch",
    "numpy",
    "struct",
    "selectors",
    "pyarrow",
    "msgspec",
    "transformers",
    "socket",
)
"""Names of modules that Python and torch import: beside the run lies one of each, which writes that
it ran.
"""
LIMIT = 600.0
MARK = "DATAFLOW_TORTURE"
_CALL = "from engine.cli import main; sys.exit(main())"
_MODEL = (
    "from pathlib import Path; from tests.kit.models import save_tiny; save_tiny(Path('model'),"
    " layers=1)"
)
_RUN = [
    *(
        "run",
        "graphs.grpo:grpo",
        "--base",
        "model",
        "--data",
        "rows.jsonl",
        "--reward-fn",
        "my_rewards:same",
    ),
    *(
        "--n",
        "2",
        "--batch",
        "2",
        "--max-tokens",
        "3",
        "--steps",
        "2",
        "--threads",
        "1",
        "--no-progress",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """words: of the command line. imports: running it imports what it names, which it has to say
    before. fine: it may succeed.
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
    (folder / "my_rewards.py").write_text(
        "def same(completions, answer):\n    return [0.0 for _ in completions]\n"
    )
    for code, words in ((_MODEL, []), (_CALL, [*_RUN, "--name", "run", "--runs", "."])):
        done = _python(folder, f"import sys; sys.path.append({str(ROOT)!r}); {code}", *words)
        if done.returncode:
            raise RuntimeError(f"no run to forge: {done.stderr}")
    for module in (*SHADOWS, LOUD):
        (folder / f"{module}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    package = folder / "forged_package"
    package.mkdir()
    shutil.copy(folder / f"{LOUD}.py", package / "__init__.py")
    (package / "inner.py").touch()
    victim = folder / "victim"
    (victim / "inside").mkdir(parents=True)
    for file in (
        "notes.txt",
        "metrics.jsonl",
        "inside/thesis.txt",
        "inside/manifest.json",
        "inside/main.log",
    ):
        (victim / file).write_text("years of work\n")


def _python(
    folder: Path, code: str, *words: str, mark: str = ""
) -> subprocess.CompletedProcess[str]:
    """As the console script does it: the current folder is not on the path by itself."""
    own = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        MARK: mark,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
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


# --- judging --------------------------------------------------------------------------------------


def _judged(case: Case, good: Path, folder: Path) -> Outcome:
    shutil.copytree(good, folder, symlinks=True)
    options = folder / "run" / "options.json"
    options.write_text(options.read_text().replace(str(good), str(folder)))  # where it imports from
    case.forge(folder)
    before = _state(folder)
    mark, begun = uuid.uuid4().hex, time.monotonic()
    done = _python(folder, _CALL, *case.words, mark=mark)
    said = next(
        (
            line
            for line in done.stderr.splitlines()
            if not line.startswith(("imports ", "whatever "))
        ),
        "",
    )
    faults = [fault for fault in _faults(case, folder, done, before) if fault]
    faults += [f"process {pid} stayed" for pid in _left(mark)]
    shutil.rmtree(folder)
    return Outcome(
        part="forged",
        case=case.name,
        fault="; ".join(faults),
        said=said[:160],
        seconds=time.monotonic() - begun,
    )


def _faults(
    case: Case, folder: Path, done: subprocess.CompletedProcess[str], before: Any
) -> Iterator[str]:
    shown = done.stdout + done.stderr
    ran = [path.relative_to(folder) for path in folder.rglob("*.ran")]
    for path in ran:
        (folder / path).unlink()
    if ran and not (case.imports and {path.name for path in ran} == {f"{LOUD}.py.ran"}):
        yield f"ran: {', '.join(map(str, ran))}"
    if ran and f"imports {LOUD} from " not in done.stderr:
        yield "it did not say what it imports"
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
    lines = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("imports ", "whatever ", "checkpoint "))
    ]
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


# --- cases ----------------------------------------------------------------------------------------


def _cases(chance: random.Random, short: bool) -> Iterator[Case]:
    looking = [*graphs(), *texts()][:: 3 if short else 1]
    for number, (name, forge, fine) in enumerate(looking):
        commands = (
            ("draw", "check", "explain")
            if not short
            else (("draw", "check", "explain")[number % 3],)
        )
        for command in commands:
            yield Case(
                name=f"{command}: {name}",
                words=(command, "run/graph.json"),
                forge=forge,
                fine=fine or command == "draw",
            )
    for number in range(1 if short else 40):
        forge = random_edit(chance.randrange(1 << 30))
        yield Case(
            name=f"check: random edit {number}",
            words=("check", "run/graph.json"),
            forge=forge,
            fine=True,
        )
    for form in ("mermaid",) if short else ("text", "mermaid", "dot", "svg"):
        forge = edit(names)
        yield Case(
            name=f"draw {form}: escapes",
            words=("draw", "run/graph.json", "--form", form),
            forge=forge,
            fine=True,
        )
    yield Case(
        name="diff: a function that it names",
        words=("diff", "run/graph.json", "run/graph.json"),
        forge=edit(reward({"function": f"{LOUD}:f"})),
        fine=True,
    )
    yield from _going_on(short)
    yield from _overwriting(short)


# --- run folders ----------------------------------------------------------------------------------


_FILES = (
    ".lock", "metrics.jsonl", "trace/run_1.json", "logs/main.log", "samples/step_000003.parquet", ".options.json.tmp",
    "metrics.jsonl.tmp", "checkpoints/step_2/manifest.json", "checkpoints/step_2/cut.json", "checkpoints/.tmp-file",
    "graph.json", "options.json", "versions.json", ".plan.json.tmp", "samples/.step_000003.parquet.tmp", "plan.txt",
)  # fmt: skip
_FOLDERS = (
    "samples", "checkpoints", "checkpoints/step_2", "checkpoints/step_9", "trace", "logs", "checkpoints/.tmp-step_3",
    "checkpoints/.replaced-step_2", "tensorboard", "checkpoints/step_2/train_policy",
)  # fmt: skip
KEYED = {
    "key.position": pa.array([0], pa.int64()),
    "key.sample": pa.array([0], pa.int32()),
    "key.attempt": pa.array([0], pa.int32()),
}
_LATE = ("sealed", "manifest", "module beside", "another graph")
"""Cases that begin a run, which takes ten times as long."""
_GO_ON = ("resume", "run", "--steps", "3")


def _going_on(short: bool) -> Iterator[Case]:
    for name in _FILES[:2] if short else _FILES:
        yield Case(name=f"resume: a link at {name}", words=_GO_ON, forge=link(name, "notes.txt"))
    for name in _FOLDERS[1:2] if short else _FOLDERS:
        yield Case(name=f"resume: a link at {name}", words=_GO_ON, forge=link(name, "inside"))
    for name in _FILES[:1] if short else _FILES:
        yield Case(name=f"resume: a pipe at {name}", words=_GO_ON, forge=replaced(name, os.mkfifo))
    for name in _FILES[1:2] if short else (*_FILES[:4], ".options.json.tmp"):
        fine = name.endswith(".tmp") or name.startswith("trace")
        yield Case(
            name=f"resume: a hard link at {name}", words=_GO_ON, forge=hard_link(name), fine=fine
        )
    odd = [*_options(), *_graphs_to_run(), *_checkpoints()]
    quick = [case for case in odd if not any(word in case.name for word in _LATE)]
    yield from quick[::4] if short else odd


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
        yield Case(
            name=f"resume: options, {name}",
            words=("resume", "run"),
            forge=edit(change, "options.json"),
        )
    yield Case(name="resume: options are none", words=_GO_ON, forge=written("options.json", b"[]"))


def _graphs_to_run() -> Iterator[Case]:
    loud = edit(reward({"function": f"{LOUD}:f"}))
    yield Case(
        name="resume: a reward of a module beside it", words=_GO_ON, forge=loud, imports=True
    )
    words = ("run", "run/graph.json", "--name", "made_by_the_case", "--runs", "made_by_the_case")
    yield Case(name="run: a reward of a module beside it", words=words, forge=loud, imports=True)
    yield Case(
        name="resume: no parameters",
        words=_GO_ON,
        forge=edit(lambda d: node_of(d, "train_policy").update(params={})),
    )
    yield Case(
        name="resume: a loss that is none",
        words=_GO_ON,
        forge=edit(param("train_policy", "loss", 5)),
    )
    yield Case(name="resume: deep", words=_GO_ON, forge=written("graph.json", b"[" * 100_000))
    yield Case(name="resume: not UTF-8", words=_GO_ON, forge=written("graph.json", b"\xff\xfe\x80"))
    yield Case(
        name="resume: another graph", words=_GO_ON, forge=edit(param("train_policy", "lr", 0.5))
    )


def _checkpoints() -> Iterator[Case]:
    def manifest(change: Callable[[dict[str, Any]], Any]) -> Forge:
        return edit(change, f"checkpoints/step_2/{MANIFEST}")

    out = {"../../../victim/notes.txt": {"bytes": 14, "sha256": "0"}}
    for name, forge in (
        ("a manifest that names files outside", manifest(lambda d: d.update(files=out))),
        ("a manifest with a gigantic number", manifest(lambda d: d.update(step=HUGE))),
        ("a manifest that is a list", written(f"checkpoints/step_2/{MANIFEST}", b"[]")),
        ("sealed: files outside", sealed(lambda at: None, files=out)),
        ("sealed: nothing in it", sealed(lambda at: [gone(p) for p in at.iterdir()])),
        ("sealed: a cut that is none", sealed(lambda at: (at / "cut.json").write_text("{}"))),
        ("sealed: a cut with escapes", sealed(cut(graph=ESCAPES, record=None))),
        ("sealed: a cut of gigantic numbers", sealed(cut(step=HUGE))),
        ("sealed: a cut of another kind", sealed(cut(sources=[1]))),
        ("sealed: rows of an unknown node", sealed(lambda at: rows(at, "nobody", {"a": [1]}))),
        ("sealed: rows of another schema", sealed(lambda at: rows(at, "rollout", {"a": [1]}))),
        (
            "sealed: rows without their columns",
            sealed(lambda at: rows(at, "rollout", KEYED | {"a": [1]})),
        ),
        ("sealed: rows that are none", sealed(lambda at: rows(at, "rollout", None))),
        ("sealed: pickles in the place of the optimizer", sealed(pickled("optimizer"))),
        ("sealed: pickles in the place of weights", sealed(pickled("model"))),
        ("sealed: no weights", sealed(lambda at: gone(at / "train_policy"))),
        ("sealed: weights that are none", sealed(weights)),
        ("sealed: a config that names code", sealed(code_in_config)),
    ):
        yield Case(name=f"resume: {name}", words=_GO_ON, forge=forge, fine="config" in name)


def _overwriting(short: bool) -> Iterator[Case]:
    again = (*_RUN, "--name", "run", "--runs", ".", "--overwrite")
    for name in (".lock",) if short else (".lock", "metrics.jsonl", ".graph.json.tmp", "plan.txt"):
        yield Case(
            name=f"run --overwrite: a link at {name}",
            words=again,
            forge=link(name, "notes.txt"),
            fine=name != ".lock",
        )
    for name in () if short else ("checkpoints", "samples", "logs"):
        yield Case(
            name=f"run --overwrite: a link at {name}",
            words=again,
            forge=link(name, "inside"),
            fine=True,
        )
    yield Case(name="run --overwrite: the folder is a link", words=again, forge=folder_is_a_link)
    yield Case(
        name="run --overwrite: a foreign file",
        words=again,
        forge=written("thesis.txt", b"years of work"),
    )
    wrong = ("../victim", "/x", "..", "a/b", f"x{ESCAPES}")
    for name in wrong[::4] if short else wrong:
        words = (*_RUN, "--name", name, "--runs", ".", "--overwrite")
        yield Case(name=f"run --name {name!r}", words=words, forge=lambda folder: None)
