"""Failures of a run name file, line and node as the check does, with the user's traceback."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dataflow.errors import (
    DataError,
    DataflowError,
    Fault,
    GraphError,
    KernelError,
    Origin,
    RunError,
)
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Advantage, Prompt
from dataflow.user import Columns, operator
from engine import api
from engine.channels.contract import PeerLost
from engine.cli.target import UsageError
from engine.keep.reader.open_folder import NotServed
from engine.protocol.workers import WorkerGone
from engine.run.hosts.link import HostLost
from engine.run.worker.timing import Timing
from operators.data import prompts
from operators.generate import generate
from operators.losses import supervised_loss
from operators.train import train
from tests.kit.files import save_jsonl
from tests.kit.rows import random_rows, token_column
from tests.kit.training import assignment, loss_of, opened

HERE = Path(__file__).name


def line_of(text: str) -> int:
    """The one line of this file that holds this text."""
    numbered = enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), start=1)
    (only,) = [n for n, line in numbered if text in line and "line_of(" not in line]
    return only


# Operators, in a Worker


@operator()
def divided(prompt: Columns[Prompt]) -> Columns[Prompt]:
    """Raises."""
    return prompt.set(prompt=[f"{1 // 0}" for _ in prompt["prompt"]])


@operator()
def misread(prompt: Columns[Prompt]) -> Columns[Prompt]:
    """Reads a column that is not there."""
    return prompt.set(prompt=prompt["promt"])


@operator()
def shortened(prompt: Columns[Prompt]) -> Columns[Prompt]:
    """Forgets rows."""
    return Columns.make(Prompt, prompt=prompt["prompt"][:1])


@pytest.mark.parametrize(("use", "told"), [
    (lambda p: divided(p), "ZeroDivisionError"),  # line of divided
    (lambda p: misread(p), "promt"),  # line of misread
    (lambda p: shortened(p), "it returned 1 rows for 2"),  # line of shortened
], ids=["raises", "misreads", "forgets"])  # fmt: skip
def test_a_users_operator_that_fails_is_named_with_its_line(
    use: Callable[[Port[Prompt]], Port[Prompt]], told: str, tmp_path: Path
) -> None:
    """Its graph ends in a train node, whose model is never opened."""
    port = use(prompts(save_jsonl(tmp_path / "train.jsonl", *[{"prompt": "2+2"}] * 4), batch=2))
    policy = Model("policy", "owner/no-such-model", trainable=True)
    learns = train(policy, generate(policy, port, max_tokens=4), loss=supervised_loss(), lr=1e-6)
    name = port.node.name
    with pytest.raises(KernelError) as caught:
        api.peek(Graph("g", learns), name, rows=2)
    message = str(caught.value)
    line = line_of(f"# line of {name}")
    assert message.startswith(f"{HERE}:{line} {name}: operator {name!r} failed on"), message
    assert told in message
    if told == "ZeroDivisionError":
        assert f'{HERE}", line {line_of("1 // 0")}, in divided' in message


# Whatever leaves a kernel


def wrapped(error: Exception, *, origin: bool = True) -> Exception:
    """An error of a kernel as it leaves the node."""
    line = Origin(file="graphs/grpo.py", line=14) if origin else None
    timing = Timing("main", lambda node: line)
    with pytest.raises(Exception) as caught, timing.during("score", "chunk 3, 2 rows"):
        raise error
    return caught.value


@pytest.mark.parametrize(("said", "shown"), [
    ("score: no reward", "grpo.py:14 score: no reward"),
    ("node 'score': no reward", "grpo.py:14 node 'score': no reward"),
    ("loss x: shape", "grpo.py:14 score: loss x: shape"),
    ("grpo.py:14 score: told already", "grpo.py:14 score: told already"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [KernelError, RunError])
def test_errors_of_ours_get_the_line_and_stay_what_they_are(
    kind: type[Exception], said: str, shown: str
) -> None:
    error = kind(said)
    assert wrapped(error) is error
    assert str(error) == shown


def test_errors_of_others_become_ours_with_their_traceback() -> None:
    error = wrapped(ValueError("odd"))
    assert isinstance(error, KernelError)
    told = "grpo.py:14 score: chunk 3, 2 rows: raised ValueError: odd. Fix: see the traceback.\n"
    assert str(error).startswith(told)
    assert "in wrapped" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(("error", "origin", "shown"), [
    (DataError("row 3 is odd"), True, "grpo.py:14 score: chunk 3, 2 rows: row 3 is odd"),
    (DataError("row 3 is odd"), False, "score: chunk 3, 2 rows: row 3 is odd"),
    (KernelError("score: bad"), False, "score: bad"),
])  # fmt: skip
def test_data_that_does_not_fit_and_nodes_without_a_line(
    error: Exception, origin: bool, shown: str
) -> None:
    assert str(wrapped(error, origin=origin)) == shown


def test_a_lost_peer_is_still_known_as_one() -> None:
    lost = PeerLost("gen", "is gone")
    assert wrapped(lost) is lost


# Losses


def failed(base: str, fn: Any) -> str:
    """What a step under this loss fails with."""
    rows = random_rows(2, 2)
    function = loss_function(fn, name="mine")
    kernel = opened(base, loss_of(function))
    ports = {f"mine__{p.name}": token_column(rows, "advantage") for p in function.ports}
    with pytest.raises(KernelError) as caught:
        kernel.step(assignment(rows, 4, **ports))
    assert all(p.grad is None for p in kernel._module.parameters())
    message = str(caught.value)
    assert message.startswith("train_policy: step 4: loss 'mine' failed: ")
    return message


@pytest.mark.parametrize(("fn", "told"), [
    (lambda now: now.logprobs.mean(), "expected it to return Terms, found Tensor. Fix: "),
    (lambda now: Terms(1.0), "expected Terms.loss to be a tensor, found float"),  # type: ignore
    (
        lambda now: Terms(now.logprobs, {"own/mean": now.logprobs.mean()}),
        "expected the metric 'own/mean' to be a pair of numbers (sum, count), found Tensor",
    ),
    (
        lambda now: Terms(now.logprobs, {"own/mean": (now.logprobs, 1.0)}),
        "pair of numbers (sum, count), found tuple with a tensor of shape [",
    ),
    (
        lambda now: Terms(now.logprobs, {"optim/lr": (1.0, 1.0)}),
        "expected the metric to have a name of its own, found 'optim/lr', under which the engine"
        " reports. Fix: 'mine/lr'",
    ),
    (
        lambda now: Terms(now.logprobs, {"My KL": (1.0, 1.0)}),
        "expected the metric to be named as in 'policy/clip_fraction', found 'My KL'. Fix: 'my_kl'",
    ),
    (
        lambda now: Terms(now.logprobs.mul_(2.0)),
        "it changed now.logprobs in place, which other terms read. Fix: a new tensor, such as",
    ),
    (lambda now: Terms(now.logprobs, [1]), "expected the metric 'all'"),  # type: ignore
], ids=[
    "no Terms",
    "no tensor",
    "a metric that is no pair",
    "a metric that is a vector",
    "a metric of the engine",
    "a name that no metric can have",
    "a change of what the model says",
    "metrics without names",
])  # fmt: skip
def test_what_is_no_terms_is_refused_by_name(base: str, fn: Any, told: str) -> None:
    assert told in failed(base, fn)


def test_a_loss_that_calls_backward_is_refused_where_it_does(base: str) -> None:
    def trains_itself(now: Now) -> Terms:
        now.logprobs.sum().backward(retain_graph=True)
        return Terms(now.logprobs)

    message = failed(base, trains_itself)
    assert "it raised KernelError: it called backward, which train does once" in message
    assert "now.logprobs.sum().backward(retain_graph=True)" in message


def test_a_loss_may_ask_for_gradients_by_what_the_model_says(base: str) -> None:
    def penalised(now: Now) -> Terms:
        (slope,) = torch.autograd.grad(now.logprobs.sum(), now.logprobs, retain_graph=True)
        return Terms(now.logprobs * slope)

    opened(base, loss_of(loss_function(penalised))).step(assignment(random_rows(2, 2)))


def test_a_loss_that_leaves_torchs_settings_changed_is_refused_and_they_are_set_back(
    base: str,
) -> None:
    def without_gradients(now: Now) -> Terms:
        loss = -now.logprobs
        torch.set_grad_enabled(False)
        return Terms(loss)

    message = "it left torch's grad mode at False, found True before. Fix: set it back"
    assert message in failed(base, without_gradients)
    assert torch.is_grad_enabled()


def test_a_term_that_changes_its_mask_changes_no_other_terms(base: str) -> None:
    seen: list[Tensor] = []

    def zeroes(now: Now) -> Terms:
        for tensor in (now.mask, now.row, now.sampler_logprobs):
            assert tensor is not None
            tensor.zero_()
        now.rows = 0
        return Terms(-now.logprobs)

    def reads(now: Now) -> Terms:
        seen.append(now.mask.clone())
        return Terms(-now.logprobs)

    metrics = []
    for first in (reads, zeroes):
        terms = loss_of(loss_function(first, name="first")).terms
        second = loss_of(loss_function(reads, name="second")).terms
        kernel = opened(base, Loss((*terms, *second)))
        metrics.append(kernel.step(assignment(random_rows(2, 2))))
    assert metrics[0] == metrics[1]
    assert all(mask.any() for mask in seen)


def test_a_loss_that_reads_a_column_that_is_not_there_is_told_which_are(base: str) -> None:
    def misread(now: Now, advantage: Tensors[Advantage]) -> Terms:
        return Terms(advantage["advantages"])

    told = "expected a column of the port, found 'advantages'; there are: advantage. Fix: "
    line = line_of('Terms(advantage["advantages"])')
    assert f"{HERE}:{line}: {told}" in failed(base, misread)


def test_a_loss_that_raises_comes_with_its_traceback(base: str) -> None:
    def broken(now: Now) -> Terms:
        return Terms(torch.zeros(3) + torch.zeros(4))

    said = failed(base, broken)
    assert "failed: it raised RuntimeError: The size of tensor a (3)" in said
    assert f'{HERE}", line {line_of("torch.zeros(3)")}, in broken' in said


FAULTS = [
    Fault(rule="call", where="a", problem="x", fix="y", origin=Origin(file="f.py", line=number))
    for number in (1, 2)
]


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("gen", "is gone"),
        GraphError(FAULTS),
        UsageError("--set", "no node", "another"),
        WorkerGone("gen", "is gone"),
        HostLost("its lease ended", ended=True),
        NotServed("no run", 403),
        KernelError("one text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: DataflowError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
