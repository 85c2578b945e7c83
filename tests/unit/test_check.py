"""The check: every wrong graph is refused with its whole message, every right one passes.

`GOLDEN=write pytest tests/unit/test_check.py` writes the golden messages anew; read the difference
before keeping it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import networkx
import pyarrow as pa
import pytest

from dataflow.check import CheckedGraph, check
from dataflow.dialect import with_dialects
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.rules.context import context_of
from dataflow.rules.liveness import token_graph
from dataflow.schema import Keep, Reward
from dataflow.set_expressions import edited
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from operators.advantage import add
from operators.data import demonstrations, prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import kl_loss, supervised_loss
from operators.reward import reward
from operators.select import best_of, select
from operators.train import train
from tests import right_graphs
from tests.kit.comparison import golden_names, require_golden
from tests.kit.files import save_jsonl
from tests.kit.plans import DATA, DEMONSTRATIONS
from tests.kit.rewards import exact
from tests.right_graphs import RIGHT
from tests.wrong_graphs import (
    calls,
    concats,
    doubtful,
    held_out,
    kept,
    numbers,
    off_policy,
    rows,
    states,
    tables,
    temperatures,
    token_prompts,
    wires,
)

TINY, TRAIN = "models/tiny", "data/train.parquet"


def headers(data: str, split: str | None) -> dict[str, pa.DataType]:
    """The columns that every data file of these tests has."""
    ids = {"prompt": pa.list_(pa.int32())} if "ids" in data else {}
    answered = {"completions": pa.utf8()} if "completions" in data else {}
    return DEMONSTRATIONS | {"answer": pa.utf8()} if "demos" in data else DATA | ids | answered


def graphs_of(module: ModuleType) -> list[Callable[[], Graph]]:
    """The wrong graphs of a module, in the order of its lines."""
    functions = [f for f in vars(module).values() if inspect.isfunction(f)]
    own = {f: inspect.signature(f) for f in functions if f.__module__ == module.__name__}
    return [f for f, s in own.items() if s.return_annotation == "Graph" and not s.parameters]


MODULES = (
    wires, states, numbers, kept, rows, temperatures, held_out, calls, concats, token_prompts,
    tables,
)  # fmt: skip
WRONG = [f for module in MODULES for f in graphs_of(module)]


@pytest.mark.parametrize("make", WRONG)
def test_a_wrong_graph_is_refused_with_this_message(make: Callable[[], Graph]) -> None:
    """While it is built or when it is checked."""
    real_files = make.__name__ == "missing_data_file"
    with pytest.raises(GraphError) as caught:
        check(make(), None if real_files else headers)
    require_golden(f"check/{make.__name__}.txt", f"{caught.value}\n")


def checked(make: Callable[[], Graph]) -> CheckedGraph:
    return check(make(), headers)


@pytest.mark.parametrize("make", RIGHT)
def test_a_right_graph_passes(make: Callable[[], Graph]) -> None:
    graph = make()
    known = check(graph, headers)
    assert known.graph == with_dialects(graph)
    assert set(known.columns) == {(n.name, i) for n in graph.nodes for i in range(len(n.schemas))}
    assert set(known.bound) == {s.name for s in graph.sinks if s.operator.work == "train"}


SAID = "64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)"
FEWER = "at most 64 prompts x 8 = 512 completions a Step, 5 updates of 102 (train_policy)"


def test_sizes_are_said_as_a_user_counts_them() -> None:
    assert checked(right_graphs.plain_grpo).sizes["prompts"].describe() == SAID
    assert checked(right_graphs.expert_iteration).sizes["prompts"].describe() == FEWER
    held_out = checked(right_graphs.with_evaluation).sizes["held_out"]
    assert held_out.describe() == "to the end, for evaluation"


@pytest.mark.parametrize(("make", "source", "trained"), [
    (right_graphs.plain_ppo, "prompts", [(1, 256, True, 16, 64)] * 2),
    (right_graphs.online_dpo, "prompts", [(2, 128, True, 1, 128)]),
    (right_graphs.offline_dpo, "preferences", [(2, 128, True, 4, 32)]),
    (right_graphs.with_evaluation, "held_out", []),
    (right_graphs.prompts_chosen, "prompts", [(8, 512, True, 1, 512)]),
], ids=["epochs", "pairs chosen", "pairs", "evaluation", "prompts chosen"])  # fmt: skip
def test_sizes_of_what_is_trained(
    make: Callable[[], Graph], source: str, trained: list[tuple[int | bool, ...]]
) -> None:
    """Rows of a group, rows of a Step and whether it is sure to have them, updates and their
    rows."""
    sizes = checked(make).sizes[source].trains
    assert [(s.group, s.rows, s.full, s.updates, s.rows_an_update) for s in sizes] == trained


def test_lags_and_the_bound_that_follows() -> None:
    known = checked(right_graphs.areal)
    assert known.lag == {"rollout": 4, "proximal": 0}
    assert known.bound == {"train_policy": 4}
    assert known.regions.of["proximal"] == "step"


def test_the_steps_that_a_generating_follower_rests_are_a_lag_of_its_rows() -> None:
    known = checked(off_policy.policy_gradient_on_a_follower_of_every_50_steps)
    assert known.lag == {"rollout": 1}
    assert known.bound == {"train_policy": 50}
    assert "train_policy: rows at most 50 versions old" in known.describe()


@pytest.mark.parametrize(("make", "policy"), [
    (off_policy.ratio_with_a_frozen_generator, "rows that 'rollout' writes with 'fixed'"),
    (off_policy.policy_gradient_on_a_frozen_copy, "rows that 'rollout' writes with 'first'"),
    (
        off_policy.policy_gradient_on_a_follower_that_moves_slowly,
        "rows that 'rollout' writes with 'slow'",
    ),
    (right_graphs.plain_sft, "rows of 'demonstrations'"),
    (right_graphs.imitating_while_exploring, "on policy, but for rows of 'demos'"),
    (right_graphs.plain_grpo, "rows at most 1 version old"),
    (off_policy.ratio_on_greedy_rows, "greedy answers of 'rollout'"),
])  # fmt: skip
def test_rows_that_the_trained_model_does_not_write_are_not_called_on_policy(
    make: Callable[[], Graph], policy: str
) -> None:
    known = checked(make)
    assert known.policies == {"train_policy": policy}
    assert f"  train_policy: {policy}" in known.describe().splitlines()
    critic = checked(right_graphs.plain_ppo).policies["train_critic"]
    assert critic == "on policy", "it writes nothing; the policy that does is trained"


def test_greedy_answers_are_not_called_on_policy() -> None:
    """As the warning greedy_rows says of them: neither for the policy nor for its critic."""
    greedy = edited(right_graphs.plain_ppo(), ["rollout.temperature=0"])
    phrases = check(greedy, headers).policies
    assert phrases == dict.fromkeys(("train_critic", "train_policy"), "greedy answers of 'rollout'")


def test_a_reader_of_a_follower_has_a_lag_and_one_of_a_frozen_model_has_none() -> None:
    assert checked(right_graphs.slow_critic).lag == {"rollout": 0, "values": 0}
    assert "reference" not in checked(right_graphs.plain_grpo).lag


def test_an_evaluation_reads_one_version_whatever_lag_it_asks_for() -> None:
    known = checked(doubtful.lag_of_an_evaluation)
    assert known.lag["held"] == 0
    assert known.regions.of["held"] == "evaluation"


def test_columns_of_a_port_are_its_own_and_the_data_that_its_rows_descend_from() -> None:
    columns = checked(right_graphs.plain_grpo).columns
    assert columns["prompts", 0] == DATA
    expected = pa.large_list(pa.field("item", pa.int32(), nullable=False))
    assert columns["rollout", 0]["completion_ids"] == expected
    assert columns["score", 0] == {"reward": pa.float32(), **DATA}


def test_the_type_of_a_prompt_is_that_of_the_file() -> None:
    messages = pa.list_(pa.struct({"role": pa.utf8(), "content": pa.utf8()}))
    known = check(right_graphs.plain_grpo(), lambda data, split: DATA | {"prompt": messages})
    assert known.columns["prompts", 0]["prompt"] == messages


def test_dialects_and_what_is_not_read_are_told() -> None:
    known = check(grpo(TINY, TRAIN, exact), headers)
    assert known.dialects == {"advantage": "trl", "train_policy.clipped_policy_loss": "trl"}
    told = "train_policy: 'reference' is not read: clipped_policy_loss has beta=0.0"
    assert [note.partition(" ")[2] for note in known.notes] == [told]
    assert told in known.describe()
    assert checked(right_graphs.plain_grpo).notes == ()


def test_every_cycle_of_a_right_graph_holds_a_token() -> None:
    for make in RIGHT:
        tokens = token_graph(context_of(make(), headers))
        cycles = list(networkx.simple_cycles(networkx.DiGraph(tokens)))
        for cycle in cycles:
            edges = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            assert sum(min(e["tokens"] for e in tokens[u][v].values()) for u, v in edges) >= 1
        assert cycles or make in (right_graphs.plain_sft, right_graphs.offline_dpo)


def test_lag_adds_tokens() -> None:
    tokens = token_graph(context_of(right_graphs.areal(), headers))
    held = {(u, v): count for u, v, count in tokens.edges(data="tokens")}
    assert held["Model 'policy'", "rollout"] == 5
    assert held["Model 'policy'", "proximal"] == 1
    assert held["train_policy", "Model 'policy'"] == 0


def test_the_description_names_sizes_staleness_and_the_cut() -> None:
    text = checked(right_graphs.areal).describe()
    assert "16 = 1,024 completions a Step, 4 updates of 256" in text
    assert "rows at most 4 versions old" in text
    assert "proximal: after the cut, it reads 'policy' at lag 0" in text


def test_data_files_are_read_for_their_columns(tmp_path: Path) -> None:
    """Those that lack one: tests/mistakes/data.py."""
    data = save_jsonl(tmp_path / "train.jsonl", {"prompt": "2+2", "answer": "4"})
    known = check(grpo(TINY, data, exact))
    assert known.columns["prompts", 0] == {"prompt": pa.utf8(), "answer": pa.utf8()}


def test_a_column_that_a_reward_can_do_without_is_not_asked_for() -> None:
    def tolerant(completions: list[str], hint: list[str] | None = None) -> list[float]:
        return [1.0 for _ in completions]

    check(grpo(TINY, TRAIN, tolerant), headers)


def test_a_users_operator_asks_for_its_dataset_columns() -> None:
    with pytest.raises(GraphError, match="ask_judge: wants 'answer'"):
        check(right_graphs.language_model_judge(), lambda data, split: {"prompt": pa.utf8()})


WORDS, OTHERS = str(states.TOKENIZERS / "words"), str(states.TOKENIZERS / "others")


def test_demonstrations_have_the_vocabulary_of_the_model_trained_on_them() -> None:
    student = Model("student", WORDS, trainable=True)
    rows = demonstrations("data/demos.jsonl", batch=8)
    near = kl_loss(logprobs(Model("other", OTHERS), rows))
    with pytest.raises(GraphError, match="vocabulary"):
        check(Graph("g", train(student, rows, loss=near, lr=1e-5)), headers)
    check(Graph("g", train(student, rows, loss=supervised_loss(), lr=1e-5)), headers)


def test_a_selected_port_keeps_its_own_tokenizer() -> None:
    policy = Model("policy", WORDS, trainable=True)
    rollout = generate(policy, prompts("data/train.parquet", batch=8), n=4, max_tokens=8)
    kept = select(rollout, where=best_of(reward(exact, rollout)))
    near = kl_loss(logprobs(Model("teacher", OTHERS), kept))
    with pytest.raises(GraphError, match="logprobs 'teacher': vocabulary"):
        check(Graph("g", train(policy, kept, loss=near, lr=1e-6)), headers)


@operator()
def positive(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=(score["reward"] > 0).astype("uint8"))


def test_a_graph_of_a_thousand_nodes_is_checked() -> None:
    rollout = right_graphs.sampled(n=1)
    score = reward(exact, rollout)
    rows = rollout
    for i in range(300):
        keep = positive.named(f"keep_{i}")(score)
        rows, score = select(rows, score, where=keep, refill=True, name=f"select_{i}")
        score = add(score, name=f"shaped_{i}")
    loss = right_graphs.policy_gradient_loss(right_graphs.returns(rows, score))
    known = check(Graph("deep", train(right_graphs.policy, rows, loss=loss, lr=1e-6)), headers)
    assert len(known.graph.nodes) > 900
    domain = known.domains.of_node(known.graph.sinks[0])
    # The prompts, their answers, what each select keeps.
    assert len(list(domain.ancestors())) == 302
    assert domain.describe().count("kept by") == 300


def test_every_golden_message_has_its_graph() -> None:
    names = [make.__name__ for make in WRONG]
    assert len(names) == len(set(names)) >= 30
    assert golden_names("check") == set(names)
