"""Fill in parameters that follow from elsewhere in the graph.

Owns: the temperature of log-probs and training, the most tokens of a Step (for a constant divisor
of the loss), and the longest rows that all readers take. Does not own: defaults (operators/).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataflow.loss import Loss
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node, Port
from dataflow.positions import row_positions
from dataflow.rows import Domains
from dataflow.samplers import BySample, Samplers, unless_equal
from engine.plan.draft import Draft
from engine.plan.part_names import names_of_parts


def resolve(draft: Draft) -> Draft:
    """Give logprobs and train their rows' temperature, and train `max_tokens` and a Step's rows.

    A ratio of log-probs means something at one temperature only; one that the user stated stays.
    Rows that are greedy (0.0) or not sampled count as sampled at 1.0. Supervised losses, which only
    imitate their rows, train at 1.0. Where samples of a prompt differ, as in a concat of two
    generations, the temperature is a tuple with that of each, and max_tokens their mean.
    """
    notes: list[str] = []
    domains, known = Domains(draft.graph), row_positions(draft.graph)
    samplers = Samplers(draft.graph, domains)
    part_names = names_of_parts(draft.graph)

    def change(node: Node) -> Node:
        least = known.get(node.name)
        if least is not None and node.operator.traits.writes_tokens:
            limit, model = least.limit, least.model
            if least.node.name != node.name and node.operator.traits.generates:
                bound = f"rows of at most {limit} tokens, the positions of {model}"
                notes.append(f"{node.name}: {bound}")
            return node.changed(params=node.params | {"positions": limit, "positions_of": model})
        if node.name in part_names:
            return node.changed(params=node.params | {"part_names": part_names[node.name]})
        if node.operator.work == "train":
            params, found = _of_train(node, domains, samplers)
        elif node.operator.log_probs and node.params["temperature"] is None:
            params, found = _of_logprobs(node, samplers)
        else:
            return node
        notes.extend(f"{node.name}: {note}" for note in found)
        return node.changed(params=node.params | params)

    return replace(draft, graph=draft.graph.map(change), notes=(*draft.notes, *notes))


def _of_logprobs(node: Node, samplers: Samplers) -> tuple[dict[str, Any], list[str]]:
    """The temperature of log-probs without a stated one, and its note."""
    rows = node.inputs["rows"]
    at = _sampled_at(rows, samplers)
    notes = [f"temperature {_shown(rows, samplers)}"] if at != 1.0 else []
    return {"temperature": at}, notes


def _of_train(node: Node, domains: Domains, samplers: Samplers) -> tuple[dict[str, Any], list[str]]:
    """What training needs to know of its rows, those of terms of its loss included, and notes. A
    stated temperature is that of the node's own rows.
    """
    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name, port in row_sets(node).items():
        loss, steps = node.params["loss"].on(name), _rows_of_step(port, domains)
        stated = node.params["temperature"] if name == ROWS else None
        found[name], told = _of_rows(port, loss, stated, steps, samplers)
        found[name]["own_samples"] = _own_samples(node, samplers.of(port))
        notes += told if name == ROWS else [f"{name}: {note}" for note in told]
    params = found.pop(ROWS)
    return params | ({"own_rows": found} if found else {}), notes


def _of_rows(
    port: Port[Any], loss: Loss, stated: float | None, rows: int | None, samplers: Samplers
) -> tuple[dict[str, Any], list[str]]:
    """The same of one row set. loss: the terms on it; stated: its temperature, if the user said
    one; rows: of a Step.
    """
    made, at = samplers.of(port), _sampled_at(port, samplers)
    chosen = stated if stated is not None else 1.0 if loss.supervised else at
    params = {"temperature": chosen, "step_rows": rows}
    # Rows without one sampler have no recorded log-probs to compare with.
    compared = [_of_sampler(makers) if len(makers) == 1 else 0.0 for makers in made]
    params["sampler_temperature"] = unless_equal(compared or [0.0])
    if not any(compared):
        return params, []
    most, group = samplers.most_tokens(port), samplers.group_size(port)
    if most is not None and group:
        params["max_tokens"] = most / group if most % group else int(most) // group
    if (chosen, at) == (1.0, 1.0) or any(term.function.head != "lm" for term in loss.terms):
        return params, []
    if chosen == at:
        return params, [f"temperature {_shown(port, samplers)}"]
    why = "as stated" if stated is not None else "as its rows are only imitated"
    sampled = " and ".join(f"{name} sampled at {t}" for name, t in _by_sampler(port, samplers))
    return params, [f"temperature {chosen}, {why}; {sampled}"]


def _own_samples(node: Node, made: BySample) -> Any:
    """Whether the Model that this node trains wrote a row; of each sample, where they differ."""
    trained = node.states["model"]
    own = [bool(by) and all(trained in m.states.values() for m in by) for by in made]
    return unless_equal(own or [False])


def _of_sampler(makers: tuple[Node, ...]) -> float:
    return float(makers[0].params["temperature"]) or 1.0


def _sampled_at(rows: Port[Any], samplers: Samplers) -> float | tuple[float, ...]:
    """Of all rows, or of each of a prompt's samples; 1 where one has two samplers (a temperature is
    then stated, or not read).
    """
    return unless_equal(samplers.temperatures(rows) or [1.0])


def _by_sampler(rows: Port[Any], samplers: Samplers) -> list[tuple[str, float]]:
    """Each sampler of these rows, in their order, with its temperature."""
    found = dict.fromkeys(makers for makers in samplers.of(rows) if len(makers) == 1)
    return [(makers[0].name, _of_sampler(makers)) for makers in found]


def _shown(rows: Port[Any], samplers: Samplers) -> str:
    """`0.7, that of rollout`; of several samplers: `1.0 of rollout, 0.7 of second`."""
    found = _by_sampler(rows, samplers)
    unsampled = any(not makers for makers in samplers.of(rows))
    if len(found) == 1 and not unsampled:
        return f"{found[0][1]}, that of {found[0][0]}"
    parts = [f"{at} of {name}" for name, at in found]
    return ", ".join([*parts, *(["1.0 of rows that nothing sampled"] if unsampled else [])])


def _rows_of_step(rows: Port[Any], domains: Domains) -> int | None:
    """Rows of a Step before any selection; None for a source without batches."""
    domain = domains.of(rows)
    batch = domain.source.params.get("batch") if domain else None
    return batch * domain.group_size if domain and batch else None
