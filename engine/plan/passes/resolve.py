"""Fill in parameters that follow from elsewhere in the graph.

Owns: the temperature of log-probs and training, the most tokens of a Step (for a constant divisor
of the loss), and the longest rows that all readers take. Does not own: defaults (operators/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dataflow.node import Node, Port
from dataflow.operator import Expand, Reduce, Same
from dataflow.positions import row_positions
from dataflow.rows import Domains, generations
from engine.plan.draft import Draft


def resolve(draft: Draft) -> Draft:
    """Give logprobs and train their rows' temperature, and train `max_tokens` and a Step's rows.

    A ratio of log-probs means something at one temperature only; one that the user stated stays.
    Rows that are greedy (0.0) or not sampled count as sampled at 1.0. Supervised losses, which only
    imitate their rows, train at 1.0.
    """
    notes: list[str] = []
    domains, known = Domains(draft.graph), row_positions(draft.graph)

    def change(node: Node) -> Node:
        least = known.get(node.name)
        if least is not None and node.operator.traits.writes_tokens:
            limit, model = least.limit, least.model
            if least.node.name != node.name and node.operator.traits.generates:
                bound = f"rows of at most {limit} tokens, the positions of {model}"
                notes.append(f"{node.name}: {bound}")
            return node.changed(params=node.params | {"positions": limit, "positions_of": model})
        if node.operator.work == "train":
            params, found = _of_train(node, _rows_of_step(node, domains))
        elif node.operator.log_probs and node.params["temperature"] is None:
            params, found = _of_logprobs(node)
        else:
            return node
        notes.extend(f"{node.name}: {note}" for note in found)
        return node.changed(params=node.params | params)

    return replace(draft, graph=draft.graph.map(change), notes=(*draft.notes, *notes))


def _of_logprobs(node: Node) -> tuple[dict[str, Any], list[str]]:
    """The temperature of log-probs without a stated one, and its note."""
    sampler = sampler_of(node.inputs["rows"])
    at = _sampled_at(sampler)
    notes = [f"temperature {at}, that of {sampler.name}"] if sampler and at != 1.0 else []
    return {"temperature": at}, notes


def _of_train(node: Node, rows: int | None) -> tuple[dict[str, Any], list[str]]:
    """What training needs to know of its rows, and a note if the temperature may surprise."""
    sampler = sampler_of(node.inputs["rows"])
    stated, loss = node.params["temperature"], node.params["loss"]
    at = _sampled_at(sampler)
    chosen = stated if stated is not None else 1.0 if loss.supervised else at
    params = {"temperature": chosen, "step_rows": rows}
    if sampler is None:  # no sampling to compare with
        return params | {"sampler_temperature": 0.0}, []
    params |= {"sampler_temperature": at, "max_tokens": sampler.params["max_tokens"]}
    if (chosen, at) == (1.0, 1.0) or any(term.function.head != "lm" for term in loss.terms):
        return params, []
    if chosen == at:
        return params, [f"temperature {chosen}, that of {sampler.name}"]
    why = "as stated" if stated is not None else "as its rows are only imitated"
    return params, [f"temperature {chosen}, {why}; {sampler.name} sampled at {at}"]


def _sampled_at(sampler: Node | None) -> float:
    return 1.0 if sampler is None else float(sampler.params["temperature"]) or 1.0


def _rows_of_step(train: Node, domains: Domains) -> int | None:
    """Rows of a Step before any selection; None for a source without batches."""
    domain = domains.of_node(train)
    batch = domain.source.params.get("batch") if domain else None
    return batch * domain.group_size if domain and batch else None


def sampler_of(port: Port[Any]) -> Node | None:
    """The decode node that wrote these rows' tokens; None for a source, or several nodes."""
    found = generations(port)
    return found[0] if len(found) == 1 else None


def row_line(port: Port[Any]) -> Iterator[Port[Any]]:
    """The port, the one that its rows are of or come from, and so on to the source; no selects."""
    at: Port[Any] | None = port
    while at is not None:
        if at.node.operator.traits.moves_rows:
            yield at
        at = _above(at)


def _above(port: Port[Any]) -> Port[Any] | None:
    node = port.node
    if not node.operator.traits.moves_rows:
        return node.inputs[f"port{port.index}"]
    rows = node.operator.rows
    if isinstance(rows, Reduce):
        return node.inputs.get(rows.to)
    return node.inputs.get(rows.of) if isinstance(rows, (Same, Expand)) else None
