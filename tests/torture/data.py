"""Bad data files, cluster files, run folders, names and graph files: one line with a place each.

Each goes through the command line, in this process: `peek` for data (check, plan, open), `explain`
for cluster files, `resume` for run folders, `run` for names, `check` for graph files, `simulate`
for traces (traces.py), `run` for what an operator returns (returned.py). RIGHT looks odd and is
right.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.cli import main as dataflow
from tests.kit.models import save_tiny
from tests.torture.outcome import CaseResult, timed
from tests.torture.returned import RETURNED, run_of
from tests.torture.traces import TRACES

Writer = Callable[[Path], str]
"""Makes the input in a folder; returns what the command is given."""


def torture(short: bool, seed: int) -> list[CaseResult]:
    """Short: four of each table, as tests/unit/test_bad_inputs.py has what most of them lead to."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="dataflow-torture-") as name:
        folder = Path(name)
        base = _model(folder)
        peek = ["peek", "tests.torture.victim:asking", "prompts", "--rows", "1", "--base", base]
        asking = ["tests.torture.victim:asking", "--base", base, "--data", f"{folder}/good.jsonl"]
        groups = (
            (DATA, lambda given: [*peek, "--data", given], 1),
            (RIGHT, lambda given: [*peek, "--data", given], 0),
            (CLUSTERS, lambda given: ["explain", *asking, "--cluster", given], 1),
            (RUNS, lambda given: ["resume", given, "--no-progress"], 3),
            (OPTIONS, lambda given: ["explain", *asking, *json.loads(given)], 1),
            (NAMES, lambda given: ["run", *asking, *json.loads(given)], 3),
            (TARGETS, lambda given: ["check", given], 1),
            (TRACES, lambda given: ["simulate", *asking, "--lengths", given], 1),
            (RETURNED, lambda given: run_of(folder, f"{given}:f", base), 3, "row ("),
        )
        cases = []
        for table, *how in groups:
            titles = draw.sample([*table], 4) if short else table
            cases += [(title, table[title], *how) for title in titles]
        return [
            timed("data", title, partial(_judged, folder / f"case-{i}", *how))
            for i, (title, *how) in enumerate(cases)
        ]


def _model(folder: Path) -> str:
    (folder / "good.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return save_tiny(folder / "model", layers=1)


def _judged(
    folder: Path, write: Writer, command: Callable[[str], list[str]], code: int, names: str = ""
) -> tuple[str, str]:
    """What is wrong (empty where nothing is), and the last line that was said. names: a word that
    it has to have.
    """
    folder.mkdir()
    errors, words = io.StringIO(), command(write(folder))
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            ended = dataflow(words)
        except Exception as error:  # a traceback of ours is what this looks for
            return f"a traceback: {type(error).__name__}: {error}", ""
    lines = errors.getvalue().strip().splitlines()
    last = lines[-1] if lines else ""
    fault = _fault(ended, errors.getvalue(), code)
    return fault or ("" if names in last else f"{names!r} is not in it"), last


def _fault(ended: int, said: str, code: int) -> str:
    """What is wrong with it; empty where nothing is."""
    if code == 0:
        return "" if ended == 0 else f"exit {ended} for what is right"
    lines = said.strip().splitlines()
    checks = {
        f"exit {ended}, not {code}": ended not in (code, 1, 2),
        "a traceback": "Traceback" in said,
        f"{len(lines)} lines, not one": len(lines) != 1,
        "no fix": "Fix: " not in said,
        "an internal error": "internal error" in said,
        "no place": not any(mark in said for mark in (".", "/")),
        "control characters": any(ord(c) < 32 and c != "\n" for c in said),
        f"{len(said)} characters": len(said) > 1500,
    }
    return next((fault for fault, holds in checks.items() if holds), "")


# --- data files -----------------------------------------------------------------------------------


def _jsonl(data: bytes | str, name: str = "a.jsonl") -> Writer:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(folder / name)

    return write


def _rows(*rows: object) -> Writer:
    return _jsonl("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(table: pa.Table, change: Callable[[bytearray], object] = bytes) -> Writer:
    def write(folder: Path) -> str:
        path = folder / "a.parquet"
        pq.write_table(table, path, compression="none", use_dictionary=False)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        return str(path)

    return write


def _folder(**files: Writer) -> Writer:
    """A folder of files, each written as its own writer does, under the argument's name."""

    def write(folder: Path) -> str:
        (folder / "all").mkdir()
        for name, writer in files.items():
            (folder / name).mkdir()
            written = Path(writer(folder / name))
            os.rename(written, folder / "all" / f"{name}{written.suffix}")
        return str(folder / "all")

    return write


def _at(make: Callable[[Path], object], name: str = "a.jsonl") -> Writer:
    def write(folder: Path) -> str:
        make(folder / name)
        return str(folder / name)

    return write


def _spoilt(at: slice, data: bytes = b"") -> Writer:
    """Parquet with other bytes in the place of some."""
    return _parquet(_TEXTS, lambda whole: whole.__setitem__(at, data))


def _halve(data: bytearray) -> None:
    del data[len(data) // 2 :]


def _loop(path: Path) -> None:
    path.symlink_to(path.with_name("b.jsonl"))
    path.with_name("b.jsonl").symlink_to(path)


def _below_a_file(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n')
    return str(folder / "a.jsonl" / "b.jsonl")


def _messages(*messages: dict[str, object]) -> Writer:
    return _rows({"prompt": [{"role": "user", "content": "a"}]}, {"prompt": list(messages)})


_GOOD = '{"prompt": "a"}\n'
_TEXTS = pa.table({"prompt": ["abcdefgh"] * 100, "answer": ["x"] * 100})
_BINARY = pa.array([b"ok", b"\xff\xfe"], pa.binary())
_NOT_TEXT = pa.table({"prompt": pa.StringArray.from_buffers(2, *_BINARY.buffers()[1:])})


def _twice(table: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([table.column(0), table.column(0)], names=["prompt", "prompt"])


DATA: Mapping[str, Writer] = {
    "a byte that is no UTF-8": _jsonl(_GOOD.encode() + b'{"prompt": "\xff"}\n'),
    "a byte order mark": _jsonl(b"\xef\xbb\xbf" + _GOOD.encode()),
    "UTF-16": _jsonl(_GOOD.encode("utf-16")),
    "10,000 levels": _jsonl(_GOOD + '{"prompt": "a", "x": ' + "[" * 10_000 + "]" * 10_000 + "}\n"),
    "an empty file": _jsonl(b""),
    "blank lines alone": _jsonl(b"\n \n\t\n"),
    "NUL bytes": _jsonl(_GOOD.encode() + b'{"prompt": "a\0b"}\n'),
    "zeros": _jsonl(bytes(4096)),
    "a bad line in the middle": _jsonl(_GOOD * 499 + "{oops\n" + _GOOD * 500),
    "a bad line after those that the check reads": _jsonl(_GOOD * 1499 + "{oops\n" + _GOOD),
    "a torn last line": _jsonl(_GOOD + '{"prompt": "b'),
    "a prompt of another type": _rows({"prompt": "a"}, {"prompt": 3}),
    "another type after those that the check reads": _jsonl(_GOOD * 1200 + '{"prompt": 3}\n'),
    "a column of two types": _rows({"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}),
    "lists and objects in a column": _rows(
        {"prompt": "a", "n": [1]}, {"prompt": "b", "n": {"x": 1}}
    ),
    "no prompt": _rows({"question": "a"}),
    "a null prompt": _rows({"prompt": "a"}, {"prompt": None}),
    "a row without a prompt": _rows({"prompt": "a"}, {"answer": "b"}),
    "numbers as prompts": _rows({"prompt": 1}, {"prompt": 2}),
    "lists of texts as prompts": _rows({"prompt": ["a", "b"]}),
    "a message of nobody": _messages({"role": None, "content": "a"}),
    "a message of nothing": _messages({"role": "user", "content": None}),
    "no messages": _messages(),
    "a key twice": _jsonl(_GOOD + '{"prompt": "a", "prompt": "b"}\n'),
    "NaN": _jsonl('{"prompt": "a", "x": NaN}\n'),
    "a number beyond floats": _jsonl('{"prompt": "a", "x": 1e400}\n'),
    "an integer beyond 64 bits": _jsonl('{"prompt": "a", "x": 99999999999999999999999}\n'),
    "half a surrogate pair": _jsonl('{"prompt": "\\ud800"}\n'),
    "half a surrogate pair in a completion": _jsonl('{"prompt": "a", "completion": "\\ud800"}\n'),
    "one array": _jsonl('[{"prompt": "a"}, {"prompt": "b"}]\n'),
    "one object over many lines": _jsonl('{\n  "prompt": "a"\n}\n'),
    "Python's quotes": _jsonl("{'prompt': 'a'}\n"),
    "control characters in a bad line": _jsonl(b'{"prompt": \x1b[31mred\n'),
    "Parquet that is called JSONL": _jsonl(b"PAR1" + bytes(100)),
    "gzip that is called JSONL": _jsonl(b"\x1f\x8b\x08" + bytes(100)),
    "an ending .json": _jsonl(_GOOD, "a.json"),
    "a column without a name": _rows({"prompt": "a", "": "b"}),
    "a column without a name in Parquet": _parquet(pa.table({"prompt": ["a"], "": ["b"]})),
    "CSV with a value too many": _jsonl("prompt,a\nx,1,2\n", "a.csv"),
    "CSV with an open quote": _jsonl('prompt,a\n"x,1\n', "a.csv"),
    "CSV of names alone": _jsonl("prompt,a\n", "a.csv"),
    "CSV without a line": _jsonl("\n\n", "a.csv"),
    "CSV in UTF-16": _jsonl("prompt,a\nx,1\n".encode("utf-16"), "a.csv"),
    "CSV in Latin-1": _jsonl(b"prompt,a\n\xe9,1\n", "a.csv"),
    "CSV with zero bytes": _jsonl(b"prompt,a\nx\x00y,1\n\x00\x00\x00", "a.csv"),
    "Parquet that is called CSV": _jsonl(b"PAR1" + bytes(100), "a.csv"),
    "ShareGPT by a stranger": _jsonl(
        '{"conversations": [{"from": "narrator", "value": "x"}]}\n', "a.jsonl"
    ),
    "an ending .tsv": _jsonl("prompt\na\n", "a.tsv"),
    "no ending": _jsonl(_GOOD, "a"),
    "truncated Parquet": _parquet(_TEXTS, _halve),
    "Parquet without its footer": _spoilt(slice(-8, None)),
    "Parquet with a damaged page": _spoilt(slice(4, 60), bytes(56)),
    "Parquet with damaged lengths": _spoilt(slice(60, 90), b"\xff" * 30),
    "Parquet with a damaged footer": _spoilt(slice(-60, -8), b"\xff" * 52),
    "empty Parquet": _jsonl(b"", "a.parquet"),
    "text that is called Parquet": _jsonl(_GOOD, "a.parquet"),
    "texts in Parquet that are no UTF-8": _parquet(_NOT_TEXT),
    "a column twice": _parquet(_twice(_TEXTS)),
    "Parquet without rows": _parquet(_TEXTS.slice(0, 0)),
    "Parquet without columns": _parquet(pa.table({})),
    "numbers as prompts in Parquet": _parquet(pa.table({"prompt": [1, 2]})),
    "null prompts in Parquet": _parquet(pa.table({"prompt": ["a", None]})),
    "files of a folder that differ": _folder(
        a=_parquet(pa.table({"prompt": ["a"], "x": [1]})),
        b=_parquet(pa.table({"prompt": ["a"], "x": [["l"]]})),
    ),
    "a folder of both formats": _folder(a=_rows({"prompt": "a"}), b=_parquet(_TEXTS)),
    "a folder with a damaged file": _folder(
        a=_parquet(_TEXTS), b=_parquet(_TEXTS, lambda data: data.clear())
    ),
    "a folder of two splits": _folder(train=_rows({"prompt": "a"}), test=_rows({"prompt": "a"})),
    "an empty folder": _at(Path.mkdir, "all"),
    "a folder with a broken link": _folder(
        a=_rows({"prompt": "a"}), b=_at(lambda p: p.symlink_to("/nowhere/x"))
    ),
    "a folder with a pipe": _folder(a=_rows({"prompt": "a"}), b=_at(os.mkfifo)),
    "a folder that is called a file": _at(Path.mkdir),
    "a pipe": _at(os.mkfifo),
    "a device": lambda folder: "/dev/zero",
    "a broken link": _at(lambda path: path.symlink_to("nowhere.jsonl")),
    "a link to itself": _at(_loop),
    "a path below a file": _below_a_file,
    "a name of 300 characters": lambda folder: str(folder / ("a" * 300 + ".jsonl")),
    "a path of 5,000 characters": lambda folder: str(
        folder / "/".join(["a" * 100] * 50) / "a.jsonl"
    ),
    "a file that is not there": lambda folder: str(folder / "a.jsonl"),
    "a name of control characters": lambda folder: str(folder / "a\x1b[31m\r.jsonl"),
    "no name": lambda folder: "",
}

RIGHT: Mapping[str, Writer] = {
    "lines of Windows": _jsonl(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n'),
    "no newline at the end": _jsonl('{"prompt": "a"}\n{"prompt": "b"}'),
    "a line of 20 MB": _jsonl(json.dumps({"prompt": "a", "x": "y" * 20_000_000})),
    "colons and quotes in texts": _rows(
        {"prompt": 'a": "b', "x": {"y": 'a " : "b'}}, {"prompt": '"":"'}
    ),
    "columns with the names of keywords": _rows(
        {"prompt": "a", "completions": "b", "prompts": ["c"], "completion_ids": 3}
    ),
    "keys that some objects lack": _rows({"prompt": "a", "x": {"y": 1}}, {"prompt": "b", "x": {}}),
    "199 levels": _jsonl('{"prompt": "a", "x": ' + "[" * 198 + "]" * 198 + "}\n"),
    "an escaped NUL": _jsonl('{"prompt": "a\\u0000b"}\n'),
    "a name of other letters": _jsonl(_GOOD, "daten-äöü-数据.jsonl"),
    "columns that some rows lack": _rows({"prompt": "a", "x": 1}, {"prompt": "b", "y": [1.5]}),
    "a folder with an empty file": _folder(a=_rows({"prompt": "a"}), b=_jsonl(b"")),
}


# --- cluster files --------------------------------------------------------------------------------

_HOST = "[hosts.a]\ncores = 4\nmemory_gib = 8\n"
_ABSURD_OF_A_HOST = {
    "cores": "nan -2 2.5 0 1e9 inf true",
    "memory_gib": "nan inf -1 0 1e30",
    "gpus": "nan -1 0 0.5 1e9 true",
    "labels": '3 "gpu" {gpu=3} ["gpu"]',
}


def _toml(data: bytes | str) -> Writer:
    return _jsonl(data, "cluster.toml")


def _with(line: str) -> Writer:
    """A host with this line in the place of its own of that key."""
    key = line.partition(" =")[0]
    kept = [said for said in _HOST.splitlines() if not said.startswith(key)]
    return _toml("\n".join([*kept, line]) + "\n")


CLUSTERS: Mapping[str, Writer] = {
    **{
        f"{name} = {value}": _with(f"{name} = {value}")
        for name, values in _ABSURD_OF_A_HOST.items()
        for value in values.split()
    },
    **{
        f"gpu_memory_gib = {value}": _toml(f"{_HOST}gpus = 2\ngpu_memory_gib = {value}\n")
        for value in ["nan", "inf", "-80", "0", '"80"']
    },
    "no cores": _toml("[hosts.a]\nmemory_gib = 8\n"),
    "no memory": _toml("[hosts.a]\ncores = 8\n"),
    "GPUs without memory": _toml(_HOST + "gpus = 2\n"),
    "a key that is unknown": _toml(_HOST + "core = 2\n"),
    "an address, as of old": _toml(_HOST + 'address = "10.0.0.1"\n'),
    "a lease, which is an option": _toml("lease = 30\n" + _HOST),
    "a name that is none": _toml(_HOST.replace("hosts.a", 'hosts."a b"')),
    "links that are no tables": _toml("links = [1, 2]\n" + _HOST),
    "hosts that are no tables": _toml("hosts = 3\n"),
    "a host that is no table": _toml("[hosts]\na = 3\n"),
    "no TOML": _toml("cores = \n"),
    "10,000 levels of TOML": _toml("x = " + "[" * 10_000 + "]" * 10_000),
    "TOML that is no UTF-8": _toml(b"# \xff\n" + _HOST.encode()),
    "TOML with a byte order mark": _toml(b"\xef\xbb\xbf" + _HOST.encode()),
    "an empty cluster file": _toml(b""),
    "no cluster file": lambda folder: str(folder / "cluster.toml"),
    "a folder as cluster file": lambda folder: str(folder),
    "a pipe as cluster file": _at(os.mkfifo, "cluster.toml"),
}


# --- run folders and names ------------------------------------------------------------------------


def _run_folder(**files: str | bytes) -> Writer:
    """A run folder with these contents (`options` for options.json) in the place of its own."""

    def write(folder: Path) -> str:
        contents: dict[str, str | bytes] = dict.fromkeys(("versions", "options", "graph"), "{}")
        for name, data in (contents | files).items():
            _jsonl(data, f"{name}.json")(folder)
        return str(folder)

    return write


_DEEP = "[" * 10_000 + "]" * 10_000

RUNS: Mapping[str, Writer] = {
    "options.json that is no JSON": _run_folder(options="{"),
    "options.json that is empty": _run_folder(options=""),
    "options.json of zeros": _run_folder(options=bytes(100)),
    "options.json that is no UTF-8": _run_folder(options=b"\xff\xfe"),
    "options.json that is a list": _run_folder(options="[]"),
    "options.json of 10,000 levels": _run_folder(options=_DEEP),
    "options.json with a word for a number": _run_folder(options='{"steps": "many"}'),
    "options.json with nan": _run_folder(options='{"steps": NaN}'),
    "options.json with a number for a path": _run_folder(options='{"runs": 3}'),
    "options.json with a path that is no list": _run_folder(options='{"path": "x"}'),
    "options.json with an unknown option": _run_folder(options='{"stepps": 3}'),
    "graph.json that is no JSON": _run_folder(graph="{"),
    "graph.json that is empty": _run_folder(graph=""),
    "graph.json that is no UTF-8": _run_folder(graph=b"\xff"),
    "graph.json of 10,000 levels": _run_folder(graph=_DEEP),
    "graph.json of something else": _run_folder(graph='{"a": 1}'),
    "a folder that is no run's": lambda folder: str(folder),
}


def _named(runs: Callable[[Path], str], name: str = "a") -> Writer:
    """A run's name, and the folder of runs."""
    return lambda folder: json.dumps(["--name", name, "--runs", runs(folder)])


NAMES: Mapping[str, Writer] = {
    "a run's name of 300 characters": _named(str, "a" * 300),
    "a run's name with a slash": _named(str, "../a"),
    "a folder of runs that is a file": _named(_jsonl("x")),
    "a folder of runs below a file": _named(lambda folder: _jsonl("x")(folder) + "/runs"),
    "a folder of runs of 300 characters": _named(lambda folder: str(folder / ("a" * 300))),
    "a folder of runs in /proc": _named(lambda folder: "/proc/runs"),
    "a folder of runs that is a broken link": _named(
        _at(lambda path: path.symlink_to("nowhere"), "runs")
    ),
}


_ABSURD = """
--keep 0, --samples-every 0, --steps -1, --checkpoint-every -2, --threads 0, --watchdog nan,
--watchdog -1, --heartbeat inf, --heartbeat 0, --set rollout.n=10000000000000,
--set rollout.temperature=1e-320
"""

OPTIONS: Mapping[str, Writer] = {
    words.strip(): lambda folder, words=words: json.dumps(words.split())
    for words in _ABSURD.split(",")
}


# --- graph files ----------------------------------------------------------------------------------


def _graph_file(text: str | bytes) -> Writer:
    def write(folder: Path) -> str:
        name = f"torture_{folder.name.replace('-', '_')}.py"
        return _jsonl(text, name)(folder) + ":f"

    return write


TARGETS: Mapping[str, Writer] = {
    "a syntax error": _graph_file("def f(:\n"),
    "a file that is no UTF-8": _graph_file(b"x = '\xff'\ndef f(): pass\n"),
    "NUL bytes in a file": _graph_file(b"def f(): pass\n\0"),
    "a library that is not there": _graph_file("import no_such_library\n"),
    "a file that raises": _graph_file("raise RuntimeError('of the user\\nin two lines')\n"),
    "a file that exits": _graph_file("import sys\nsys.exit(0)\n"),
    "a function that raises": _graph_file("def f():\n    return {}['x']\n"),
    "a function that calls itself": _graph_file("def f():\n    return f()\n"),
    "a function that returns something else": _graph_file("def f():\n    return 3\n"),
    "a file that is not there": lambda folder: f"{folder}/nowhere.py:f",
    "a file with a name of 300 characters": lambda folder: f"{folder}/{'a' * 300}.py:f",
    "a snapshot that is no JSON": _jsonl("{", "graph.json"),
    "a snapshot that is no UTF-8": _jsonl(b"\xff", "graph.json"),
    "a snapshot of 10,000 levels": _jsonl(_DEEP, "graph.json"),
    "a snapshot that is a pipe": _at(os.mkfifo, "graph.json"),
}
