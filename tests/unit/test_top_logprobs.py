"""The k most likely tokens: schema, column, kernel, and training that reads them."""

from __future__ import annotations

import pickle
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from dataflow import schema, top_logprobs
from dataflow.batch import Batch, Ragged
from dataflow.check import check
from dataflow.errors import DataError, GraphError, KernelError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss, loss_function
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Advantage, Logprobs, Rollout
from dataflow.top_logprobs import TopLogprobs
from engine.plan.explain import explain
from operators.advantage import kl_in_reward, returns
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.kernels.torch import heads, loss_backward
from operators.kernels.torch.forward import TorchLogprobs
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk
from tests.kit.plans import headers, planned
from tests.kit.rewards import exact
from tests.kit.rows import padded_logits, plain, random_rows
from tests.kit.training import assignment, loss_of, opened

TOPS = ("logprobs", "top_ids", "top_logprobs")


def scored(base: str, rows: Batch, k: int, returns: tuple[str, ...] = TOPS, **params: Any) -> Batch:
    kernel = open_kernel(TorchLogprobs(), base, returns=returns, top_k=k, **params)
    (batch,) = kernel.run(rows_chunk(rows))
    return batch


def truth(base: str, rows: Batch, temperature: float = 1.0) -> Tensor:
    """[tokens, vocabulary]: log-probs, from one padded forward of transformers."""
    with torch.no_grad():
        return (torch.cat(padded_logits(plain(base), rows)) / temperature).log_softmax(-1)


def test_each_number_of_tokens_has_one_schema_that_its_name_finds() -> None:
    eight = TopLogprobs.of(8)
    assert eight is TopLogprobs.of(8) is top_logprobs.TopLogprobs8
    assert pickle.loads(pickle.dumps(eight)) is eight
    assert issubclass(eight, TopLogprobs)
    assert not issubclass(eight, TopLogprobs.of(4))
    assert "top_ids: 8 ints per completion token" in eight.describe()
    for name in ("TopLogprobs0", "TopLogprobs08", "TopLogprobs999999999", "TopLogprobsTrue"):
        with pytest.raises(AttributeError, match=name):
            getattr(top_logprobs, name)


def test_a_list_of_any_length_may_become_one_of_a_fixed_length_and_nothing_else() -> None:
    wrong = {
        "wider": pa.list_(pa.int64(), 4),
        "shorter": pa.int32(),
        "float": pa.list_(pa.float32(), 4),
    }
    for name, kind in wrong.items():
        with pytest.raises(GraphError, match=r"has 'top_ids' as .*another name"):
            type(name, (TopLogprobs,), {"top_ids": schema.column(kind, "T")})


def test_values_that_are_lists_are_rows_of_a_matrix_and_not_copied() -> None:
    values, rows = np.arange(12, dtype=np.int32).reshape(6, 2), random_rows(1, 3)
    columns = {"top_ids": Ragged(values, np.array([0, 2, 2, 6]))}
    made = Batch.make(rows.keys, columns, TopLogprobs.of(2))
    assert made.array("top_ids").type.value_type == pa.list_(pa.int32(), 2)
    found = made.ragged("top_ids")
    assert np.shares_memory(found.values, values)
    assert found[2].tolist() == values[2:].tolist()
    last = made.take(np.array([2, 0])).ragged("top_ids")
    assert last.values.tolist() == [*values[2:].tolist(), *values[:2].tolist()]
    sliced = Batch(rows.keys.take(np.array([1, 2])), made.records.slice(1))
    assert sliced.ragged("top_ids").values.tolist() == values[2:].tolist()
    wanted = r"'top_ids': expected values of .*\[3\], found .*\[2\]\. Fix: an array \[values, 3\]"
    with pytest.raises(DataError, match=wanted):
        Batch.make(rows.keys, columns, TopLogprobs.of(3))


@pytest.fixture(params=[None, 98 * 4], ids=["whole", "in chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits at once, and of a few tokens at a time."""
    if request.param:
        monkeypatch.setattr(heads, "CHUNK", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("k", [1, 5, 98])
def test_the_kernel_tells_the_most_likely_tokens(base: str, k: int) -> None:
    rows = random_rows(3, 3)
    found, wanted = scored(base, rows, k, temperature=0.7), truth(base, rows, 0.7)
    best, ids = wanted.topk(k, dim=-1)
    np.testing.assert_allclose(found.ragged("top_logprobs").values, best.numpy(), atol=2e-5)
    said = torch.from_numpy(found.ragged("top_ids").values.astype(np.int64))
    assert ((said == ids) | ((wanted.gather(1, said) - best).abs() < 1e-5)).all()
    plainly = scored(base, rows, 0, temperature=0.7).ragged("logprobs").values
    np.testing.assert_allclose(found.ragged("logprobs").values, plainly, atol=1e-6)


def test_tops_that_nobody_reads_are_not_made_and_those_beyond_the_vocabulary_are_refused(
    base: str,
) -> None:
    rows = random_rows(2, 2)
    assert scored(base, rows, 4, returns=("logprobs",)).names == ["logprobs"]
    assert scored(base, rows, 4).array("top_ids").type.value_type == pa.list_(pa.int32(), 4)
    told = r"expected top_k of at most the 98 tokens .* found 99\. Fix: top_k=98"
    with pytest.raises(KernelError, match=told):
        scored(base, rows, 99)


def test_tops_are_built_where_other_workers_read_them(base: str) -> None:
    class OutboxSession(FakeSession):
        def allocate(self, count: int, dtype: Any) -> np.ndarray:
            given.append(super().allocate(count, dtype))
            return given[-1]

    given: list[np.ndarray] = []
    found = scored(base, random_rows(2, 2), 3, session=OutboxSession())
    for name in TOPS:
        assert any(np.shares_memory(found.ragged(name).values, memory) for memory in given), name


def watching(seen: list[tuple[Now, Tensor]]) -> Any:
    def f(now: Now, teacher: Tensors[TopLogprobs]) -> Terms:
        seen.append((now, teacher["top_ids"].long()))
        return Terms(now.at_ids.exp().square().sum(-1))

    return loss_function(f, name="watching", ids=("teacher", "top_ids"))


def two_terms(seen: list[tuple[Now, Tensor]]) -> Loss:
    function = watching(seen)
    first, second = loss_of(function, label="one"), loss_of(function, label="two", weight=0.5)
    return first + second


def tops(rows: Batch, k: int, seed: int) -> Batch:
    """Random teachers' tokens."""
    ids = rows.ragged("completion_ids")
    found = np.random.default_rng(seed).integers(0, 98, (len(ids.values), k)).astype(np.int32)
    logprobs = np.full(found.shape, -4.0, np.float32)
    columns = {"top_ids": ids.like(found), "top_logprobs": ids.like(logprobs)}
    return Batch.make(rows.keys, columns, TopLogprobs.of(k))


@pytest.mark.usefixtures("chunks")
def test_each_term_sees_its_own_ids_of_one_forward_with_gradient(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Mock(wraps=loss_backward.predictions)
    monkeypatch.setattr(loss_backward, "predictions", forward)
    rows, seen = random_rows(3, 3), []
    kernel = opened(base, two_terms(seen), temperature=0.7, lr=1e-30, clip_norm=1e9)
    step = assignment(rows, one__teacher=tops(rows, 5, 1), two__teacher=tops(rows, 2, 2))
    norm = kernel.step(step)["optim/grad_norm"]
    assert forward.call_count == 1
    module = plain(base)
    all_logprobs = (torch.cat(padded_logits(module, rows)) / 0.7).log_softmax(-1)
    asked = torch.from_numpy(tops(rows, 5, 1).ragged("top_ids").values.copy()).long()
    place = (seen[0][1][:, None] == asked).all(-1).nonzero()[:, 1]  # random ids tell tokens apart
    assert len(place) == len(seen[0][1])
    total = torch.zeros(())
    for (now, ids), weight in zip(seen, (1.0, 0.5), strict=True):
        assert now.vocabulary == 98
        at = all_logprobs[place].gather(1, ids)
        torch.testing.assert_close(now.at_ids.detach(), at.detach(), atol=2e-5, rtol=0)
        total = total + weight * (at.exp().square().sum(-1) * now.mask).sum() / now.mask.sum()
    total.backward()
    expected = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(expected.norm()), rel=1e-4)


def test_ids_that_the_model_does_not_know_are_refused(base: str) -> None:
    rows = random_rows(2, 2)
    for wrong, message in (
        (98, "below the 98 that Model 'policy' knows, found 98"),
        (-1, "found -1"),
    ):
        ids = tops(rows, 3, 1).ragged("top_ids")
        changed = ids.values.copy()
        changed[-1, -1] = wrong
        other = Batch.make(rows.keys, {"top_ids": ids.like(changed)}, TopLogprobs.of(3))
        kernel = opened(base, loss_of(watching([]), label="one"))
        with pytest.raises(DataError, match=rf"row \(11, 1, 0\): expected token ids .*{message}"):
            kernel.step(assignment(rows, one__teacher=other))


@loss(ids=("teacher", "top_ids"))
def likely(now: Now, teacher: Tensors[TopLogprobs]) -> Terms:
    """A user's own: the log-prob of what the teacher finds likeliest."""
    return Terms(-now.at_ids[:, 0])


def taught(k: int) -> tuple[Model, Port[Rollout], Port[Any]]:
    """A policy, its answers, and what a teacher says of these."""
    policy = Model("policy", "tiny", trainable=True)
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    return policy, rollout, logprobs(Model("teacher", "tiny"), rollout, top_k=k)


def graph(k: int = 16) -> Graph:
    policy, rollout, teacher = taught(k)
    return Graph("g", train(policy, rollout, loss=likely(teacher), lr=1e-6))


def test_ids_must_be_a_port_and_its_column_of_ids() -> None:
    def f(now: Now, teacher: Tensors[TopLogprobs], advantage: Tensors[Advantage]) -> Terms:
        raise AssertionError(now, teacher, advantage)

    def g(now: Now, teacher: Tensors[Logprobs]) -> Terms:
        raise AssertionError(now, teacher)

    told = r"loss f: expected ids to be a port and its column.*Fix: ids=\('teacher', 'top_ids'\)"
    for wrong in (("teacher",), ("teacher", "top_logprobs"), ("advantage", "advantage"), "teacher"):
        with pytest.raises(GraphError, match=told):
            loss(ids=wrong)(f)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"Fix: teacher: Tensors\[TopLogprobs\]"):
        loss(ids=("teacher", "logprobs"))(g)


def test_explain_shows_what_tops_cost_and_projection_drops_them_unread(tiny: None) -> None:
    found = planned(graph(16))
    (edge,) = (e for e in found.edges if e.producer == "teacher")
    assert edge.columns == ("logprobs", "top_ids", "top_logprobs")
    answer = 3 * 8 + 8 * 4 * (1 + 16 + 16)  # offsets, then 8 tokens of 4 bytes each
    assert edge.bytes == 4 * 2 * answer
    assert "top_ids, top_logprobs" in explain(found)
    held, less = (planned(graph(k)).node("train_policy").estimate.bytes for k in (16, 8))
    assert held["logits"] - less["logits"] == 64 * 8 * 24
    policy, rollout, teacher = taught(16)
    shaped = kl_in_reward(rollout, reward(exact, rollout), teacher, beta=0.1)
    trained = clipped_policy_loss(returns(rollout, shaped))
    unread = planned(Graph("g", train(policy, rollout, loss=trained, lr=1e-6, epochs=2)))
    assert unread.node("teacher").returns == ("logprobs",)


def test_the_check_knows_how_many_tokens_a_model_has(tiny: None) -> None:
    with pytest.raises(GraphError, match=r"at most the 98 tokens .*found 99\. Fix: top_k=98"):
        check(graph(99), headers)
    check(graph(98), headers)
    for wrong in (-1, 2.0, True, 1 << 25):
        with pytest.raises(GraphError, match=r"top_k"):
            check(graph(wrong), headers)  # type: ignore[arg-type]
