"""Whole runs in which memory runs out: their rows are those of a run that had enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.errors import KernelError, RunError
from dataflow.graph import Graph
from engine.api import rerun, resume
from engine.keep.memory_file import read_memory
from graphs.grpo import grpo
from operators.kernels.torch import forward
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.loss_backward import LossBackward
from tests.kit.forked import forking
from tests.kit.run_graphs import small, vowels
from tests.kit.runs import column, require_alike, samples
from tests.kit.short_graphs import ROOM, hungry_graph, limit_memory, take
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(180)]

STEPS = 2
TWO_RANKS: dict[str, Any] = {"ranks": {"train_policy": 2}, "pin": {"rollout": "gen"}}


def with_reference(folder: Path) -> Graph:
    base, rows = str(folder / "model"), str(folder / "train.parquet")
    size: dict[str, int] = {"n": 4, "batch": 4, "max_tokens": 6, "minibatches": 2}
    return grpo(base, rows, vowels, lr=1e-3, beta=0.1, **size)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A call of a kernel; how many rows it is of, and for how many there is memory."""

    owner: Any
    name: str
    count: Callable[..., int]
    most: int


def _count_slots(decoder: Decoder) -> int:
    return len(decoder._step.rows)


def _count_packed(module: Any, packed: Any, *others: Any) -> int:
    return len(packed.rows)


def _count_rows(backward: Any, update: Any, part: Any, rows: Any, turns: Any) -> int:
    return len(rows)


SITES = (
    Site(owner=Decoder, name="_advance", count=_count_slots, most=3),
    Site(owner=forward, name="predictions", count=_count_packed, most=5),
    Site(owner=LossBackward, name="run", count=_count_rows, most=2),
)


def take_memory(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a call take as much for each row as leaves room for `most`."""
    call = getattr(site.owner, site.name)

    def hungry(*args: Any, **kwargs: Any) -> Any:
        scratch = take(ROOM // (site.most + 1) * site.count(*args))
        returned = call(*args, **kwargs)
        del scratch
        return returned

    monkeypatch.setattr(site.owner, site.name, hungry)


def run_limited(tiny: TinyRuns) -> None:
    """In a process of its own, whose memory is limited for good."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for site in SITES:
            take_memory(site, monkeypatch)
        torch.set_num_threads(1)
        limit_memory()
        tiny.run(with_reference, STEPS, name="short", inproc=True)


def test_a_run_with_less_memory_trains_the_same_rows(tiny: TinyRuns) -> None:
    """Decoding, log-probs and training all run out."""
    usual = tiny.run(with_reference, STEPS, name="usual", inproc=True)
    process = forking().Process(target=run_limited, args=(tiny,))
    process.start()
    process.join(120.0)
    assert process.exitcode == 0
    short = tiny.runs / "short"
    require_alike(short, usual)
    same = ["position", "sample", "completion"]
    assert samples(short).select(same).equals(samples(usual).select(same))
    for node in ("rollout", "reference", "train_policy"):
        first, *later = column(short, f"short/{node}")
        assert first > 0
        assert later == [0.0] * (STEPS - 1)  # what was lowered stays so


@pytest.mark.parametrize(
    ("shard", "in_forward"),
    [(False, False), (True, False), (True, True)],
    ids=["whole", "split", "split in a forward"],
)
def test_a_rank_that_is_short_behind_the_first_update_ends_no_run(
    tiny: TinyRuns, shard: bool, in_forward: bool
) -> None:
    """The other rank is, or will be, in a collective. Both go on behind the first update; but from
    the last checkpoint where one fails in the forward of split weights, which is a collective. No
    update is made twice.
    """
    options = TWO_RANKS | {"shard": shard, "checkpoint_every": 1}
    enough = tiny.run(hungry_graph, STEPS, name="enough", **options)
    call = 2 if in_forward else 1  # from when on: the second update of a Step
    graph = partial(hungry_graph, rank=1, call=call, in_forward=in_forward)
    short = tiny.run(graph, STEPS, name="short", **options)
    require_alike(short, enough)
    assert column(short, "optim/updates") == [2.0] * STEPS
    if not in_forward:  # else the Step begins anew, with limits that were lowered before
        assert column(short, "short/train_policy")[0] > 0


def test_the_run_ends_when_a_single_row_has_no_room(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(decoder: Decoder) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "_advance", short)
    wanted = r"rollout: expected room for decoding 1 rows at once, of which row \(\d+, \d+, 0\) has"
    with pytest.raises(RunError, match=wanted):
        tiny.run(with_reference, STEPS, inproc=True)


@pytest.mark.parametrize("call", ["open", "load"])
def test_weights_without_room_end_the_run_with_one_error(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As the base is loaded, or a version; nothing can be taken at once less of."""

    def short(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TorchGenerate, call, short)
    wanted = rf"rollout: {call}.*: its memory ran out, of which its process had .*2\.00 GiB\. Fix:"
    with pytest.raises(KernelError, match=wanted):
        tiny.run(partial(small, max_lag=1), STEPS, inproc=True)


def test_a_rerun_has_the_limits_that_were_lowered(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a resume has them, too: its memory does not run out again."""
    with monkeypatch.context() as limited:
        for site in SITES:
            fail_above(site, limited)
        until = tiny.run(with_reference, STEPS, inproc=True, record="all")
        memory = read_memory(until.folder)
        assert memory.keys() == {"rollout", "reference", "train_policy"}
        assert memory["rollout"].limits.slots <= SITES[0].most
        again = resume(until.folder, steps=STEPS + 1)
        assert column(again, "short/rollout")[STEPS:] in ([], [0.0])
        plan = json.loads((until.folder / "plan.json").read_text())
        slots = {node["name"]: node["layout"]["slots"] for node in plan["nodes"]}
        assert slots["rollout"] == memory["rollout"].limits.slots
    for node in memory:
        same = rerun(until.folder, [node], STEPS)
        assert same.same, f"{node}: {same.nodes}"


def fail_above(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a call of more rows than this say that memory ran out, as torch does on a GPU."""
    call = getattr(site.owner, site.name)

    def limited(*args: Any, **kwargs: Any) -> Any:
        if site.count(*args) > site.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        return call(*args, **kwargs)

    monkeypatch.setattr(site.owner, site.name, limited)


def test_with_few_live_tokens_the_intake_waits_and_the_run_ends(tiny: TinyRuns) -> None:
    """Of a lag of 3 one Step is outstanding, as its own rows have more tokens than that."""
    how: dict[str, Any] = {"workers": "apart", "live_tokens": 1}
    run = tiny.run(partial(small, max_lag=3), 4, **how)
    assert column(run, "step") == [1.0, 2.0, 3.0, 4.0]
    assert column(run, "intake/held_back") == [3 * 4.0] * 4
    assert column(run, "policy/lag/max") == [0.0] * 4
    assert max(column(run, "intake/live_tokens")) > 1
