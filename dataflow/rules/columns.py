"""Columns: every wire carries what its reader declares.

Owns: schemas of wires, dataset columns that functions ask for, the recorded log-probs that a loss
falls back on. Does not own: which rows a wire carries (lineage.py), values (parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dataflow.errors import Fault, nearest
from dataflow.loss_terms import LossTerm
from dataflow.node import Node, Port
from dataflow.operator import DATA_ROW, list_columns
from dataflow.prompt_types import is_conversations, is_token_ids
from dataflow.rows import nearest_prompt
from dataflow.rules.context import Context, Wire, data_name, fault_at, loss_terms, name_node
from dataflow.schema import Episode, Rollout, Schema, TokenPrompt

_MAKERS = {
    "Prompt": "prompts(data, batch=64)",
    "TokenPrompt": "continued(rollout)",
    "Completion": "generate(policy, prompt, max_tokens=512)",
    "Rollout": "generate(policy, prompt, max_tokens=512)",
    "Episode": "interact(policy, prompt, environment, max_turns=8, max_tokens=4096)",
    "Transition": "transitions(episode, max_turns=8)",
    "Reward": "reward(fn, rollout)",
    "TokenReward": "kl_in_reward(rollout, score, reference, beta=0.05)",
    "Logprobs": "logprobs(model, rollout)",
    "TopLogprobs": "logprobs(teacher, rollout, top_k=64)",
    "Values": "values(critic, rollout)",
    "Advantage": "group_advantage(rollout, score)",
    "RankTerms": "ranks(score, mean_over(answer_length(rollout), prompt))",
    "Weight": "weight_of(score)",
    "Returns": "gae(rollout, score, values)",
    "Keep": "mixed_groups(score)",
}
"""How a port of each schema is usually made; text for messages only."""

_OF_EPISODES = frozenset(Episode.columns).difference(Rollout.columns) | {
    "environments",
    "turn_rewards",
}
"""Names under which functions of episodes get what other rows do not have."""


def check_wire_columns(context: Context) -> Iterator[Fault]:
    """Wrong schemas, unknown dataset columns, missing recorded log-probs."""
    yield from context.data_faults  # files whose columns could not be read
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            yield from _check_schema(wire)
            yield from _check_dataset(context, wire)
            yield from _check_device(wire)
            yield from _check_texts(context, wire)
        yield from _check_record(node)
        yield from _check_readable(context, node)


def _fault_of_reader(wire: Wire, problem: str, fix: str) -> Fault:
    """A fault in what a node wants of an input, not in the input itself."""
    where = name_node(wire.node)
    return Fault(rule="columns", where=where, problem=problem, fix=fix, origin=wire.origin)


def _check_schema(wire: Wire) -> Iterator[Fault]:
    actual, expected = wire.port.schema, wire.input.schema
    if issubclass(actual, expected):
        return
    problem = f"expected {expected.describe()}, found {_describe(actual, wire.port.label)}"
    name = expected.__name__
    fix = _MAKERS.get(name, f"the output of an operator that makes {name}")
    yield wire.fault("columns", problem, fix)


def _describe(schema: type[Schema], label: str) -> str:
    """`Reward from 'score' (reward: float per row)`."""
    name, parenthesis, columns = schema.describe().partition(" (")
    return f"{name} from {label!r}{parenthesis}{columns}"


def _check_dataset(context: Context, wire: Wire) -> Iterator[Fault]:
    """Columns that a node cannot work without, and that neither the port nor the data has."""
    required = [n for n in wire.input.ancestors if n not in ("prompt", DATA_ROW)]
    required += list_columns(wire.node.params, wire.input.required_from)
    domain = context.domains.of(wire.port)
    if not required or domain is None or id(domain.source) not in context.data:
        return
    if wire.input.entries_of in wire.port.schema.columns:
        return  # what no column has may be an entry: the run knows
    columns = context.data[id(domain.source)]
    other_reader = "a function without it"
    if wire.node.operator.work == "record":
        other_reader = "a column of its rows"
    elif "environment" in wire.node.params:
        other_reader = "an environment whose reset does without it"
    for name in dict.fromkeys(required):
        if name in columns or name in wire.port.schema.columns:
            continue
        near = nearest(name, columns)
        if near:
            fix = f"{near!r}, which the data has"
        elif wire.input.entries_of and name in _OF_EPISODES:
            fix = f"episodes, rows of interact(...), which have {name!r}, or {other_reader}"
        else:
            fix = f"a column {name!r} in the data, or {other_reader}"
        problem = f"wants {name!r}, {data_name(domain.source)} has: {', '.join(columns)}"
        yield _fault_of_reader(wire, problem, fix)


def _check_texts(context: Context, wire: Wire) -> Iterator[Fault]:
    """Only texts, and lists of messages, are tokenised."""
    if wire.node.operator.work != "tokenise":
        return
    for name in list_columns(wire.node.params, wire.input.required_from):
        kind = context.dataset(wire.port).get(name)
        if kind is None or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            continue
        if not is_conversations(kind):
            problem = f"expected texts in column {name!r}, found {kind}"
            yield fault_at(wire.node, "columns", problem, "a column of answers")


def _check_device(wire: Wire) -> Iterator[Fault]:
    """Functions that name their columns run on the host, where a device's values are not."""
    for name in list_columns(wire.node.params, wire.input.ancestors_from):
        column = wire.port.schema.columns.get(name)
        if column is not None and column.device:
            problem = f"wants {name!r}, which {wire.port.label!r} has on a device"
            fix = f"an @operator that reads {name!r}, or the column without device=True"
            yield _fault_of_reader(wire, problem, fix)


def _check_readable(context: Context, node: Node) -> Iterator[Fault]:
    """A node that reads its rows as text, of prompts that are only token ids."""
    if not node.operator.reads_text:
        return
    rows = next(iter(node.inputs.values()))
    prompt = nearest_prompt(rows, context.domains)
    instead = "prompts that are text or messages"
    if prompt is None:
        why = f"{rows.label!r} has only token ids"
    elif issubclass(prompt.schemas[0], TokenPrompt):
        instead = "the rows of a first generation"
        why = f"the prompts of {prompt.name!r} are token ids"
    elif _has_token_ids(context, prompt):
        why = f"the prompts of {prompt.name!r} are token ids"
    else:
        return
    problem = f"expected prompts as text or messages, found that {why}"
    fix = f'{instead}, or reads="tokens" by a Model of the same tokenizer'
    yield fault_at(node, "columns", problem, fix)


def _has_token_ids(context: Context, prompt: Node) -> bool:
    """Whether the data of a source has its prompts as lists of token ids."""
    if prompt.inputs:
        return False
    kind = context.dataset(prompt.port()).get("prompt")
    return kind is not None and is_token_ids(kind)


def _check_record(node: Node) -> Iterator[Fault]:
    """Terms that need what a sampler records, on rows that no sampler made."""
    for term in loss_terms(node):
        rows = node.inputs.get(term.on)
        if rows is None or "sampler_logprobs" in rows.schema.columns:
            continue
        if term.reads_recorded(node.inputs):
            yield _no_record(term, node, rows)


def _no_record(term: LossTerm, node: Node, rows: Port) -> Fault:
    name, origin = term.function.name, term.origin or node.origin
    why = f"for its {term.function.correction}" if term.is_corrected else "without old="
    problem = (
        f"{why} it needs the sampler's log-probs, and {rows.label!r} is"
        f" {rows.schema.__name__}, no Rollout"
    )
    if any(port.name == "old" for port in term.function.ports) and not term.is_corrected:
        fix = 'old=logprobs(policy, rows, name="old")'
    else:
        fix = "rows that generate made"
    return Fault(rule="columns", where=name, problem=problem, fix=fix, origin=origin)
