"""A profile's file: what is written is read, and what is not this machine's is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataflow.errors import PlanError
from engine.cli import main
from engine.plan.cost.devices import Coefficients, device
from engine.plan.cost.machine import Fingerprint, make_fingerprint, this_installation, this_machine
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import (
    PeakCorrection,
    Profile,
    ProfileCell,
    ProfiledNode,
    model_key,
    read_profile,
    write_profile,
)
from tests.unit.test_cost import SHAPE

SIZES = Sizes(parameters=100_000, shape=SHAPE, dtype="float32")
COEFFICIENTS = Coefficients(
    compute=0.4, reads=0.5, step=1e-3, layer=0.0, row=1e-5, link=0.5, hop=1e-4, origin="fitted"
)
CELL = ProfileCell(rows=8, prompt=16, answer=32, samples=4, seconds=0.5, cpu=0.5, fitted=0.55)
TOO_LARGE = ProfileCell(rows=10**6, prompt=16, answer=32)


def entry(**changes: object) -> ProfiledNode:
    """Of training, unless changed."""
    whole = ProfiledNode(
        model=model_key(SIZES),
        kind="train",
        node="train_policy",
        coefficients=COEFFICIENTS,
        peak=PeakCorrection(base=1 << 20, factor=1.1),
        cells=(CELL, TOO_LARGE),
    )
    return replace(whole, **changes)


def made(**changes: object) -> Profile:
    """A profile of this machine."""
    whole = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device("cpu"),
        nodes=(entry(), entry(kind="forward", node="reference"), entry(cores=4)),
        functions={"score": 1e-5},
    )
    return replace(whole, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a folder that is not there."""
    return tmp_path / "new" / "this.json"


def test_what_is_written_is_read(path: Path) -> None:
    write_profile(path, made())
    found = read_profile(path)
    assert found == made()
    assert [cell.error for cell in found.nodes[0].cells] == [pytest.approx(0.1), None]
    assert found.nodes[0].worst == pytest.approx(0.1)


def refused(path: Path) -> str:
    """The one error that reading it gives."""
    with pytest.raises(PlanError) as caught:
        read_profile(path)
    told = str(caught.value)
    assert told.startswith(f"profile {path}: ")
    assert ": expected " in told
    assert told.endswith(f". Fix: dataflow profile GRAPH --out {path}.")
    assert "\n" not in told
    return told


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.json")
    assert "Is a directory" in refused(tmp_path)


WRITTEN = msgspec.json.encode(made())


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "found: Input data was truncated"),
        (b"\xff\xfe", "found: "),
        (b"[1, 2]", "found: Expected `object`, got `array`"),
        (b"[" * 100_000, "found: "),
        (b"{}", "missing required field `format`"),
        (b'{"format": 2}', "missing required field `machine`"),
        (b'{"format": "1"}', "Expected `int`, got `str` - at `$.format`"),
        (b'{"format": 1}', "expected format 2, found 1"),
        (WRITTEN[:-1], "expected what dataflow profile writes, found: "),
    ],
)
def test_damaged(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "this.json"
    path.write_bytes(data)
    assert found in refused(path)


@pytest.mark.parametrize(
    ("what", "here"), [("machine", this_machine()), ("installation", this_installation())]
)
def test_of_another_machine_or_installation(path: Path, what: str, here: Fingerprint) -> None:
    write_profile(path, made(**{what: make_fingerprint("an abacus, 1 core")}))
    assert f"of this {what} ({here.words}), found an abacus, 1 core" in refused(path)


def test_what_is_said_of_an_installation_has_the_format_of_the_formulas() -> None:
    """So that a profile is stale once a formula changes."""
    assert "cost format 2" in this_installation().words


def of_training(**changes: float) -> Profile:
    """With other coefficients of training."""
    return made(nodes=(entry(coefficients=replace(COEFFICIENTS, **changes)),))


TRAINING = "train of train_policy: expected shares above 0 and seconds of 0 or more"


@pytest.mark.parametrize(
    ("profile", "found"),
    [
        (made(nodes=(entry(beside=0.9),)), "expected 1 or more times as long, found 0.9"),
        (made(nodes=(entry(in_run=0.0),)), "in a run: expected more than 0 times as long, found 0"),
        (made(device=replace(device("cpu"), memory_rate=-1.0)), "rates above 0, found -1"),
        (made(device=replace(device("cpu"), operations={"float32": 0.0})), "rates above 0"),
        (of_training(compute=0.0), TRAINING),
        (of_training(attention=-0.1), TRAINING),
        (of_training(step=-1e-3), TRAINING),
        (made(nodes=(entry(peak=PeakCorrection(factor=0.0)),)), TRAINING),
        (made(nodes=(entry(peak=PeakCorrection(base=-1)),)), TRAINING),
        (made(nodes=(entry(cores=0),)), TRAINING),
        (made(nodes=(entry(samples=0),)), "expected 1 or more samples, found 0"),
        (made(load=MachineLoad(share=1.5)), "others to have a share of cores, found 1.5"),
        (made(functions={"score": -1.0}), "seconds of functions of 0 or more"),
        (made(message=-1.0), "seconds of a message of 0 or more, found -1"),
        (
            made(nodes=(entry(opening=-1.0),)),
            "is open: expected 0 or more seconds, found -1",
        ),
        (made(cpu={"score": 1.5}), "score: expected a share of CPU from 0 to 1, found 1.5"),
    ],
)
def test_impossible(path: Path, profile: Profile, found: str) -> None:
    write_profile(path, profile)
    assert found in refused(path)


TARGET = ("graphs.sft:sft", "--base", "b", "--data", "d.jsonl")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--longest", "inf"), "--longest: expected some seconds, found inf. Fix: --longest 5."),
        (("--out", "."), "--out: expected the name of a file, found .. Fix: --out here.json."),
        (
            ("--function-steps", "-1"),
            "--function-steps: expected 0 or more, found -1. Fix: --function-steps 3.",
        ),
    ],
)
def test_flags_are_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, str], told: str
) -> None:
    assert main(["profile", *TARGET, *flags]) == 2
    assert capsys.readouterr().err == f"dataflow profile: {told}\n"


@pytest.mark.parametrize(("cores", "compute"), [(0, 0.1), (1, 0.1), (3, 0.4), (4, 0.4), (64, 0.4)])
def test_coefficients_are_of_the_nearest_cores(cores: int, compute: float) -> None:
    one, four = replace(COEFFICIENTS, compute=0.1), replace(COEFFICIENTS, compute=0.4)
    profile = made(nodes=(entry(coefficients=one), entry(coefficients=four, cores=4)))
    assert profile.node(model_key(SIZES), "train", cores=cores).coefficients.compute == compute


@pytest.mark.parametrize(("samples", "found"), [(0, 1), (1, 1), (2, 1), (8, 8), (64, 8)])
def test_an_entry_is_of_the_nearest_samples_before_the_nearest_cores(
    samples: int, found: int
) -> None:
    profile = made(nodes=(entry(), entry(samples=8, cores=4)))
    node = profile.node(model_key(SIZES), "train", samples=samples, cores=1)
    assert node is not None
    assert node.samples == found


def test_what_was_not_measured_has_no_entry() -> None:
    profile, key = made(), model_key(SIZES)
    assert profile.node(key, "decode") is None
    assert profile.node(key, "train", kernel="vllm") is None
    assert profile.node("another model", "train") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"head": "scalar"},
        {"parameters": 100_001},
        {"shape": replace(SHAPE, kv_heads=4)},
    ],
)
def test_the_key_of_a_model_tells_it_from_others(changes: dict[str, Any]) -> None:
    assert model_key(replace(SIZES, **changes)) != model_key(SIZES)
