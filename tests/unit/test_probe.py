"""The log-prob probe: what kernels say, when two sides mean the same, and what is said where they
do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow.batch import Ragged
from dataflow.errors import RunError
from dataflow.kernel import KernelNode, Layout, Piece
from dataflow.loss import Loss
from dataflow.model import Model
from engine.channels.inproc import InprocChannel
from engine.channels.tensors.world import leave, world
from engine.coordinator.messages import Event, Load, Loaded, Offer, Offered, Probed
from engine.plan.plan import ModelUse, Plan, PlannedNode
from engine.run.probes import Probes
from engine.weights.probe import (
    LENGTH,
    ROWS,
    TOLERANCES,
    Ends,
    Tolerance,
    compare,
    probe_rows,
    tolerance_of,
)
from engine.worker.delivery import Delivery
from engine.worker.timing import Timing
from operators import losses
from operators.kernels.torch.forward import TorchLogprobs, TorchValues
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import load_model, load_pieces, pieces
from operators.kernels.torch.probe import probed, vocabulary_of
from operators.kernels.torch.train import TorchTrain
from tests.contracts.ranks import RankPool, client
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.training import PG, term

ENDS = Ends(model="policy", writer="train_policy", reader="rollout", version=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("probe") / "base")


def opened(kernel: Any, param: str, base: str, *, head: Any = "lm", **params: Any) -> Any:
    model = Model("m", base, head=head, trainable=True)
    kernel.open(
        KernelNode(name="n", operator="o", models={param: model}, params=params),
        Layout(),
        FakeSession(),
    )
    return kernel


# --- rows and numbers -----------------------------------------------------------------------------


def test_the_rows_are_the_same_everywhere_and_others_with_another_seed() -> None:
    rows = probe_rows(7, 98)
    assert rows.lengths.tolist() == [LENGTH] * ROWS
    assert rows.values.min() >= 0
    assert rows.values.max() < 98
    assert np.array_equal(rows.values, probe_rows(7, 98).values)
    assert not np.array_equal(rows.values, probe_rows(8, 98).values)


def test_all_kernels_of_a_model_say_the_log_probs_of_transformers(base: str) -> None:
    rows = probe_rows(0, 98)
    module = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.from_numpy(rows.values.reshape(ROWS, LENGTH).astype(np.int64))
    with torch.no_grad():
        logits = module(ids).logits.log_softmax(-1)
    wanted = logits[:, :-1].gather(-1, ids[:, 1:, None]).flatten().numpy()
    for kernel in (
        opened(TorchGenerate(), "policy", base, max_tokens=4, temperature=0.5),
        opened(TorchLogprobs(), "model", base, temperature=0.5),
        opened(TorchTrain(), "model", base, loss=PG, lr=0.1),
    ):
        assert kernel.vocabulary == module.config.vocab_size
        found = kernel.probe(probe_rows(0, 98))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_scalar_head_says_its_values(base: str) -> None:
    train = opened(
        TorchTrain(),
        "model",
        base,
        head="scalar",
        loss=Loss((term(losses.VALUE, clip=None),)),
        lr=0.1,
    )
    reader = opened(TorchValues(), "model", base, head="scalar")
    given = [
        Piece(p.name, torch.ones_like(p.data) if "score" in p.name else p.data)
        for p in pieces(train._module)
    ]
    load_pieces(train._module, given)
    rows = probe_rows(0, train.vocabulary)
    assert np.ptp(train.probe(rows)) > 0
    assert not reader.probe(rows).any()
    reader.load(train.pieces(), 1)
    compare(train.probe(rows), reader.probe(rows), rows, TOLERANCES["float32"], ENDS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tolerance_holds_the_measured_noise_and_finds_a_small_mistake(
    base: str, dtype: Any
) -> None:
    """Other shapes of the same products (row by row), against one layer norm that is not what it
    should be.
    """
    module = load_model(Model("m", base)).to(getattr(torch, dtype))
    rows = probe_rows(1, vocabulary_of(module))
    packed = probed(module, rows, head="lm")
    alone = [probed(module, Ragged(rows[i], np.array([0, LENGTH])), head="lm") for i in range(ROWS)]
    compare(packed, np.concatenate(alone), rows, tolerance_of([dtype]), ENDS)
    with torch.no_grad():
        module.get_parameter("model.norm.weight").mul_(1.3)
    with pytest.raises(RunError, match="to the bit, and says other things"):
        compare(packed, probed(module, rows, head="lm"), rows, tolerance_of([dtype]), ENDS)


def split_probe(rank: int, port: int, base: str) -> tuple[float, bool, int]:
    """Of two ranks that split their weights: how far from one rank's, whether the same again,
    pieces given between.
    """
    train = opened(TorchTrain(), "model", base, loss=PG, lr=0.1)
    rows = probe_rows(0, train.vocabulary)
    group = world(rank, 2, client(port), timeout=20)
    try:
        node = KernelNode(
            name="n",
            operator="o",
            models={"model": Model("m", base)},
            params={"loss": PG, "lr": 0.1},
        )
        split = TorchTrain()
        split.open(node, Layout(data=2, shard=True), FakeSession(rank=rank, world=2, group=group))
        first, given = split.probe(rows), len(list(split.pieces()))
        return (
            float(np.abs(first - train.probe(rows)).max()),
            np.array_equal(first, split.probe(rows)),
            given,
        )
    finally:
        leave()


@pytest.mark.long
def test_split_weights_are_probed_by_all_their_ranks(base: str) -> None:
    ranks = RankPool(2)
    try:
        (off, again, given), other = ranks.do(2, split_probe, base)
    finally:
        ranks.close()
    assert off < 1e-5
    assert again
    assert given > 0
    assert other == (off, True, 0)


# --- the comparison -------------------------------------------------------------------------------


def numbers() -> np.ndarray:
    return np.linspace(-5, -1, ROWS * (LENGTH - 1), dtype=np.float32)


def test_the_worst_token_both_nodes_and_the_version_are_named() -> None:
    rows, other = probe_rows(0, 50), numbers()
    at = 2 * (LENGTH - 1) + 4  # the sixth token of the third row
    other[at] -= 1.0
    with pytest.raises(RunError) as found:
        compare(numbers(), other, rows, Tolerance(1.0, 0.1), ENDS)
    said = str(found.value)
    assert f"token {rows[2][5]} at place 5 of row 2" in said
    assert all(part in said for part in ("train_policy", "rollout", "version 3", "'policy'"))


def test_a_small_shift_of_everything_is_found_by_the_mean() -> None:
    with pytest.raises(RunError, match="in the mean"):
        compare(numbers(), numbers() + 5e-5, probe_rows(0, 50), TOLERANCES["float32"], ENDS)
    assert (
        compare(numbers(), numbers() + 1e-6, probe_rows(0, 50), TOLERANCES["float32"], ENDS)[1]
        < 2e-6
    )


def test_what_is_not_finite_must_be_so_on_both_sides() -> None:
    rows, broken = probe_rows(0, 50), numbers()
    broken[3], broken[4] = np.nan, -np.inf
    assert compare(broken, broken.copy(), rows, TOLERANCES["float32"], ENDS) == (0.0, 0.0)
    for one, other in ((broken, numbers()), (numbers(), broken)):
        with pytest.raises(RunError, match="place"):
            compare(one, other, rows, TOLERANCES["bfloat16"], ENDS)


def test_another_count_of_numbers_is_an_error() -> None:
    with pytest.raises(RunError, match="one number for each token but the first"):
        compare(numbers(), numbers()[:-1], probe_rows(0, 50), TOLERANCES["float32"], ENDS)


def test_the_coarsest_dtype_gives_the_tolerance() -> None:
    assert tolerance_of(["float32", "bfloat16", "int64"]) == TOLERANCES["bfloat16"]
    assert tolerance_of(["int64"]) == tolerance_of([]) == TOLERANCES["float32"]


# --- on its way -----------------------------------------------------------------------------------


def delivery(writer: Any, reader: Any) -> Delivery:
    """Both ends in one channel, as if they were two Workers'."""
    use = ModelUse(param="policy", model="m", access="read", trained=True, module="copy")
    nodes = tuple(
        PlannedNode(
            name=n,
            operator="o",
            work="decode",
            scope="row",
            region="stream",
            relation="same",
            models=(use,),
        )
        for n in ("train", "rollout")
    )
    plan = Plan(graph="g", digest="", seed=5, nodes=nodes, sources=())
    return Delivery(plan, {"train": writer, "rollout": reader}, InprocChannel(), Timing("w"))


def publish(ends: Delivery) -> list[Event]:
    """What both ends tell of one version, until the reader has said its numbers."""
    offered, said = ends.offer(
        Offer(id=0, model="m", writer="train", worker="w", version=1), first=True
    )
    assert isinstance(offered, Offered)
    message = Load(
        id=1, model="m", writer="train", reader="rollout", version=1, worker="w", source="w",
        block=offered.block, digest=offered.digest,
    )  # fmt: skip
    return [said, *ends.bring(message), *ends.settle()]


def test_a_reader_that_says_other_things_with_the_same_weights_stops_the_run(
    base: str, tmp_path: Path
) -> None:
    writer = opened(TorchTrain(), "model", base, loss=PG, lr=0.1)
    other = save_tiny(tmp_path / "other", seed=9)
    reader = opened(TorchGenerate(), "policy", other, max_tokens=4)
    said, loaded, answered = publish(delivery(writer, reader))
    assert isinstance(loaded, Loaded)
    assert isinstance(said, Probed)
    assert isinstance(answered, Probed)
    for order in ([said, answered], [answered, said], [said, answered, answered]):
        probes = Probes(5)
        for one in order:
            probes.hear(one)
    # The same names and shapes, and another meaning: an attention that turns positions with another
    # base.
    odd = opened(
        TorchGenerate(), "policy", save_tiny(tmp_path / "odd", rope_theta=20.0), max_tokens=4
    )
    told = [one for one in publish(delivery(writer, odd)) if isinstance(one, Probed)]
    for order in (told, told[::-1]):
        probes = Probes(5)
        probes.hear(order[0])
        with pytest.raises(RunError, match=r"rollout has version 1 of train.*says other things"):
            probes.hear(order[1])


def test_only_numbers_of_one_version_are_compared() -> None:
    probes = Probes(0)
    for version, reads in ((1, False), (2, True), (3, False)):
        probes.hear(said_of(version, numbers() + version, reads=reads))
    with pytest.raises(RunError, match="version 2 of train_policy"):
        probes.hear(said_of(2, numbers(), reads=False))


def said_of(version: int, says: np.ndarray, *, reads: bool) -> Probed:
    node = "rollout" if reads else "train_policy"
    dtypes = () if reads else ("float32",)
    return Probed(
        node=node,
        model="m",
        version=version,
        reads=reads,
        numbers=says.tobytes(),
        vocabulary=50,
        dtypes=dtypes,
    )
