"""Fill in parameters that follow from elsewhere in the graph.

Owns: the temperature of log-probs and training, the most tokens of a Step (for a constant divisor
of the loss), and the longest rows that all readers take. Does not own: defaults (operators/).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node, Port
from dataflow.positions import row_positions
from dataflow.rows import Domains
from dataflow.samplers import BySample, Samplers, unless_equal
from engine.plan.draft import Draft
from engine.plan.part_names import names_of_parts


def resolve_parameters(draft: Draft) -> Draft:
    """Give logprobs and train their rows' temperature, and train `max_tokens` and a Step's rows.

    A ratio of log-probs means something at one temperature only; one that the user stated stays.
    Rows that are greedy (0.0) or not sampled count as sampled at 1.0. Supervised losses, which only
    imitate their rows, train at 1.0. Where samples of a prompt differ, as in a concat of two
    generations, the temperature is a tuple with that of each, and max_tokens their mean.
    """
    resolver = _Resolver(draft.graph)
    graph = draft.graph.map(resolver.change)
    return replace(draft, graph=graph, notes=(*draft.notes, *resolver.notes))


class _Resolver:
    """Fills in the parameters of one node after another, by what the whole graph says."""

    def __init__(self, graph: Graph) -> None:
        self._domains = Domains(graph)
        self._samplers = Samplers(graph, self._domains)
        self._positions = row_positions(graph)
        self._part_names = names_of_parts(graph)
        self.notes: list[str] = []

    def change(self, node: Node) -> Node:
        """The node with what follows for it; adds to the notes."""
        if node.name in self._positions and node.operator.traits.writes_tokens:
            return self._with_positions(node)
        if node.name in self._part_names:
            part_names = self._part_names[node.name]
            return node.changed(params=node.params | {"part_names": part_names})
        if node.operator.work == "train":
            params, notes = _resolve_train(node, self._domains, self._samplers)
        elif node.operator.log_probs and node.params["temperature"] is None:
            params, notes = _resolve_logprobs(node, self._samplers)
        else:
            return node
        self.notes += [f"{node.name}: {note}" for note in notes]
        return node.changed(params=node.params | params)

    def _with_positions(self, node: Node) -> Node:
        least = self._positions[node.name]
        if least.node.name != node.name and node.operator.traits.generates:
            bound = f"rows of at most {least.limit} tokens, the positions of {least.model}"
            self.notes.append(f"{node.name}: {bound}")
        positions = {"positions": least.limit, "positions_of": least.model}
        return node.changed(params=node.params | positions)


def _resolve_logprobs(node: Node, samplers: Samplers) -> tuple[dict[str, Any], list[str]]:
    """The temperature of log-probs without a stated one, and its note."""
    rows = node.inputs["rows"]
    temperature = _sampled_at(rows, samplers)
    params = {"temperature": temperature}
    if temperature == 1.0:
        return params, []
    return params, [f"temperature {_show_temperature(rows, samplers)}"]


def _resolve_train(
    node: Node, domains: Domains, samplers: Samplers
) -> tuple[dict[str, Any], list[str]]:
    """What training needs to know of its rows, those of terms of its loss included, and notes. A
    stated temperature is that of the node's own rows.
    """
    params_by_set: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name, port in row_sets(node).items():
        loss = node.params["loss"].on(name)
        stated = node.params["temperature"] if name == ROWS else None
        step_rows = _count_step_rows(port, domains)
        params, set_notes = _resolve_row_set(port, loss, stated, step_rows, samplers)
        params["own_samples"] = _find_own_samples(node, samplers.of(port))
        params_by_set[name] = params
        for note in set_notes:
            notes.append(note if name == ROWS else f"{name}: {note}")
    params = params_by_set.pop(ROWS)
    if params_by_set:
        params["own_rows"] = params_by_set
    return params, notes


def _resolve_row_set(
    port: Port[Any], loss: Loss, stated: float | None, step_rows: int | None, samplers: Samplers
) -> tuple[dict[str, Any], list[str]]:
    """What training needs to know of one row set, and notes. loss: the terms on it; stated: its
    temperature, if the user said one; step_rows: of a Step.
    """
    sampled_at = _sampled_at(port, samplers)
    temperature = sampled_at
    if stated is not None:
        temperature = stated
    elif loss.supervised:
        temperature = 1.0
    params: dict[str, Any] = {"temperature": temperature, "step_rows": step_rows}
    recorded_temperatures = _find_recorded_temperatures(samplers.of(port))
    params["sampler_temperature"] = unless_equal(recorded_temperatures or [0.0])
    if not any(recorded_temperatures):
        return params, []
    most = samplers.most_tokens(port)
    group_size = samplers.group_size(port)
    if most is not None and group_size:
        # The mean of the samples, an int where it is a whole number.
        is_whole = most % group_size == 0
        params["max_tokens"] = int(most) // group_size if is_whole else most / group_size
    is_plain = temperature == 1.0 and sampled_at == 1.0
    if is_plain or any(term.function.head != "lm" for term in loss.terms):
        return params, []
    if temperature == sampled_at:
        return params, [f"temperature {_show_temperature(port, samplers)}"]
    why = "as stated" if stated is not None else "as its rows are only imitated"
    temperatures = _temperatures_by_sampler(port, samplers).items()
    sampled = " and ".join(f"{name} sampled at {t}" for name, t in temperatures)
    return params, [f"temperature {temperature}, {why}; {sampled}"]


def _find_recorded_temperatures(samples: BySample) -> list[float]:
    """The temperature of each sample's recorded log-probs; 0 for rows without one sampler, which
    have none to compare with.
    """
    temperatures: list[float] = []
    for makers in samples:
        has_one_sampler = len(makers) == 1
        temperatures.append(_temperature_of(makers[0]) if has_one_sampler else 0.0)
    return temperatures


def _find_own_samples(node: Node, samples: BySample) -> Any:
    """Whether the Model that this node trains wrote a row; of each sample, where they differ."""
    trained_model = node.states["model"]
    own_samples: list[bool] = []
    for makers in samples:
        is_own = all(trained_model in maker.states.values() for maker in makers)
        own_samples.append(bool(makers) and is_own)
    return unless_equal(own_samples or [False])


def _temperature_of(sampler: Node) -> float:
    """Greedy rows (0.0) count as sampled at 1.0."""
    return float(sampler.params["temperature"]) or 1.0


def _sampled_at(rows: Port[Any], samplers: Samplers) -> float | tuple[float, ...]:
    """The temperature of all rows, or of each of a prompt's samples. It is 1 where a row has two
    samplers (a temperature is then stated, or not read).
    """
    return unless_equal(samplers.temperatures(rows) or [1.0])


def _temperatures_by_sampler(rows: Port[Any], samplers: Samplers) -> dict[str, float]:
    """Each sampler of these rows, in their order, with its temperature."""
    makers_of_samples = samplers.of(rows)
    single = (makers[0] for makers in makers_of_samples if len(makers) == 1)
    return {sampler.name: _temperature_of(sampler) for sampler in single}


def _show_temperature(rows: Port[Any], samplers: Samplers) -> str:
    """`0.7, that of rollout`; of several samplers: `1.0 of rollout, 0.7 of second`."""
    temperatures = _temperatures_by_sampler(rows, samplers)
    has_unsampled = any(not makers for makers in samplers.of(rows))
    if len(temperatures) == 1 and not has_unsampled:
        ((name, temperature),) = temperatures.items()
        return f"{temperature}, that of {name}"
    parts = [f"{temperature} of {name}" for name, temperature in temperatures.items()]
    if has_unsampled:
        parts.append("1.0 of rows that nothing sampled")
    return ", ".join(parts)


def _count_step_rows(rows: Port[Any], domains: Domains) -> int | None:
    """Rows of a Step before any selection; None for a source without batches."""
    domain = domains.of(rows)
    batch = domain.source.params.get("batch") if domain else None
    return batch * domain.group_size if domain and batch else None
