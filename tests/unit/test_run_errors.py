"""What fails while it runs is named as the check names it: file, line, node; the user's own
traceback comes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.errors import DataError, KernelError, Origin, RunError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Advantage, Prompt, Reward
from dataflow.user import Columns, operator
from engine import api
from engine.channels.contract import PeerLost
from engine.worker.timing import Timing
from operators.data import prompts
from operators.generate import generate
from operators.losses import supervised_loss
from operators.train import train
from tests.kit.models import save_tiny
from tests.kit.rows import random_rows, token_column
from tests.kit.training import assignment, opened, term

HERE = Path(__file__).name


def line_of(text: str) -> int:
    """The one line of this file that holds this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [
        number for number, line in enumerate(lines, 1) if text in line and "line_of(" not in line
    ]
    return found


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


def ending(port: Port[Prompt]) -> Graph:
    """A graph, so that there is something to run; its model is never opened."""
    policy = Model("policy", "owner/no-such-model", trainable=True)
    rollout = generate(policy, port, max_tokens=4)
    return Graph("g", train(policy, rollout, loss=supervised_loss(), lr=1e-6))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda p: divided(p), "ZeroDivisionError"),  # line of divided
        (lambda p: misread(p), "promt"),  # line of misread
        (lambda p: shortened(p), "it returned 1 rows for 2"),  # line of shortened
    ],
    ids=["raises", "misreads", "forgets"],
)
def test_a_users_operator_that_fails_is_named_with_its_line(
    made: Callable[[Port[Prompt]], Port[Prompt]], said: str, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "2+2"}\n' * 4)
    port = made(prompts(str(data), batch=2))
    with pytest.raises(KernelError) as caught:
        api.peek(ending(port), port.node.name, rows=2)
    message = str(caught.value)
    line = line_of(f"# line of {port.node.name}")
    assert message.startswith(
        f"{HERE}:{line} {port.node.name}: operator {port.node.name!r} failed on"
    ), message
    assert said in message
    if said == "ZeroDivisionError":
        assert f'{HERE}", line {line_of("1 // 0")}, in divided' in message


# Whatever leaves a kernel


def left(error: Exception, *, node: str = "score", origin: bool = True) -> Exception:
    """What an error of a kernel is once it has left the node."""
    timing = Timing(
        "main",
        lambda name: Origin(file="graphs/grpo.py", line=14) if origin and name == node else None,
    )
    with pytest.raises(Exception) as caught, timing.during(node, "chunk 3, 2 rows"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("score: no reward", "grpo.py:14 score: no reward"),
        ("node 'score': no reward", "grpo.py:14 node 'score': no reward"),
        ("loss x: shape", "grpo.py:14 score: loss x: shape"),
        ("grpo.py:14 score: told already", "grpo.py:14 score: told already"),
    ],
)
def test_errors_of_ours_get_the_line_and_stay_what_they_are(said: str, shown: str) -> None:
    for kind in (KernelError, RunError):
        error = kind(said)
        assert left(error) is error
        assert str(error) == shown


def test_errors_of_others_become_ours_with_their_traceback() -> None:
    made = left(ValueError("odd"))
    assert isinstance(made, KernelError)
    assert str(made).startswith(
        "grpo.py:14 score: chunk 3, 2 rows: raised ValueError: odd. Fix: see the traceback.\n"
    )
    assert "in left" in str(made)
    assert isinstance(made.__cause__, ValueError)


def test_data_that_does_not_fit_and_nodes_without_a_line() -> None:
    assert str(left(DataError("row 3 is odd"))) == "grpo.py:14 score: chunk 3, 2 rows: row 3 is odd"
    assert str(left(KernelError("score: bad"), origin=False)) == "score: bad"
    assert (
        str(left(DataError("row 3 is odd"), origin=False)) == "score: chunk 3, 2 rows: row 3 is odd"
    )


def test_a_lost_peer_is_still_known_as_one() -> None:
    error = left(PeerLost("gen", "is gone"))
    assert isinstance(error, PeerLost)
    assert error.peer == "gen"


# Losses


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("train") / "qwen2")


def failed(base: str, fn: Any) -> str:
    """What a step under this loss fails with."""
    rows = random_rows(2, 2)
    function = loss_function(fn, name="mine")
    kernel = opened(base, Loss((term(function),)))
    ports = {f"mine__{p.name}": token_column(rows, "advantage") for p in function.ports}
    with pytest.raises(KernelError) as caught:
        kernel.step(assignment(rows, 4, **ports))
    assert all(p.grad is None for p in kernel._module.parameters())
    return str(caught.value)


def test_a_loss_that_returns_a_tensor_is_refused_by_name(base: str) -> None:
    def mean(now: Now):  # type: ignore[no-untyped-def]
        return now.logprobs.mean()

    said = failed(base, mean)
    assert said.startswith(
        "train_policy: step 4: loss 'mine' failed: expected it to return Terms, found Tensor. Fix: "
    )


def test_terms_that_hold_no_tensor_and_metrics_that_are_no_pairs_are_refused(base: str) -> None:
    assert "expected Terms.loss to be a tensor, found float" in failed(base, lambda now: Terms(1.0))  # type: ignore
    told = failed(base, lambda now: Terms(now.logprobs, {"own/mean": now.logprobs.mean()}))
    assert "expected the metric 'own/mean' to be a pair (sum, count), found Tensor" in told
    assert "expected the metric 'all'" in failed(base, lambda now: Terms(now.logprobs, [1]))  # type: ignore


def test_a_loss_that_reads_a_column_that_is_not_there_is_told_which_are(base: str) -> None:
    def misread(now: Now, advantage: Tensors[Advantage]) -> Terms:
        return Terms(advantage["advantages"])

    said = failed(base, misread)
    line = line_of('Terms(advantage["advantages"])')
    assert (
        f"{HERE}:{line}: expected a column of the port, found 'advantages'; there are: advantage."
        " Fix: " in said
    )


def test_a_loss_that_raises_comes_with_its_traceback(base: str) -> None:
    def broken(now: Now) -> Terms:
        return Terms(torch.zeros(3) + torch.zeros(4))

    said = failed(base, broken)
    assert said.startswith(
        "train_policy: step 4: loss 'mine' failed: it raised RuntimeError: The size of tensor a (3)"
    )
    assert f'{HERE}", line {line_of("torch.zeros(3)")}, in broken' in said


def test_the_columns_of_a_port_are_named_where_one_is_missing() -> None:
    port: Tensors[Reward] = Tensors({"reward": torch.zeros(1)})
    assert port["reward"].shape == (1,)
    with pytest.raises(KernelError, match=r"there are: reward\. Fix: reward\."):
        port["rewards"]
    with pytest.raises(KernelError, match="there are: none"):
        Tensors({})["x"]
