"""Adapters and subsets: which part of a Model is trained, where its base is not.

Owns: what a user says of them, and what is refused for itself. Does not own: a module of a user's
own (side_module.py), the modules that an adapter adds (operators/kernels/torch/adapters.py), the
files of an adapter (adapter_files.py), which graphs fit together (rules/adapters.py).

An adapter is new weights beside those of the base, which nobody changes. A subset is some of the
base's own weights. Both are a Model's: train nodes, weight edges, checkpoints and estimates know
only the weights that are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from dataflow.calls import declares, require
from dataflow.limits import Limit, choice, number, text, whole
from dataflow.side_module import Side

ALL_LINEAR = "all-linear"
"""Every linear layer of the base but its head, those of experts too."""
Targets = str | tuple[str, ...]
Scale = Literal["lora", "rslora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Two narrow matrices beside each matrix W of the base: `lora` makes it."""

    rank: int = 16
    alpha: float = 32.0
    targets: Targets = ALL_LINEAR
    start: str | None = None
    scale: Scale = "lora"

    @property
    def factor(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.scale == "rslora" else self.rank)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of `targets`, but for `all-linear`, which names none."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    def __str__(self) -> str:
        """`lora(rank=16, alpha=32)`, without what is the default."""
        defaults = {field.name: field.default for field in fields(self)}
        shown_names = [
            name
            for name, default in defaults.items()
            if name in ("rank", "alpha") or getattr(self, name) != default
        ]
        arguments = (f"{name}={_show(getattr(self, name))}" for name in shown_names)
        return f"lora({', '.join(arguments)})"


Adapter = Lora | Side | None
"""Of a Model: new weights beside those of its base, or none."""


@declares
def lora(
    rank: int = 16,
    alpha: float = 32.0,
    targets: Targets = ALL_LINEAR,
    start: str | None = None,
    scale: Scale = "lora",
) -> Lora:
    """Train W x + factor * B (A x) in place of W x, where W [out, in] stays as it is.

    rank: rows of A [rank, in] and columns of B [out, rank]. alpha: factor is alpha / rank. scale:
    `rslora` makes it alpha / sqrt(rank) (arXiv:2312.03732). targets: the names of the base's
    modules that have one (`q_proj`), or `all-linear`. start: a folder with an adapter in peft's
    format, of this rank and these targets, with which it begins; None: A is drawn from the run's
    seed and the Model's name, B is zero, so the Model begins as its base.

    Source: LoRA, arXiv:2106.09685, section 4.1. It has no dropout.
    """
    arguments = {"rank": rank, "alpha": alpha, "start": start, "scale": scale}
    for name, limit in _LORA_LIMITS.items():
        _require(limit, "lora", name, arguments[name])
    if isinstance(targets, list):
        targets = tuple(targets)
    fits = bool(targets) and (isinstance(targets, str) or _are_names(targets))
    expected = "'all-linear', or the names of modules of the base"
    fix = "targets='all-linear', or targets=('q_proj', 'v_proj')"
    require("lora", "targets", targets, fits=fits, expected=expected, fix=fix)
    return Lora(rank=rank, alpha=float(alpha), targets=targets, start=start, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSubset:
    """Some of the base's own weights: `subset` makes it."""

    last: int | None = None
    parts: tuple[str, ...] = ()

    def first_layer(self, layers: int) -> int:
        """The first of so many decoder layers, counted from 0, of which weights may be trained."""
        return 0 if self.last is None else max(0, layers - self.last)

    def has_part(self, name: str) -> bool:
        """Whether a weight of this name in those layers is trained."""
        return not self.parts or any(part in name for part in self.parts)

    def __str__(self) -> str:
        """`subset(last=4, parts=('norm',))`."""
        arguments: list[str] = []
        if self.last is not None:
            arguments.append(f"last={self.last}")
        if self.parts:
            arguments.append(f"parts={self.parts!r}")
        return f"subset({', '.join(arguments)})"


@declares
def subset(last: int | None = None, parts: tuple[str, ...] = ()) -> WeightSubset:
    """Train only some weights of the base: `Model("policy", base, trainable=subset(last=4))`.

    last: those of so many decoder layers, counted from the end, and of the norm behind them; None:
    of all. parts: of these, the weights in whose name one of these words is (`norm`, `self_attn`,
    `mlp.down_proj`); empty: all of them. Embeddings and a language model's head are never among
    them; the head of a Model with head="scalar" always is. Gradients are computed down to the first
    of these layers, and no further.
    """
    _require(_LAST, "subset", "last", last)
    if isinstance(parts, list):
        parts = tuple(parts)
    fits = isinstance(parts, tuple) and (not parts or _are_names(parts))
    expected = "words that are in the names of weights"
    require("subset", "parts", parts, fits=fits, expected=expected, fix="parts=('norm',)")
    fits = last is not None or bool(parts)
    expected = "layers or parts"
    require("subset", "last", last, fits=fits, expected=expected, fix="last=4, or trainable=True")
    return WeightSubset(last=last, parts=parts)


def is_at(path: str, name: str) -> bool:
    """Whether a module at this path has the name that targets say: its last parts, or all."""
    return path == name or path.endswith(f".{name}")


def leaf_of(path: str) -> str:
    """The last part of a module's path: `q_proj`."""
    return path.rpartition(".")[2]


def _require(limit: Limit, where: str, name: str, argument: Any) -> None:
    fix = f"{name}={limit.suggestion(argument)!r}"
    fits, expected = limit.accepts(argument), limit.describe(argument)
    require(where, name, argument, fits=fits, expected=expected, fix=fix)


def _are_names(names: Any) -> bool:
    return isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)


def _show(argument: Any) -> str:
    return f"{argument:g}" if isinstance(argument, float) else repr(argument)


_LAST = whole(1, optional=True, like=4)
_LORA_LIMITS = {
    "rank": whole(1, like=16),
    "alpha": number(0.0, above=True, like=32.0),
    "start": text(optional=True, like="path/to/adapter"),
    "scale": choice("lora", "rslora"),
}
