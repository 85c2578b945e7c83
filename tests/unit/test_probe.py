"""The log-prob probe: the kernels' numbers, and whether two sides agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow.batch import Ragged
from dataflow.errors import RunError
from dataflow.model import Model
from engine.channels.inproc import InprocChannel
from engine.channels.tensors.world import leave, world
from engine.plan.plan import ModelUse
from engine.protocol.messages import Load, Offer, Probed
from engine.run.loop.probes import Probes
from engine.run.worker.timing import Timing
from engine.run.worker.weight_delivery import Delivery
from engine.weights import probe
from operators import losses
from operators.kernels.torch.forward import TorchLogprobs, TorchValues
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import load_model
from operators.kernels.torch.probe import compute_probe, vocabulary_of
from operators.kernels.torch.train import TorchTrain
from tests.contracts.ranks import RankPool, client
from tests.kit.kernels import FakeSession, open_kernel
from tests.kit.models import save_tiny
from tests.kit.plans import plan_of, planned_node
from tests.kit.training import PG, loss_of
from tests.kit.training import opened as opened_train

ENDS = probe.Ends(model="policy", writer="train_policy", reader="rollout", version=3)


def opened(kernel: Any, base: str, *, head: Any = "lm", **params: Any) -> Any:
    return open_kernel(kernel, Model("m", base, head=head, trainable=True), **params)


def test_the_rows_are_the_same_everywhere_and_others_with_another_seed() -> None:
    rows = probe.probe_rows(7, 98)
    assert rows.lengths.tolist() == [probe.LENGTH] * probe.ROWS
    assert 0 <= rows.values.min() <= rows.values.max() < 98
    assert np.array_equal(rows.values, probe.probe_rows(7, 98).values)
    assert not np.array_equal(rows.values, probe.probe_rows(8, 98).values)


def test_all_kernels_of_a_model_say_the_log_probs_of_transformers(base: str) -> None:
    rows = probe.probe_rows(0, 98)
    module = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.from_numpy(rows.values.reshape(probe.ROWS, probe.LENGTH).astype(np.int64))
    with torch.no_grad():
        logits = module(ids).logits.log_softmax(-1)
    wanted = logits[:, :-1].gather(-1, ids[:, 1:, None]).flatten().numpy()
    for kernel in (
        opened(TorchGenerate(), base, max_tokens=4, temperature=0.5),
        opened(TorchLogprobs(), base, temperature=0.5),
        opened(TorchTrain(), base, loss=PG, lr=0.1),
    ):
        assert kernel.vocabulary == module.config.vocab_size
        says = kernel.probe(rows)
        assert says.dtype == np.float32
        np.testing.assert_allclose(says, wanted, atol=2e-5)


def test_a_scalar_head_says_its_values(base: str) -> None:
    value = loss_of(losses.VALUE, clip=None)
    train = opened(TorchTrain(), base, head="scalar", loss=value, lr=0.1)
    reader = opened(TorchValues(), base, head="scalar")
    torch.nn.init.ones_(train._module.get_parameter("score.weight"))
    torch.nn.init.ones_(train._module.get_parameter("score.bias"))
    rows = probe.probe_rows(0, train.vocabulary)
    assert np.ptp(train.probe(rows)) > 0
    assert not reader.probe(rows).any()
    reader.load(train.pieces(), 1)
    probe.compare_probes(
        train.probe(rows), reader.probe(rows), rows, probe.TOLERANCES["float32"], ENDS
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tolerance_holds_the_noise_and_finds_a_small_mistake(base: str, dtype: Any) -> None:
    """The same products in other shapes (row by row), against one layer norm that is wrong."""
    module = load_model(Model("m", base)).to(getattr(torch, dtype))
    rows = probe.probe_rows(1, vocabulary_of(module))
    packed = compute_probe(module, rows, head="lm")
    alone = [
        compute_probe(module, Ragged(rows[i], np.array([0, probe.LENGTH])), head="lm")
        for i in range(probe.ROWS)
    ]
    probe.compare_probes(packed, np.concatenate(alone), rows, probe.tolerance_of([dtype]), ENDS)
    with torch.no_grad():
        module.get_parameter("model.norm.weight").mul_(1.3)
    with pytest.raises(RunError, match="bit for bit, but computes other log-probs"):
        probe.compare_probes(
            packed, compute_probe(module, rows, head="lm"), rows, probe.tolerance_of([dtype]), ENDS
        )


def split_probe(rank: int, port: int, base: str) -> tuple[float, bool, int]:
    """Two ranks that split weights: distance to one rank, same again, pieces given between."""
    train = opened(TorchTrain(), base, loss=PG, lr=0.1)
    rows = probe.probe_rows(0, train.vocabulary)
    session = FakeSession(rank=rank, world=2, group=world(rank, 2, client(port), timeout=20))
    try:
        split = opened_train(base, PG, session=session, shard=True, lr=0.1)
        first, given = split.probe(rows), len(list(split.pieces()))
        off = float(np.abs(first - train.probe(rows)).max())
        return off, np.array_equal(first, split.probe(rows)), given
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


def numbers() -> np.ndarray:
    return np.linspace(-5, -1, probe.ROWS * (probe.LENGTH - 1), dtype=np.float32)


def compared(one: np.ndarray, other: np.ndarray, dtype: str = "float32") -> tuple[float, float]:
    """The largest difference and that of the means, of rows over 50 tokens."""
    return probe.compare_probes(one, other, probe.probe_rows(0, 50), probe.TOLERANCES[dtype], ENDS)


def test_the_worst_token_both_nodes_and_the_version_are_named() -> None:
    rows, other = probe.probe_rows(0, 50), numbers()
    other[2 * (probe.LENGTH - 1) + 4] -= 1.0  # the sixth token of the third row
    with pytest.raises(RunError, match=rf"token {rows[2][5]} at place 5 of row 2") as caught:
        probe.compare_probes(numbers(), other, rows, probe.Tolerance(1.0, 0.1), ENDS)
    told = str(caught.value)
    assert all(part in told for part in ("train_policy", "rollout", "version 3", "'policy'"))


def test_a_shift_of_everything_is_found_by_the_mean_and_noise_is_not() -> None:
    with pytest.raises(RunError, match="on average"):
        compared(numbers(), numbers() + 5e-5)
    assert compared(numbers(), numbers() + 1e-6)[1] < 2e-6


def test_what_is_not_finite_must_be_so_on_both_sides() -> None:
    broken = numbers()
    broken[3], broken[4] = np.nan, -np.inf
    assert compared(broken, broken.copy()) == (0.0, 0.0)
    for one, other in ((broken, numbers()), (numbers(), broken)):
        with pytest.raises(RunError, match="place"):
            compared(one, other, "bfloat16")


def test_another_count_of_numbers_is_an_error() -> None:
    with pytest.raises(RunError, match="one number for each token but the first"):
        compared(numbers(), numbers()[:-1])


def test_the_coarsest_dtype_gives_the_tolerance() -> None:
    assert probe.tolerance_of(["float32", "bfloat16", "int64"]) == probe.TOLERANCES["bfloat16"]
    assert probe.tolerance_of(["int64"]) == probe.tolerance_of([]) == probe.TOLERANCES["float32"]


def publish(writer: Any, reader: Any) -> list[Probed]:
    """The numbers of both ends for one version: the writer's, then the reader's. Both are in one
    channel, as if they were two Workers'.
    """
    use = ModelUse(param="policy", model="m", access="read", trained=True, module="copy")
    nodes = (planned_node(name, work="decode", models=(use,)) for name in ("train", "rollout"))
    kernels = {"train": writer, "rollout": reader}
    ends = Delivery(plan_of(*nodes, seed=5), kernels, InprocChannel(), Timing("w"))
    offer = Offer(id=0, model="m", writer="train", worker="w", version=1)
    offered, said = ends.offer(offer, first=True)
    message = Load(
        id=1, model="m", writer="train", reader="rollout", version=1, worker="w", source="w",
        block=offered.block, digest=offered.digest,
    )  # fmt: skip
    events = [said, *ends.bring(message), *ends.settle()]
    return [event for event in events if isinstance(event, Probed)]


def heard(*messages: Probed) -> None:
    probes = Probes(5)
    for message in messages:
        probes.hear(message)


def test_a_reader_that_says_other_things_with_the_same_weights_stops_the_run(
    base: str, tmp_path: Path
) -> None:
    writer = opened(TorchTrain(), base, loss=PG, lr=0.1)
    other = save_tiny(tmp_path / "other", seed=9)
    published, answered = publish(writer, opened(TorchGenerate(), other, max_tokens=4))
    heard(published, answered)
    heard(answered, published)
    heard(published, answered, answered)
    # The same names and shapes, and another meaning: attention turns positions with another base.
    odd = opened(TorchGenerate(), save_tiny(tmp_path / "odd", rope_theta=20.0), max_tokens=4)
    published, answered = publish(writer, odd)
    message = r"rollout has version 1 of train.*computes other log-probs"
    for order in ((published, answered), (answered, published)):
        with pytest.raises(RunError, match=message):
            heard(*order)


def test_only_numbers_of_one_version_are_compared() -> None:
    probes = Probes(0)
    for version, reads in ((1, False), (2, True), (3, False)):
        probes.hear(said_of(version, numbers() + version, reads=reads))
    with pytest.raises(RunError, match="version 2 of train_policy"):
        probes.hear(said_of(2, numbers(), reads=False))


def said_of(version: int, says: np.ndarray, *, reads: bool) -> Probed:
    node, dtypes = ("rollout", ()) if reads else ("train_policy", ("float32",))
    return Probed(
        node=node,
        reads=reads,
        numbers=says.tobytes(),
        dtypes=dtypes,
        model="m",
        version=version,
        vocabulary=50,
    )
