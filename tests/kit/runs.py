"""What a run (its Result or folder) leaves behind, and comparing two runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine.api import Result
from engine.keep.samples import read_samples

Rows = list[dict[str, Any]]
Run = Result | Path
_PLACED = (
    *("time/", "cpu/", "queue/", "throughput/", "worker/", "edge/", "coordinator/", "weights/"),
    *("env/step/", "relayout/"),
)
_LEARNT = re.compile(
    "reward/mean|completion/tokens|data/rows|(optim/(.+/)?(updates|grad_norm))|train/(.+/)?tokens"
)
"""Metrics of what was trained, of each of several Models."""


def folder_of(run: Run) -> Path:
    return run if isinstance(run, Path) else run.folder


def metrics(run: Run) -> Rows:
    """The rows of metrics.jsonl."""
    lines = (folder_of(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def timeless(rows: Rows) -> Rows:
    """The rows without what depends on the clock, or on where Workers are."""
    return [{k: v for k, v in row.items() if not k.startswith(_PLACED)} for row in rows]


def column(run: Run, name: str) -> list[float]:
    """A metric of each Step, 0 if it has none."""
    return [row.get(name, 0.0) for row in metrics(run)]


def samples(run: Run) -> pa.Table:
    return read_samples(folder_of(run) / "samples")


def steps_recorded(run: Run) -> int:
    """How many Steps have a line in metrics.jsonl, also while the run goes on."""
    lines = folder_of(run) / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.is_file() else 0


def steps_stored(run: Run) -> list[int]:
    """The Steps that have a checkpoint, in order."""
    found = (folder_of(run) / "checkpoints").glob("step_*")
    return sorted(int(path.name.removeprefix("step_")) for path in found)


def weights(run: Run) -> dict[str, bytes]:
    """The bytes of every weight file of the last checkpoint and of the best versions, by path."""
    folder, last = folder_of(run), f"checkpoints/step_{max(steps_stored(run))}"
    files = [*(folder / last).rglob("*.safetensors")]
    files += folder.glob("checkpoints/best_*/step_*/*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def files_in(folder: Path) -> dict[str, bytes]:
    """All files but the lock, by path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def best_names(run: Result) -> dict[str, list[str]]:
    """Evaluate node -> the names of its best versions, the best first."""
    return {node: [path.name for path in paths] for node, paths in run.best.items()}


def differences(ours: Rows, wanted: Rows) -> Iterator[tuple[int, str, Any, Any]]:
    """(Step, metric, found, expected), in the order of the Steps."""
    for one, other in zip(ours, wanted, strict=True):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                yield one["step"], name, one.get(name), other.get(name)


def require_same_numbers(run: Run, wanted: Run, *, but: str = "\0") -> None:
    """The same metrics and weights, to the bit. but: the end of metrics that may differ."""
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.endswith(but)} for row in timeless(metrics(each))]
        for each in (run, wanted)
    )
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert ours == theirs, f"other numbers: {list(differences(ours, theirs))[:9]}"
    mine, others = weights(run), weights(wanted)
    assert mine.keys() == others.keys()
    assert [name for name in mine if mine[name] != others[name]] == []


def require_same_runs(run: Run, wanted: Run) -> None:
    """The same metrics, weights and samples, to the bit."""
    require_same_numbers(run, wanted)
    assert samples(run).equals(samples(wanted))


def require_alike(run: Run, wanted: Run, rel: float = 1e-4) -> None:
    """The same training, Step by Step, except for the last digits."""
    for one, two in zip(metrics(run), metrics(wanted), strict=True):
        learnt = {name: value for name, value in two.items() if _LEARNT.fullmatch(name)}
        assert any(name.endswith("grad_norm") for name in learnt)
        assert {name: one.get(name) for name in learnt} == pytest.approx(learnt, rel=rel)


def require_alike_weights(run: Run, wanted: Run, model: str = "policy") -> None:
    """Weights after a few Steps are the same to 1e-5. Adam divides a gradient by its own size, so
    that of a weight whose gradient is nearly nothing the last bits decide: of a thousand one may
    differ by a hundredth of what weights have moved by (3e-3 in three Steps at 1e-3).
    """
    weights, wanted_weights = (state_of(each.trained[model]) for each in (run, wanted))
    assert weights.keys() == wanted_weights.keys()
    apart, count, most = 0, 0, 0.0
    for name, weight in weights.items():
        distance = (weight - wanted_weights[name]).abs()
        apart += int((distance >= 1e-5).sum())
        count += weight.numel()
        most = max(most, float(distance.max()))
    assert apart <= count / 1000, f"{apart} of {count} weights differ"
    assert most < 3e-5


def state_of(model: Path) -> dict[str, Any]:
    """The tensors of a model directory, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).state_dict()


def require_whole_models(run: Result, base: Path) -> None:
    """The Models of the last checkpoint and the best versions have the shapes of their base."""
    wanted = {name: tensor.shape for name, tensor in state_of(base).items()}
    for path in (*(path for paths in run.best.values() for path in paths), *run.trained.values()):
        assert {name: tensor.shape for name, tensor in state_of(path).items()} == wanted


def require_whole_groups_once(rows: Sequence[dict[str, Any]], prompts: int, answers: int) -> None:
    """Each sampled row of a train node was trained exactly once, and each group in one Step."""
    keys = [(row["position"], row["sample"]) for row in rows]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, f"trained twice: {twice}"
    wanted = [(position, sample) for position in range(prompts) for sample in range(answers)]
    assert sorted(keys) == wanted, "rows are missing"
    steps: dict[int, set[int]] = {}
    for row in rows:
        steps.setdefault(row["position"], set()).add(row["step"])
    split = {position: found for position, found in steps.items() if len(found) > 1}
    assert not split, f"groups in two Steps: {split}"


def require_each_row_once(run: Run, prompts: int, answers: int) -> None:
    """`require_whole_groups_once`, of each train node."""
    rows = samples(run).to_pylist()
    for node in {row["node"] for row in rows}:
        of_node = [row for row in rows if row["node"] == node]
        require_whole_groups_once(of_node, prompts, answers)


def require_none_lost(folder: Path, *, batch: int, answers: int, max_lag: int) -> None:
    """Each row was trained at most once, groups are whole, and what is missing is on its way."""
    rows = samples(folder).to_pylist()
    keys = Counter((row["position"], row["sample"]) for row in rows)
    assert max(keys.values()) == 1, "a row was trained twice"
    groups = Counter(position for position, _ in keys)
    assert set(groups.values()) == {answers}, "a group is not whole"
    assert len(groups) == batch * len(metrics(folder))
    missing = set(range(max(groups))) - groups.keys()
    assert len(missing) <= max_lag * batch, f"lost: {sorted(missing)}"
