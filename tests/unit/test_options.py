"""Options of a run: their bounds, as flags, from a run folder and as the planner is given them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import PlanError, RunError
from engine.cli.resume import changed_options
from engine.cli.target import UsageError
from engine.plan.options import (
    RunOptions,
    decode_options,
    encode_options,
    make_placing,
)
from engine.plan.placement import Placing


@pytest.mark.parametrize("change,told", [
    ({"steps": -1}, "--steps: expected 0 or more, found -1. Fix: --steps 1."),
    ({"watchdog": math.nan}, "--watchdog: expected 0 or more, found nan. Fix: --watchdog 1."),
    (
        {"heartbeat": math.inf},
        "--heartbeat: expected 0.1 or more, found inf. Fix: --heartbeat 0.1.",
    ),
])  # fmt: skip
def test_options_that_no_run_can_have_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=re.escape(told)):
        make_placing(dataclasses.replace(RunOptions(), **change))


def test_resume_changes_only_what_is_given() -> None:
    assert changed_options([])[1] == {}
    _, changes = changed_options(["--steps", "9", "--no-progress", "--checkpoint_every=2"])
    assert changes == {"steps": 9, "progress": False, "checkpoint_every": 2}
    options, changes = changed_options(["--set", "a.b=1", "--set", "c.d=2", "--accept-changes"])
    assert (list(options.set), options.accept_changes, changes) == (["a.b=1", "c.d=2"], True, {})


@pytest.mark.parametrize("flags", [["--seed", "1"], ["--name=x"], ["--runs", "x"], ["--overwrite"]])
def test_what_a_resume_cannot_have_is_refused(flags: list[str]) -> None:
    flag = flags[0].partition("=")[0]
    with pytest.raises(UsageError, match=rf"{flag} does not change in a resume: .* Fix: leave"):
        changed_options(flags)


def test_what_a_resume_cannot_have_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        changed_options(["--help"])
    listed = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert listed >= {"--steps", "--set"}
    assert not listed & {"--seed", "--name", "--runs", "--overwrite"}


def test_tables_and_groups_are_given_as_words_and_may_be_repeated() -> None:
    words = "--pin rollout=g0,g1 score=data --replicas rollout=2 --together a,b --turns=g0,train"
    more = "--steps 4 --pin=old=main --workers apart --turns g1,x"
    assert changed_options([*words.split(), *more.split()])[1] == {
        "pin": {"rollout": "g0,g1", "score": "data", "old": "main"},
        "replicas": {"rollout": 2},
        "together": (("a", "b"),),
        "turns": (("g0", "train"), ("g1", "x")),
        "steps": 4,
        "workers": "apart",
    }


@pytest.mark.parametrize(("flags", "message"), [
    (["--replicas", "rollout"], "expected NAME=INT|INT..INT, found 'rollout'"),
    (["--replicas", "rollout=two"], "expected NAME=INT|INT..INT, found 'rollout=two'"),
    (["--pin", "=gen"], "expected NAME=NAME, found '=gen'"),
    (["--pin", "a=b", "--pin", "a=c"], "a is given twice"),
    (
        ["--recompute", "train_policy=layer"],
        "expected NAME=none|layers, found 'train_policy=layer'. Fix: train_policy=layers",
    ),
    (["--together", "rollout"], "expected two names or more, found 'rollout'"),
])  # fmt: skip
def test_wrong_tables_and_groups_say_what_was_expected(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        changed_options(flags)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split()).replace("\u2502 ", "")


def test_options_come_back_from_a_run_folder_as_they_were() -> None:
    options = RunOptions(
        steps=3, runs=Path("elsewhere"), sinks=("tensorboard",), workers="apart",
        together=(("a", "b"), ("c", "d")), pin={"rollout": "g0,g1"}, turns=(("x", "y"),),
        chunks={"rollout": 4}, ranks={"train": 2},
    )  # fmt: skip
    text = encode_options(options, path=["/somewhere"])
    assert decode_options(text, {}) == (options, ("/somewhere",))
    changed, _ = decode_options(text, {"workers": "one", "pin": {}, "steps": None})
    assert changed == dataclasses.replace(options, workers="one", pin={})
    old = {name: json.loads(text)[name] for name in ("steps", "runs", "seed")}
    before = RunOptions(steps=3, runs=Path("elsewhere"), stream="off", search="off", loads="equal")
    assert decode_options(json.dumps(old), {})[0] == before
    with pytest.raises(RunError, match=r"'worker' is no option\. Fix: workers"):
        decode_options(text, {"worker": "one"})


def test_the_planner_gets_every_option_that_it_has_a_field_for() -> None:
    options = {field.name for field in dataclasses.fields(RunOptions)}
    shared = options & {field.name for field in dataclasses.fields(Placing)}
    for name in sorted(shared - {"pin", "replicas"}):  # which come in parts
        mark = object()
        changed = dataclasses.replace(RunOptions(), **{name: mark})
        assert getattr(make_placing(changed), name) is mark, name


def test_the_planner_is_told_the_workers_of_a_pin_one_by_one() -> None:
    options = RunOptions(pin={"rollout": "g0, g1"}, inproc=True, replicas={"score": 2})
    told = make_placing(options)
    assert told.pin == {"rollout": ("g0", "g1")}
    assert (told.workers, told.inproc, told.replicas) == ("auto", True, {"score": 2})
