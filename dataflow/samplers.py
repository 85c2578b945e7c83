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
from dataflow.rows import Domain, Domains, physical

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
        for node in graph.nodes:
            if any(schema.vocabulary for schema in node.schemas):
                self._of[id(node)] = self._derive(node)

    def of(self, port: Port[Any]) -> BySample:
        """Empty for rows without token ids, and for those that cannot be derived."""
        return self._of.get(id(physical(port).node), ())

    def temperatures(self, port: Port[Any]) -> tuple[float, ...] | None:
        """Of each sample; 1 where nothing was sampled. None if a row has two samplers, or one
        whose temperature is no number.
        """
        found = [_one(makers) for makers in self.of(port)]
        known = [temperature for temperature in found if temperature is not None]
        return tuple(known) if found and len(known) == len(found) else None

    def all_at(self, port: Port[Any], temperature: object) -> bool:
        """Whether every row counts as sampled at this temperature."""
        found = self.temperatures(port)
        return found is not None and all(each == temperature for each in found)

    def most_tokens(self, port: Port[Any]) -> float | None:
        """The most tokens of a prompt's rows, of which a Step has as many as their group size;
        None if some have no sampler, or several.
        """
        domain, made = self._domains.of(port), self.of(port)
        longest = [makers[0].params["max_tokens"] for makers in made if len(makers) == 1]
        if domain is None or not made or len(longest) < len(made):
            return None
        return _most(domain, longest)

    def group_size(self, port: Port[Any]) -> int:
        """Most rows of a prompt."""
        domain = self._domains.of(port)
        return domain.group_size if domain is not None else 0

    def _derive(self, node: Node) -> BySample:
        domain = self._domains.of_node(node)
        if domain is None or domain.width > MOST_SAMPLES:
            return ()
        if isinstance(node.operator.rows, Concat):
            return tuple(sample for part in node.inputs.values() for sample in self.of(part))
        if node.operator.traits.writes_tokens:
            return ((node,) if node.operator.traits.generates else (),) * domain.width
        above = [self.of(port) for port in node.inputs.values() if port.schema.vocabulary]
        return _merged([_wide(one, domain.width) for one in above if one], domain.width)


def _wide(above: BySample, width: int) -> BySample:
    """Those of rows that are read by key: each has width / len(above) descendants."""
    each = width // len(above)
    return above if each == 1 else tuple(one for one in above for _ in range(each))


def _merged(above: list[BySample], width: int) -> BySample:
    if len(above) == 1:
        return above[0]
    fit = [one for one in above if len(one) == width]
    return tuple(
        tuple(dict.fromkeys(maker for one in fit for maker in one[at])) for at in range(width)
    )


def _one(makers: tuple[Node, ...]) -> float | None:
    if not makers:
        return 1.0
    return temperature_of(makers[0].params.get("temperature")) if len(makers) == 1 else None


def temperature_of(temperature: Any) -> float | None:
    """The temperature of recorded log-probs: greedy rows have those of 1. None if it is none."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    return float(temperature) or 1.0 if number else None


def _most(domain: Domain, longest: list[int]) -> float:
    """longest: of each sample of these rows."""
    if domain.kind == "subset" and domain.parent is not None and domain.keeps != "pairs":
        return _most(domain.parent, longest)
    if domain.kind != "concat":
        return domain.group_size * max(longest)
    total, begin = 0.0, 0
    for part in domain.parts:
        total += _most(part, longest[begin : begin + part.width])
        begin += part.width
    return total


def unless_equal(numbers: Iterable[float]) -> float | tuple[float, ...]:
    """One number if all are the same, else all of them."""
    found = tuple(numbers)
    return found[0] if len(set(found)) == 1 else found
