"""Samplers: which generation wrote each row's tokens, and what follows from it.

Owns: the generations of each sample of a prompt, their temperatures, the most tokens that they
write. Does not own: which rows there are (rows.py), what a mixture of them is refused for
(rules/sampling_temperatures.py, rules/training_temperature.py).

A row knows its sampler by its sample number: in `concat(a, b)` the samples of b come after those of
a.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dataflow.graph import Graph
from dataflow.node import Node, Port
from dataflow.operator import Concat
from dataflow.rows import Domain, Domains, physical_port

BySample = tuple[tuple[Node, ...], ...]
"""For each sample of a prompt, the generations that wrote its tokens, in the inputs' order; none
where a source or `answers` did.
"""


MOST_SAMPLES = 1 << 20
"""Of a prompt; with more rows no run could tell them apart (engine/coordinator/tables.py)."""


class Samplers:
    """The samplers of every port of token ids of a graph."""

    def __init__(self, graph: Graph, domains: Domains) -> None:
        self._domains = domains
        self._of: dict[int, BySample] = {}
        # A node's parents stand before it in the graph, so that their samplers are known.
        for node in graph.nodes:
            if any(schema.vocabulary for schema in node.schemas):
                self._of[id(node)] = self._derive(node)

    def of(self, port: Port[Any]) -> BySample:
        """Empty for rows without token ids, and for those that cannot be derived."""
        return self._of.get(id(physical_port(port).node), ())

    def temperatures(self, port: Port[Any]) -> tuple[float, ...] | None:
        """Of each sample; 1 where nothing was sampled. None if a row has two samplers, or one
        whose temperature is no number.
        """
        temperatures: list[float] = []
        for makers in self.of(port):
            temperature = _shared_temperature(makers)
            if temperature is None:
                return None
            temperatures.append(temperature)
        return tuple(temperatures) or None

    def all_at(self, port: Port[Any], temperature: object) -> bool:
        """Whether every row counts as sampled at this temperature."""
        temperatures = self.temperatures(port)
        return temperatures is not None and all(each == temperature for each in temperatures)

    def most_tokens(self, port: Port[Any]) -> float | None:
        """The most tokens of a prompt's rows, of which a Step has as many as their group size;
        None if some have no sampler, or several.
        """
        domain, samples = self._domains.of(port), self.of(port)
        longest = [makers[0].params["max_tokens"] for makers in samples if len(makers) == 1]
        if domain is None or not samples or len(longest) < len(samples):
            return None
        return _sum_longest(domain, longest)

    def group_size(self, port: Port[Any]) -> int:
        """The most rows of a prompt."""
        domain = self._domains.of(port)
        return domain.group_size if domain is not None else 0

    def _derive(self, node: Node) -> BySample:
        domain = self._domains.of_node(node)
        if domain is None or domain.width > MOST_SAMPLES:
            return ()
        if isinstance(node.operator.rows, Concat):
            samples: list[tuple[Node, ...]] = []
            for part in node.inputs.values():
                samples += self.of(part)
            return tuple(samples)
        if node.operator.traits.generates:
            return ((node,),) * domain.width
        if node.operator.traits.writes_tokens:
            return ((),) * domain.width
        inputs = [self.of(port) for port in node.inputs.values() if port.schema.vocabulary]
        wide_inputs = [_widen(samples, domain.width) for samples in inputs if samples]
        return _merge(wide_inputs, domain.width)


def _widen(samples: BySample, width: int) -> BySample:
    """Repeat those of rows that are read by key: each has width / len(samples) descendants."""
    descendants = width // len(samples)
    if descendants == 1:
        return samples
    wide: list[tuple[Node, ...]] = []
    for makers in samples:
        wide += [makers] * descendants
    return tuple(wide)


def _merge(inputs: list[BySample], width: int) -> BySample:
    """The samplers of rows whose tokens come from several inputs: of each sample, those of all."""
    if len(inputs) == 1:
        return inputs[0]
    merged: list[dict[Node, None]] = [{} for _ in range(width)]
    for samples in inputs:
        if len(samples) == width:
            for merged_makers, makers in zip(merged, samples, strict=True):
                merged_makers |= dict.fromkeys(makers)
    return tuple(map(tuple, merged))


def _shared_temperature(makers: tuple[Node, ...]) -> float | None:
    """Of one sample; 1 where nothing was sampled, None where it has several samplers."""
    if not makers:
        return 1.0
    if len(makers) == 1:
        return temperature_of(makers[0].params.get("temperature"))
    return None


def temperature_of(temperature: Any) -> float | None:
    """The temperature of recorded log-probs: greedy rows have those of 1. None if it is none."""
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool):
        return None
    return float(temperature) or 1.0


def _sum_longest(domain: Domain, longest: list[int]) -> float:
    """Sum the most tokens of each row of a prompt. longest: of each sample of these rows."""
    if domain.kind == "subset" and domain.parent is not None and domain.keeps != "pairs":
        return _sum_longest(domain.parent, longest)
    if domain.kind != "concat":
        return domain.group_size * max(longest)
    total, begin = 0.0, 0
    for part in domain.parts:
        total += _sum_longest(part, longest[begin : begin + part.width])
        begin += part.width
    return total


def unless_equal(numbers: Iterable[float]) -> float | tuple[float, ...]:
    """One number if all are the same, else all of them."""
    every = tuple(numbers)
    return every[0] if len(set(every)) == 1 else every
