"""Seconds of one pass of a Model over tokens, on one place.

Owns: the operations, bytes and collectives of a pass, and what bounds it. Does not own: how many
passes there are (decode.py, training.py), the rates (devices.py).

    seconds = max(compute, memory) + link + latency

    compute  operations / (rate of the dtype x share reached)
    memory   (weights + cached keys and values) / (rate of the memory x share reached)
    link     bytes of the collectives of tensor ranks / (rate between them x share reached)
    latency  seconds a pass, a layer, a row and a collective

Tensor ranks divide operations, weights and cache; context ranks divide the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from dataflow.trained_weights import TrainedPart
from engine.plan.cost.devices import Kind, Place
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.models import Head, Shape

Bound = Literal["compute", "memory", "link", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A Model as the formulas need it. dtype: of its weights, cache and products."""

    parameters: int
    shape: Shape
    dtype: str = "bfloat16"
    head: Head = "lm"
    trained: TrainedPart | None = None
    """What is trained, where that is a part; None: all."""

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return WIDTHS[self.dtype]

    @property
    def body(self) -> int:
        """Parameters that every token is multiplied with: no embedding, and no head of a language
        model.
        """
        return self.parameters - self.table_parameters

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and of a language model's head that is not tied to it."""
        return self.shape.tables(self.head)

    @property
    def added_parameters(self) -> int:
        """Parameters beside those of the base, those of an adapter, that every token is multiplied
        with.
        """
        if self.trained is None or not self.trained.is_added:
            return 0
        return self.trained.parameters

    @property
    def head_parameters(self) -> int:
        """Parameters that every predicted token is multiplied with."""
        outputs = self.shape.vocabulary if self.head == "lm" else 1
        return self.shape.hidden * outputs

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.width

    @property
    def version_bytes(self) -> int:
        """Bytes of a version: of the weights that are trained."""
        return self.trained_parameters(1) * self.width

    @property
    def passed_share(self) -> float:
        """The share of the layers that a backward pass goes through."""
        if self.trained is None:
            return 1.0
        return self.trained.layers / max(1, self.shape.layers)

    def trained_parameters(self, tensor: int) -> int:
        """Parameters that one of so many tensor ranks trains."""
        part = self.part_parameters(tensor)
        if self.trained is None:
            return part
        return self.trained.scaled(part, self.parameters).parameters

    def part_parameters(self, tensor: int) -> int:
        """Parameters that one of so many tensor ranks has: norms are whole."""
        return self.parameters - self._count_divided(1) + self._count_divided(tensor)

    def part_tables(self, tensor: int) -> int:
        """Parameters of embedding and head that one of so many tensor ranks has."""
        return self.shape.part(tensor, self.head).tables(self.head)

    def _count_divided(self, tensor: int) -> int:
        """Parameters that one of so many tensor ranks has of what these may divide."""
        return self.shape.part(tensor, self.head).matrices + self.part_tables(tensor)

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a pass reads: an embedding that is only looked up is not."""
        return (self.body + self.head_parameters + self.added_parameters) * self.width

    @property
    def cached_bytes(self) -> int:
        """Bytes of keys and values of one token (Pope et al., arXiv:2211.05102, section 2)."""
        return 2 * self.shape.layers * self.shape.kv * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Predicted seconds, and those of each part, of which compute and memory overlap."""

    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    latency: float = 0.0

    def __add__(self, other: Time) -> Time:
        return Time(
            seconds=self.seconds + other.seconds,
            compute=self.compute + other.compute,
            memory=self.memory + other.memory,
            link=self.link + other.link,
            latency=self.latency + other.latency,
        )

    def times(self, count: float) -> Time:
        """The time of so many, one after another; or so many times as long."""
        return Time(
            seconds=self.seconds * count,
            compute=self.compute * count,
            memory=self.memory * count,
            link=self.link * count,
            latency=self.latency * count,
        )

    @property
    def bound(self) -> Bound:
        """The part that takes longest."""
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory,
            "link": self.link,
            "latency": self.latency,
        }
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often one pass does what a forward pass does once: 3 times with the backward pass of a
    Model that is trained whole. base, added, head: products with the weights of the base, of an
    adapter, of the head. rest: attention, collectives of tensor ranks, and what each layer takes to
    begin. exchanges: collectives of context ranks, as a backward pass sends what a forward one did.
    """

    base: float = 1.0
    added: float = 1.0
    head: float = 1.0
    rest: float = 1.0
    exchanges: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PassParts:
    """Many passes in parts of equal ones, float64 [parts]: how many passes each is, and what one of
    them has, as `Passes.at` says it. predicted: whether the tokens that are fed get logits.
    """

    count: np.ndarray
    tokens: np.ndarray
    keys: np.ndarray
    cached: np.ndarray
    rows: np.ndarray
    predicted: bool = True

    @cached_property
    def sums(self) -> tuple[float, float, float, float, float]:
        """Passes, and tokens, keys, cached tokens and rows of all of them together."""
        count = self.count
        parts = (self.tokens, self.keys, self.cached, self.rows)
        tokens, keys, cached, rows = (float(count @ part) for part in parts)
        return float(count.sum()), tokens, keys, cached, rows


def operations(model: Sizes, tokens: float, keys: float, predicted: float) -> float:
    """Count 2 a parameter and token, and two products of attention, 4 * layers * width a token and
    key (Kaplan et al., arXiv:2001.08361, section 2.1). keys: of all tokens together.
    """
    attention = 4.0 * model.shape.layers * model.shape.attention
    return 2.0 * model.body * tokens + 2.0 * model.head_parameters * predicted + attention * keys


def exchanged_bytes(shape: Shape, width: int, tensor: int, context: int) -> float:
    """Bytes that a context rank sends, and receives, in a forward pass for each token of all ranks:
    in each layer the queries, keys and values of its tokens, for other ranks' heads, and what
    attention made of its heads, for other ranks' tokens (DeepSpeed-Ulysses, arXiv:2309.14509,
    section 3.2). width: bytes of a number. tensor: ranks that divide the heads before.
    """
    part = shape.part(tensor)
    # Each rank gets as many heads of keys as any other; fewer than there are ranks are repeated.
    key_heads = math.lcm(max(1, part.kv_heads), context)
    widths = 2 * part.attention + 2 * key_heads * shape.head_dim
    return shape.layers * widths * width * (context - 1) / context**2


def _gathered_columns(model: Sizes, tensor: int) -> float:
    """Bytes of the logits of one token that the first of so many ranks gathers, to draw from."""
    part = model.shape.part(tensor)
    return float(part.vocabulary * (part.sharers - 1) * model.width)


class Passes:
    """Passes of one kind of a Model on a place; `at` is cheap, for schedules of many passes.

    repeats: 1 of each where there is no backward pass.
    """

    def __init__(
        self, model: Sizes, where: Place, kind: Kind, repeats: Repeats | None = None
    ) -> None:
        repeats = repeats or Repeats()
        reached, shape = where.coefficients[kind], model.shape
        rate = where.operations(model.dtype) * reached.compute
        rate = rate * where.tensor * where.context
        reads = where.device.memory_rate * reached.reads
        if where.device.is_gpu:  # the memory of a host has one rate, however many read
            reads *= where.tensor
        products = model.body * repeats.base + model.added_parameters * repeats.added
        self._token = 2.0 * products / rate
        self._predicted = 2.0 * model.head_parameters * repeats.head / rate
        attention = 4.0 * shape.layers * shape.attention * repeats.rest
        self._key = attention / (rate * reached.attention)
        self._weights = repeats.base * model.read_bytes / reads
        self._cached = model.cached_bytes / reads
        self._row = reached.row
        self._latency = repeats.rest * (reached.step + shape.layers * reached.layer)
        self._link = self._predicted_link = 0.0
        if where.tensor > 1:
            # Two all-reduces a layer, each of 2 (t - 1) / t of its bytes (Shoeybi et al.,
            # arXiv:1909.08053, section 3).
            moved = 4.0 * (where.tensor - 1) / where.tensor * shape.hidden * model.width
            link_rate = where.device.link * reached.link * where.context
            self._link = repeats.rest * shape.layers * moved / link_rate
            self._latency += repeats.rest * 2 * shape.layers * reached.hop
            if kind == "decode" and model.head == "lm":
                self._predicted_link = _gathered_columns(model, where.tensor) / link_rate
        if where.context > 1:
            moved = exchanged_bytes(shape, model.width, where.tensor, where.context)
            self._link += repeats.exchanges * moved / (where.device.link * reached.link)
            self._latency += repeats.exchanges * 2 * shape.layers * reached.hop

    def at(
        self,
        tokens: float,
        keys: float,
        *,
        cached: float = 0.0,
        predicted: float | None = None,
        rows: float = 0.0,
    ) -> Time:
        """One pass. tokens: fed; keys: that they attend to, all together; cached: tokens whose keys
        and values are read; predicted: tokens that get logits, all of them unless said; rows: whose
        bookkeeping it has.
        """
        if predicted is None:
            predicted = tokens
        compute, memory, link, latency = self._parts(tokens, keys, cached, predicted, rows)
        return Time(
            seconds=max(compute, memory) + link + latency,
            compute=compute,
            memory=memory,
            link=link,
            latency=latency,
        )

    def seconds_at(
        self, tokens: float, keys: float, cached: float, predicted: float, rows: float
    ) -> float:
        """Seconds of one pass, as of `at`, for those who need no parts of them."""
        compute, memory, link, latency = self._parts(tokens, keys, cached, predicted, rows)
        return max(compute, memory) + link + latency

    def _parts(
        self, tokens: float, keys: float, cached: float, predicted: float, rows: float
    ) -> tuple[float, float, float, float]:
        """Seconds of compute, memory, link and latency."""
        compute = self._token * tokens + self._predicted * predicted + self._key * keys
        memory = self._weights + self._cached * cached
        link = self._link * tokens + self._predicted_link * predicted
        return compute, memory, link, self._latency + self._row * rows

    def seconds_of_each(self, parts: PassParts) -> np.ndarray:
        """float64 [parts]: seconds of one pass of each part."""
        slowest = np.maximum(*self._overlapping(parts))
        link = self._fed_link(parts) * parts.tokens
        return slowest + link + (self._latency + self._row * parts.rows)

    def total(self, parts: PassParts) -> Time:
        """All passes of all parts."""
        compute, memory = self._overlapping(parts)
        count, tokens, keys, cached, rows = parts.sums
        link = self._fed_link(parts) * tokens
        latency = self._latency * count + self._row * rows
        return Time(
            seconds=float(parts.count @ np.maximum(compute, memory)) + link + latency,
            compute=self._fed_token(parts) * tokens + self._key * keys,
            memory=self._weights * count + self._cached * cached,
            link=link,
            latency=latency,
        )

    def _overlapping(self, parts: PassParts) -> tuple[np.ndarray, np.ndarray]:
        """float64 [parts]: seconds of compute and of memory of one pass of each part."""
        compute = self._fed_token(parts) * parts.tokens + self._key * parts.keys
        return compute, self._weights + self._cached * parts.cached

    def _fed_link(self, parts: PassParts) -> float:
        """Seconds of collectives of a token that is fed."""
        return self._link + self._predicted_link if parts.predicted else self._link

    def _fed_token(self, parts: PassParts) -> float:
        """Seconds of compute of a token that is fed."""
        return self._token + self._predicted if parts.predicted else self._token
