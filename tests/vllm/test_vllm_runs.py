"""Whole runs that generate with vLLM: the rows of the torch kernel, with the same bits on any
replica, and after its Worker was killed in the middle of a chunk.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphs.grpo import grpo
from tests.kit.models import save_tiny
from tests.kit.nothing_left import require_nothing_in_shared_memory, shared_memory
from tests.kit.processes import ended, family, ticks, workers
from tests.kit.ray_clusters import QUIET
from tests.kit.rewards import brief
from tests.kit.runs import column, require_each_row_once
from tests.kit.tiny_runs import TinyRuns, save_tiny_inputs
from tests.vllm.conftest import KIND, SHAPE, TENSOR

pytestmark = pytest.mark.skipif(
    KIND == "llama" and TENSOR == 1, reason="the same as with tied embeddings"
)
BOTH = {"rollout": "vllm", "eval_rollout": "vllm"}
ENGINE = {
    "kernel": {"rollout": "vllm"},
    "tensor": {"rollout": TENSOR},
    "workers": "auto",
    "stream": "off",
}
"""Without streamed Steps, which a plan for one engine may have and one for two not: they add up
gradients in another order."""
long_on_two_ranks = pytest.mark.long if TENSOR > 1 else lambda test: test
STEPS = 4
TICKS = 6
"""What a Worker computes before it is killed: a chunk takes more."""
BITS = ("reward/mean", "completion/tokens", "policy/mismatch/mean", "policy/mismatch/max")
"""The mismatch is of every recorded log-prob, in float64: it is equal if they are, to the bit."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_inputs(folder)
    save_tiny(folder / "other", KIND, layers=1, **SHAPE)
    return TinyRuns(folder=folder, runs=folder / "runs")


@pytest.fixture(scope="module")
def whole(tiny: TinyRuns) -> Any:
    """Undisturbed, in two chunks a Step on one engine."""
    return tiny.run(graph_of(tiny), STEPS, name="whole", chunks={"rollout": 2}, **ENGINE)


def graph_of(tiny: TinyRuns, lag: int = 0, **more: Any) -> Any:
    base, data = str(tiny.folder / "other"), str(tiny.folder / "train.parquet")
    # A reward that these answers differ in, so that each Step has other weights.
    return grpo(base, data, brief, n=4, batch=4, max_tokens=64, lr=1e-3, max_lag=lag, **more)


def evaluated(tiny: TinyRuns, lag: int = 0) -> Any:
    """As `graph_of`, with an evaluation in every second Step."""
    return graph_of(tiny, lag, eval_data=str(tiny.folder / "test.parquet"), eval_every=2)


@long_on_two_ranks
def test_a_run_has_the_rows_of_the_torch_kernel(tiny: TinyRuns, whole: Any) -> None:
    its = tiny.run(graph_of(tiny), STEPS, name="torch", workers="auto", chunks={"rollout": 2})
    for name in ("reward/mean", "completion/tokens"):
        assert column(whole, name) == column(its, name), name
    assert max(column(whole, "policy/mismatch_kl")) < 1e-8
    require_each_row_once(whole, 4 * STEPS, 4)


@long_on_two_ranks
def test_two_nodes_of_a_model_share_an_engine(tiny: TinyRuns) -> None:
    """By the command of docs/how-to.md: `--kernel rollout=vllm eval_rollout=vllm`."""
    how = {"workers": "auto", "chunks": {"rollout": 2}}
    tensor = dict.fromkeys(BOTH, TENSOR)
    by_vllm = tiny.run(evaluated(tiny), STEPS, name="shared", kernel=BOTH, tensor=tensor, **how)
    its = tiny.run(evaluated(tiny), STEPS, name="shared-torch", **how)
    names = ("reward/mean", "completion/tokens", "eval/initial/reward", "eval/reward")
    for name in names:
        assert column(by_vllm, name) == column(its, name), name
        assert any(column(by_vllm, name)), name


def test_new_weights_for_one_node_of_an_engine_reach_the_other(tiny: TinyRuns) -> None:
    tensor = dict.fromkeys(BOTH, TENSOR)
    how = {"kernel": BOTH, "tensor": tensor, "workers": "auto", "chunks": {"rollout": 2}}
    ahead = tiny.run(evaluated(tiny, 1), STEPS, name="shared-lag", **how)
    assert ahead.step == STEPS
    assert max(column(ahead, "policy/lag/max")) <= 1
    assert len([reward for reward in column(ahead, "eval/reward") if reward]) == STEPS // 2
    require_each_row_once(ahead, 4 * STEPS, 4)


@pytest.mark.skipif(TENSOR > 1, reason="the same as on one rank")
def test_prompts_are_as_long_as_the_model_takes(tiny: TinyRuns) -> None:
    """Of more tokens than an engine has room for where nobody knows the data."""
    base = save_tiny(
        tiny.folder / "far", KIND, layers=1, **{**SHAPE, "max_position_embeddings": 16384}
    )
    data = tiny.folder / "long.parquet"
    texts = ["a" * 4500, "b", "c" * 4104, "d"]
    pq.write_table(pa.table({"prompt": texts, "answer": ["a"] * len(texts)}), data)
    graph = grpo(base, str(data), brief, n=2, batch=4, max_tokens=8)
    ran = tiny.run(graph, 1, name="long", **ENGINE)
    require_each_row_once(ran, 4, 2)


@pytest.mark.long
@pytest.mark.skipif(TENSOR > 1, reason="four ranks on two cores")
def test_two_engines_give_the_bits_of_one(tiny: TinyRuns, whole: Any) -> None:
    both = tiny.run(graph_of(tiny), STEPS, name="both", replicas={"rollout": 2}, **ENGINE)
    for name in BITS:
        assert column(both, name) == column(whole, name), name
    require_each_row_once(both, 4 * STEPS, 4)


@pytest.mark.skipif(TENSOR > 1, reason="the same as on one rank")
def test_ray_and_vllm_are_in_one_environment(
    tiny: TinyRuns, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `--cluster ray:local --kernel rollout=vllm`: the bits of the run without Ray."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    how = {"chunks": {"rollout": 2}, "cluster": "ray:local"} | ENGINE
    try:
        hosted = tiny.run(graph_of(tiny), STEPS, name="hosted", **how)
    finally:
        ray.shutdown()
    for name in BITS:
        assert column(hosted, name) == column(whole, name), name
    assert json.loads((hosted.folder / "plan.json").read_text())["hosts"]


VICTIMS = ["the Worker", "a rank"] if TENSOR > 1 else ["the Worker"]
NOTICES = 30.0
"""Seconds within which vLLM says that one of its ranks is gone: 9 here."""


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("lag", [TENSOR - 1])
def test_an_engine_that_is_killed_in_a_chunk_loses_no_row_and_leaves_nothing(
    tiny: TinyRuns, request: pytest.FixtureRequest, lag: int, victim: str
) -> None:
    lost: list[int] = []
    gone: list[bool] = []
    before = shared_memory()

    def kill() -> None:
        worker = workers()["rollout"]
        lost.extend(family(worker))
        until = ticks(worker) + TICKS
        while ticks(worker) < until:
            os.sched_yield()
        os.kill(worker if victim == "the Worker" else lost[-1], signal.SIGKILL)
        end = time.monotonic() + (2.0 if victim == "the Worker" else NOTICES)
        gone.extend(ended(process, end - time.monotonic()) for process in lost)

    killer = threading.Thread(target=kill)

    def after(row: Any) -> None:
        if row["step"] == 2:
            killer.start()

    killed = tiny.run(
        graph_of(tiny, lag),
        STEPS,
        name=victim.replace(" ", "-"),
        chunks={"rollout": 2},
        on_step=[after],
        **ENGINE,
    )
    killer.join()
    assert killed.step == STEPS
    assert len(lost) > TENSOR if TENSOR > 1 else len(lost) == 1
    assert gone == [True] * len(lost), "a process outlived its Worker"
    require_nothing_in_shared_memory(before)
    require_each_row_once(killed, 4 * STEPS, 4)
    if not lag:
        whole = request.getfixturevalue("whole")
        for name in BITS:
            assert column(killed, name) == column(whole, name), name
