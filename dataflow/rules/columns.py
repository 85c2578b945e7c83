"""Columns: every wire carries what its reader declares.

Owns: schemas of wires, dataset columns that functions ask for, the recorded log-probs that a loss
falls back on. Does not own: which rows a wire carries (lineage.py), values (parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dataflow.errors import Fault, nearest
from dataflow.loss import Loss, LossTerm
from dataflow.node import Node, Port
from dataflow.operator import listed
from dataflow.prompt_types import is_conversations, is_token_ids
from dataflow.rows import nearest_prompt
from dataflow.rules.context import Context, Wire, data_name, fault_at, place
from dataflow.schema import Schema, TokenPrompt

_MAKERS = {
    "Prompt": "prompts(data, batch=64)",
    "TokenPrompt": "continued(rollout)",
    "Completion": "generate(policy, prompt, max_tokens=512)",
    "Rollout": "generate(policy, prompt, max_tokens=512)",
    "Reward": "reward(fn, rollout)",
    "TokenReward": "kl_in_reward(rollout, score, reference, beta=0.05)",
    "Logprobs": "logprobs(model, rollout)",
    "TopLogprobs": "logprobs(teacher, rollout, top_k=64)",
    "Values": "values(critic, rollout)",
    "Advantage": "group_advantage(rollout, score)",
    "Returns": "gae(rollout, score, values)",
    "Keep": "mixed_groups(score)",
}
"""How a port of each schema is usually made; text for messages only."""


def check(context: Context) -> Iterator[Fault]:
    """Wrong schemas, unknown dataset columns, missing recorded log-probs."""
    yield from context.data_faults
    for node in context.graph.nodes:
        for wire in context.wires[id(node)]:
            yield from _schema(wire)
            yield from _dataset(context, wire)
            yield from _on_device(wire)
            yield from _texts(context, wire)
        yield from _recorded(node)
        yield from _as_text(context, node)


def _schema(wire: Wire) -> Iterator[Fault]:
    found, expected = wire.port.schema, wire.input.schema
    if issubclass(found, expected):
        return
    problem = f"expected {expected.describe()}, found {_described(found, wire.port.label)}"
    fix = _MAKERS.get(
        expected.__name__, f"the output of an operator that makes {expected.__name__}"
    )
    yield wire.fault("columns", problem, fix)


def _described(schema: type[Schema], label: str) -> str:
    """`Reward from 'score' (reward: float per row)`."""
    name, _, columns = schema.describe().partition(" (")
    return f"{name} from {label!r}" + (f" ({columns}" if columns else "")


def _dataset(context: Context, wire: Wire) -> Iterator[Fault]:
    wanted = _wanted(wire)
    domain = context.domains.of(wire.port)
    if not wanted or domain is None or id(domain.source) not in context.data:
        return
    data = context.data[id(domain.source)]
    for name in dict.fromkeys(wanted):
        if name in data or name in wire.port.schema.columns:
            continue
        near = nearest(name, data)
        fix = (
            f"{near!r}, which the data has"
            if near
            else f"a column {name!r} in the data, or a function without it"
        )
        problem = f"wants {name!r}, {data_name(domain.source)} has: {', '.join(data)}"
        yield Fault(
            rule="columns", where=place(wire.node), problem=problem, fix=fix, origin=wire.origin
        )


def _wanted(wire: Wire) -> list[str]:
    wanted = [c for c in wire.input.ancestors if c != "prompt"]
    if wire.input.required_from:
        wanted += listed(wire.node.params, wire.input.required_from)
    return wanted


def _texts(context: Context, wire: Wire) -> Iterator[Fault]:
    """Only texts, and lists of messages, are tokenised."""
    asked = listed(wire.node.params, wire.input.required_from)
    for name in asked if wire.node.operator.work == "tokenise" else ():
        kind = context.dataset(wire.port).get(name)
        if kind is None or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            continue
        if not is_conversations(kind):
            problem = f"expected texts in column {name!r}, found {kind}"
            yield fault_at(wire.node, "columns", problem, "a column of answers")


def _on_device(wire: Wire) -> Iterator[Fault]:
    """Functions that name their columns run on the host, where a device's values are not."""
    for name in listed(wire.node.params, wire.input.ancestors_from):
        column = wire.port.schema.columns.get(name)
        if column is not None and column.device:
            problem = f"wants {name!r}, which {wire.port.label!r} has on a device"
            fix = f"an @operator that reads {name!r}, or the column without device=True"
            yield Fault(
                rule="columns", where=place(wire.node), problem=problem, fix=fix, origin=wire.origin
            )


def _as_text(context: Context, node: Node) -> Iterator[Fault]:
    """A node that reads its rows as text, of prompts that are only token ids."""
    if not node.operator.reads_text:
        return
    rows = next(iter(node.inputs.values()))
    prompt = nearest_prompt(rows, context.domains)
    other = "prompts that are text or messages"
    if prompt is None:
        found = f"{rows.label!r} has only token ids"
    else:
        kind = context.dataset(prompt.port()).get("prompt") if not prompt.inputs else None
        made = issubclass(prompt.schemas[0], TokenPrompt)
        if not made and (kind is None or not is_token_ids(kind)):
            return
        other = "the rows of a first generation" if made else other
        found = f"the prompts of {prompt.name!r} are token ids"
    problem = f"expected prompts as text or messages, found that {found}"
    fix = f'{other}, or reads="tokens" by a Model of the same tokenizer'
    yield fault_at(node, "columns", problem, fix)


def _recorded(node: Node) -> Iterator[Fault]:
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        rows = node.inputs.get(term.on)
        if rows is None or "sampler_logprobs" in rows.schema.columns:
            continue
        if term.recorded(node.inputs):
            yield _no_record(term, node, rows)


def _no_record(term: LossTerm, node: Node, rows: Port) -> Fault:
    name = term.function.name
    why = f"for its {term.function.correction}" if term.corrected else "without old="
    problem = (
        f"{why} it needs the sampler's log-probs, and {rows.label!r} is"
        f" {rows.schema.__name__}, no Rollout"
    )
    if any(i.name == "old" for i in term.function.ports) and not term.corrected:
        fix = 'old=logprobs(policy, rows, name="old")'
    else:
        fix = "rows that generate made"
    return Fault(
        rule="columns", where=name, problem=problem, fix=fix, origin=term.origin or node.origin
    )
