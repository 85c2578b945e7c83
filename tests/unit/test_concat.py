"""concat and answers: rows, schemas, temperatures and kernels, without a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.node import Port
from dataflow.rows import Domains
from dataflow.samplers import Samplers
from dataflow.schema import (
    MESSAGE,
    Advantage,
    Completion,
    Prompt,
    Returns,
    Reward,
    Rollout,
    Schema,
    TokenReward,
    TruncatedRollout,
    common_schema,
)
from engine.coordinator.concat_rows import joined_state
from engine.coordinator.tables import ABSENT, PRESENT, RowTable
from engine.plan.plan import Plan
from operators.answers import answers
from operators.concat import concat
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.kernels.answers import DatasetAnswers
from operators.kernels.concat import ConcatRows
from operators.kernels.conversations import encode_conversations
from operators.kernels.text import load_tokenizer
from operators.kernels.torch.train_settings import RowSet
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.select import best_of, select
from tests.kit.graphs import DATA, compared, graph_of, policy, scored
from tests.kit.kernels import FakeSession
from tests.kit.plans import headers, planned, planned_input, planned_node
from tests.unit.test_data import BOS, CHATML, EOS, ids, row, save_tokenizer


class OwnRollout(TruncatedRollout):
    """A user's own."""


@pytest.mark.parametrize(
    "schemas,wanted",
    [
        ([Rollout, Rollout], Rollout),
        ([Rollout, Completion], Completion),
        ([Rollout, TruncatedRollout], TruncatedRollout),
        ([TruncatedRollout, Completion, Rollout], Completion),
        ([OwnRollout, Rollout], OwnRollout),
        ([TokenReward, Reward], Reward),
        ([Advantage, Returns], Advantage),
        ([Rollout, Reward], Schema),
    ],
)
def test_the_common_schema_loses_only_what_some_rows_lack(
    schemas: list[type[Schema]], wanted: type[Schema]
) -> None:
    assert common_schema(schemas) is wanted
    assert common_schema(schemas[::-1]) is wanted


def two(**second: Any) -> tuple[Port[Rollout], Port[Rollout], Port[Prompt]]:
    """Generations with 4 and 2 rows a prompt."""
    asked = prompts(DATA, batch=8)
    first = generate(policy, asked, n=4, max_tokens=32, name="first")
    other = {"n": 2, "max_tokens": 16, "temperature": 0.5, "name": "second"} | second
    return first, generate(policy, asked, **other), asked


def test_the_same_parts_in_the_same_order_are_the_same_rows() -> None:
    first, second, asked = two()
    third = generate(policy, asked, max_tokens=8, name="third")
    left = concat(concat(first, second, name="inner"), third, name="left")
    flat, turned = concat(first, second, third, name="flat"), concat(second, first, third)
    graph = graph_of(left, supervised_loss() + policy_gradient_loss(compared(flat)))
    domains = Domains(graph)
    rows = domains.of(left)
    assert rows is domains.of(flat)
    assert (rows.width, rows.group_size, rows.ragged) == (7, 7, None)
    assert rows.descends_from(domains.of(asked))
    assert domains.of_node(turned.node) is None, "not in the graph"
    made = Samplers(graph, domains).of(flat)
    assert made == ((first.node,),) * 4 + ((second.node,),) * 2 + ((third.node,),)


def test_a_selected_part_makes_the_group_ragged_and_smaller() -> None:
    first, second, asked = two()
    kept = select(second, where=best_of(scored(second), k=1))
    rows = concat(first, kept, answers(asked, column="answer"))
    graph = graph_of(rows, supervised_loss())
    domain = Domains(graph).of(rows)
    assert (domain.width, domain.group_size, domain.ragged) == (7, 7, kept.node)
    assert [each.node for each in domain.selections()] == [kept.node]
    made = Samplers(graph, Domains(graph)).of(rows)
    assert made == ((first.node,),) * 4 + ((second.node,),) * 2 + ((),)


def planned_with_old(rows: Port[Any], **params: Any) -> Plan:
    """old: the log-probs of the rows, computed again."""
    loss = clipped_policy_loss(compared(rows), old=logprobs(policy, rows, name="old"))
    return planned(graph_of(rows, loss, **params))


@pytest.mark.usefixtures("tiny")
def test_each_sample_is_trained_at_its_samplers_temperature() -> None:
    plan = planned_with_old(concat(*two()[:2]), epochs=2, aggregate="constant", minibatches=2)
    params = plan.program.node("train_policy").params
    each = (1.0,) * 4 + (0.5,) * 2
    assert params["temperature"] == params["sampler_temperature"] == each
    assert plan.program.node("old").params["temperature"] == each
    assert "train_policy: temperature 1.0 of first, 0.5 of second" in plan.notes
    assert params["own_samples"] is True
    names = ("minibatches", "max_tokens", "step_rows")
    rows = RowSet(name="rows", loss=supervised_loss(), **{n: params[n] for n in names})
    assert rows.constant == pytest.approx(8 / 2 * (4 * 32 + 2 * 16), rel=1e-12)


@pytest.mark.usefixtures("tiny")
def test_equal_temperatures_are_one_number_and_old_is_left_out() -> None:
    plan = planned_with_old(concat(*two(temperature=1.0, max_tokens=32)[:2]))
    params = plan.program.node("train_policy").params
    assert (params["temperature"], params["max_tokens"]) == (1.0, 32)
    assert "old" not in [node.name for node in plan.nodes]


def test_the_check_knows_the_sizes() -> None:
    rows = concat(*two()[:2])
    graph = graph_of(rows, clipped_policy_loss(compared(rows)))
    (size,) = check(graph, headers).sizes.values()
    assert size.describe() == "8 prompts x 6 = 48 completions a Step, 1 update of 48 (train_policy)"


def test_no_row_of_a_dropped_prompt_goes_on_into_a_group_that_lacks_some() -> None:
    """Prompt 0 was given up in `a`, a refilling select kept nothing of prompt 1."""
    parts = (planned_node("a"), planned_node("b", relation="subset", refill=True))
    inputs = planned_input("a", offset=0, width=2), planned_input("b", offset=2, width=1)
    node = planned_node("c", *inputs, relation="concat", rows=3, inner=3)
    tables = {"a": RowTable(2, 3), "b": RowTable(1, 3)}
    tables["a"].state[:] = [[ABSENT, ABSENT], [PRESENT, PRESENT], [PRESENT, ABSENT]]
    tables["a"].given_up[0] = True
    tables["b"].state[:] = [[PRESENT], [ABSENT], [PRESENT]]
    found = joined_state(node, tables, np.arange(3), parts, unmade=False)
    assert found.tolist() == [[ABSENT] * 3, [ABSENT] * 3, [PRESENT, ABSENT, PRESENT]]


# Kernels


SAMPLES = st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=4)


def concatenated(keys: Keys, schema: type[Schema], *returns: str, **parts: Batch) -> Batch:
    """What the kernel makes of two parts: `part0` of this schema, `part1` without its columns."""
    kernel, (base, *_) = ConcatRows(), schema.__bases__
    schemas = {"part0": schema, "part1": base}
    node = KernelNode(name="c", operator="concat", returns=returns, schemas=schemas)
    kernel.open(node, Layout(), FakeSession())
    (made,) = kernel.run(Chunk(id=0, step=0, keys=keys, inputs=parts))
    return made


@given(SAMPLES, SAMPLES)
def test_rows_come_by_key_with_what_they_lack_filled_in(
    first: list[set[int]], second: list[set[int]]
) -> None:
    """Random rows of two inputs: the second's samples are 4 and more."""
    left = [(prompt, sample) for prompt, some in enumerate(first) for sample in sorted(some)]
    right = [(prompt, sample + 4) for prompt, some in enumerate(second) for sample in sorted(some)]
    if not left + right:
        return
    parts = {"part0": _part(left, mass=-0.5), "part1": _part(right)}
    keys = Keys.of(*zip(*sorted(left + right), strict=True))
    made = concatenated(keys, TruncatedRollout, "completion_ids", "sampler_mass", **parts)
    assert made.keys.rows() == keys.rows()
    for index, (position, sample, _) in enumerate(made.keys.rows()):
        assert made.ragged("completion_ids")[index].tolist() == [position, sample]
        assert made.ragged("sampler_mass")[index].tolist() == [-0.5 if sample < 4 else 0.0] * 2


def _part(rows: list[tuple[int, int]], mass: float | None = None) -> Batch:
    keys = Keys.of([p for p, _ in rows], [s for _, s in rows])
    columns = {"completion_ids": [list(each) for each in rows]}
    if mass is not None:
        columns["sampler_mass"] = [[mass, mass]] * len(rows)
    return Batch.make(keys, columns, TruncatedRollout)


def test_nothing_that_is_read_yields_keys_alone() -> None:
    keys = Keys.of([1, 1], [0, 1])
    made = concatenated(keys, TruncatedRollout)
    assert (made.keys.rows(), made.names) == (keys.rows(), [])


def answered(base: str, prompt: pa.Array, said: pa.Array, **params: Any) -> list[Any]:
    """The rows that the kernel makes, then the keys of those that it drops."""
    session, keys = FakeSession(), Keys.of(range(len(prompt)))
    node = KernelNode(
        name="answers",
        operator="answers",
        params={"column": "gold", "overlong": "error"} | params,
        models={"tokenizer": Model("policy", base)},
    )
    kernel = DatasetAnswers()
    kernel.open(node, Layout(), session)
    rows = Batch(keys, pa.RecordBatch.from_arrays([prompt, said], names=["prompt", "gold"]))
    made: list[Any] = []
    for batch in kernel.run(Chunk(id=0, step=0, keys=keys, inputs={"prompt": rows})):
        made += [row(batch, i) for i in range(len(batch))]
    return made + [key for key, _ in session.tombstones]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of one token a character."""
    return save_tokenizer(tmp_path_factory.mktemp("words"))


def test_answers_are_tokenised_as_demonstrations_are(words: str) -> None:
    found = answered(words, pa.array(["ab", "x"]), pa.array(["c", ""]))
    assert found == answered(words, pa.array(["<bos>ab", "x"]), pa.array(["c<eos>", "<eos>"]))
    assert found[0] == ([BOS, *ids("ab")], [*ids("c"), EOS], [1, 1], "c")
    assert found[1] == ([BOS, *ids("x")], [EOS], [1], "")


def test_overlong_answers_are_refused_or_dropped(words: str) -> None:
    """That they may be cut, too: test_overlong.py."""
    rows = words, pa.array(["ab", "x"]), pa.array(["cdef", "y"])
    how = {"positions": 4, "positions_of": "policy"}
    with pytest.raises(DataError, match=r"answers: row .* expected at most 4 tokens"):
        answered(*rows, **how)
    kept, dropped = answered(*rows, overlong="drop", **how)
    assert kept == ([BOS, *ids("x")], [*ids("y"), EOS], [1, 1], "y")
    assert dropped == (0, 0, 0)


TALK = pa.array([[{"role": "user", "content": "a"}]], pa.list_(MESSAGE))


def test_an_answer_to_messages_is_the_assistants_turn(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    talks = save_tokenizer(tmp_path_factory.mktemp("talks"), template=CHATML)
    (found,) = answered(talks, TALK, pa.array(["b"]))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pairs = encode_conversations(load_tokenizer(talks), [turns], [1], True)
    tokens = [each[0].tolist() for each in (pairs.prompt, pairs.completion, pairs.mask)]
    assert found == (*tokens, "b")


@pytest.mark.parametrize(
    "prompt,said,told",
    [
        (
            pa.array(["a", "b"]),
            pa.array(["c", None]),
            r"row \(1, 0, 0\): expected an answer .*null",
        ),
        (pa.array(["a"]), pa.array([3]), "expected texts in column 'gold', found int64"),
        (pa.array(["a"]), TALK, "as the prompts are text, found lists of messages"),
    ],
)
def test_what_is_no_answer_is_refused(
    words: str, prompt: pa.Array, said: pa.Array, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        answered(words, prompt, said)
