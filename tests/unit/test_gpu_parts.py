"""scripts/gpu: shares of the minutes, parts that hang or fail, its options, wheels that travel."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.forked import ForkedPython
from tests.kit.processes import ROOT

HANGS = "import time; print('began', flush=True); time.sleep(600)"
WRITES = "import json, sys; json.dump([], open(sys.argv[-1], 'w'))"


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.fixture
def gpu_parts() -> Any:
    return importlib.import_module("gpu_parts")


@pytest.fixture
def command() -> Any:
    return importlib.import_module("gpu_command")


@pytest.fixture
def wheels() -> Any:
    return importlib.import_module("gpu_wheels")


def part(gpu_parts: Any, name: str, code: str, share: float = 1.0) -> Any:
    return gpu_parts.GpuPart(name=name, words=("-c", code), share=share)


def folders_of(gpu_parts: Any, tmp_path: Path) -> Any:
    return gpu_parts.PartFolders(
        results=tmp_path / "results", logs=tmp_path / "logs", base=tmp_path / "base"
    )


def runs_of(gpu_parts: Any, tmp_path: Path, *parts: Any, seconds: float = 60.0) -> Any:
    return gpu_parts.PartRuns(
        parts=parts,
        folders=folders_of(gpu_parts, tmp_path),
        seconds=seconds,
        environment=os.environ,
    )


@given(
    shares=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=9),
    seconds=st.floats(0.0, 1000.0),
    used=st.floats(0.0, 1.0),
)
def test_limits_of_all_parts_and_their_ends_are_within_the_time(
    shares: list[float], seconds: float, used: float
) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    gpu_parts = importlib.import_module("gpu_parts")
    sys.path.pop(0)
    parts = [part(gpu_parts, "a", "", share) for share in shares]
    seconds_left = seconds
    for number in range(len(parts)):
        limit = gpu_parts.find_limit(parts[number:], seconds_left)
        assert 0.0 <= limit <= max(0.0, seconds_left)
        taken = limit * used
        # Only one that is at its limit has to be killed.
        seconds_left -= taken + (gpu_parts.KILLING if used == 1.0 and limit else 0.0)
    assert seconds_left >= -1e-6


def test_what_a_part_did_not_need_is_for_those_after_it(gpu_parts: Any) -> None:
    parts = [part(gpu_parts, name, "") for name in "ab"]
    assert gpu_parts.find_limit(parts, 104.0) == 50.0
    assert gpu_parts.find_limit(parts[1:], 94.0) == 92.0


def test_a_part_that_hangs_is_killed_and_those_after_it_run(
    gpu_parts: Any, tmp_path: Path, command: Any
) -> None:
    parts = [part(gpu_parts, "hangs", HANGS, 0.02), part(gpu_parts, "writes", WRITES)]
    runs = runs_of(gpu_parts, tmp_path, *parts)
    runs.run()
    hung, wrote = runs.ends
    assert (hung.code, hung.failed) == (None, True)
    assert wrote.code == 0
    assert runs.folders.output(wrote.part).read_text() == "[]"
    text = "\n".join(command.table_lines(runs.ends, runs.folders))
    assert "hangs: KILLED at its limit of 1 s" in text
    assert "  | began" in text
    assert "writes: done" in text


def test_a_part_that_fails_says_why_and_one_without_time_does_not_begin(
    gpu_parts: Any, tmp_path: Path, command: Any
) -> None:
    parts = [
        part(gpu_parts, "fails", "raise SystemExit('no room')"),
        part(gpu_parts, "late", HANGS),
    ]
    runs = runs_of(gpu_parts, tmp_path, parts[0])
    runs.run()
    late = runs_of(gpu_parts, tmp_path, parts[1], seconds=0.0)
    late.run()
    text = "\n".join(command.table_lines([runs.ends[0], *late.ends], runs.folders))
    assert "fails: FAILED, exit code 1" in text
    assert "  | no room" in text
    assert "late: NOT BEGUN, no time was left" in text


def test_results_are_shown_with_their_goals(gpu_parts: Any, tmp_path: Path, command: Any) -> None:
    folders = folders_of(gpu_parts, tmp_path)
    folders.results.mkdir()
    end = gpu_parts.PartEnd(part=part(gpu_parts, "a", ""), code=0, seconds=1.0, limit=2.0)
    result = {"name": "share", "value": 0.25, "unit": "share", "goal": 0.5, "holds": False}
    folders.output(end.part).write_text(json.dumps([result]))
    _, line = command.table_lines([end], folders)
    assert line.split() == ["share", "0.25", "share", "goal", "0.5", "NO"]


def test_the_options(command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.read_arguments([]).minutes == 6.0
    assert command.read_arguments(["--minutes", "2.5", "--quick"]).minutes == 2.5
    for words in (["--minutes", "0"], ["--wheels", str(tmp_path)]):
        with pytest.raises(SystemExit):
            command.read_arguments(words)
        assert "Fix: " in capsys.readouterr().err


def test_without_a_card_the_long_form_is_refused(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert command.main([]) == 2
    assert "expected a CUDA device, found none" in capsys.readouterr().err


def test_wheels_travel_for_what_a_card_s_machine_lacks(wheels: Any) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    lock = (ROOT / "requirements/cpu.lock").read_text()
    needs = wheels.installed_needs()
    names = [each.partition("==")[0] for each in wheels.travelling(pyproject, lock, needs)]
    assert {"msgspec", "pyzmq", "tyro", "typeguard", "pytest", "hypothesis", "peft"} <= {*names}
    assert not {"torch", "transformers", "pyarrow", "numpy", "safetensors"} & {*names}
    assert "starlette" not in names


def test_wheels_have_the_versions_of_the_lock(wheels: Any) -> None:
    pyproject = (
        '[project]\ndependencies = ["torch>=2", "A.b"]\n[project.optional-dependencies]\n'
        'lora = ["e"]\ntest = []\ndev = ["pytest-timeout", "ruff"]\n'
    )
    lock = "# A lock.\na-b==1\nc==2\nd==3\ne==5\npytest-timeout==4\n"
    needs = {"torch": ["d"], "a-b": ["c", "d"]}
    expected = ["a-b==1", "c==2", "e==5", "pytest-timeout==4"]
    assert wheels.travelling(pyproject, lock, needs, ["torch"]) == expected


def test_only_wheels_of_what_is_not_installed_are_missing(wheels: Any, tmp_path: Path) -> None:
    for name in ("typing_extensions-4-py3-none-any.whl", "no_such_package-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert [each.name for each in wheels.missing_wheels(tmp_path)] == [
        "no_such_package-1-py3-none-any.whl"
    ]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_short_form_writes_all_results_in_the_house_form(
    gpu_parts: Any, tmp_path: Path
) -> None:
    runs = gpu_parts.PartRuns(
        parts=gpu_parts.PARTS,
        folders=folders_of(gpu_parts, tmp_path),
        seconds=150.0,
        environment=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        quick=True,
        popen=ForkedPython,
    )
    runs.run()
    for end in runs.ends:
        log = runs.folders.log(end.part).read_text(errors="replace")
        assert not end.failed, f"{end.part.name}: {end}\n{log}"
        output = runs.folders.output(end.part)
        results = json.loads(output.read_text())
        assert all({*each} == {"name", "value", "unit", "goal", "holds"} for each in results)
        machine = json.loads(output.with_suffix(".machine.json").read_text())
        assert machine["device"] == machine["processor"]
        # A profile on a CPU takes too long for the short form.
        assert results or end.part.name == "predicted"
