"""Sound weights: a module computes with nothing random, missing, misshapen or not finite.

Owns: what is refused in a base when its module is loaded, and the messages. Does not own: loading
(models.py), what the files alone show (dataflow/rules/bases.py looks at them before anything
starts).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch.scalar import head_name, scalar_head

_UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
    ImportError, RuntimeError, EOFError, SafetensorError, StrictDataclassError,
    pickle.UnpicklingError,
)  # fmt: skip
"""What transformers raises for an unusable configuration or file of weights."""


_TABLES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""What old files contain besides the weights, and is computed today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What loading reports. mismatched: (name, shape in the file, shape in the module)."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @staticmethod
    def of(info: Mapping[str, Any]) -> Loading:
        """From transformers' loading info."""
        wrong = sorted((n, tuple(stored), tuple(own)) for n, stored, own in info["mismatched_keys"])
        missing = frozenset(info["missing_keys"])
        return Loading(
            missing=missing, unexpected=frozenset(info["unexpected_keys"]), mismatched=tuple(wrong)
        )


@contextmanager
def refused(where: str, base: str) -> Iterator[None]:
    """Turn what transformers raises for a base into one line that names the base."""
    try:
        yield
    except (torch.OutOfMemoryError, KernelError):
        raise
    except _UNREADABLE as error:
        raise KernelError(
            f"{where}: expected a model that can be loaded at {base!r}, found {_found(error):.260}."
            " Fix: a complete model directory or hub name."
        ) from error


def _found(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # its own words say how to let it run code
        return "a file of weights that is damaged, or has more than tensors in it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]).rstrip(".:") or "no reason was given"
    return f"{type(error).__name__}: {said}"


def require_sound(where: str, model: Model, module: nn.Module, loading: Loading) -> None:
    """Raise KernelError unless every weight was read unchanged from the base, and all are finite.

    A Model that is trained, or follows a trained one, may lack its score head, which is then zero;
    one that is only read must have one that is not all zeros.
    """
    for name, stored, own in loading.mismatched:
        fix = "weights that belong to its config.json"
        _refuse(where, model, f"{name} of shape {own}", f"{stored}", fix)
    name = f"{head_name(module)}." if model.head == "scalar" else ""
    head = {n for n in loading.missing if name and n.startswith(name)}
    if gone := sorted(loading.missing - head):
        shown = ", ".join(gone[:5]) + (f" and {len(gone) - 5:,} more" if len(gone) > 5 else "")
        _refuse(where, model, "all weights", f"none for {shown}", "a complete checkpoint")
    if odd := _foreign(module, loading):
        fix = "the config.json of these weights"
        _refuse(where, model, "only weights of this model", f"{odd[0]} too", fix)
    _score_head(where, model, module, head)
    _require_finite(where, model, module)


def _foreign(module: nn.Module, loading: Loading) -> list[str]:
    """Weights of the backbone that are in the files and not in the module."""
    body = f"{getattr(module, 'base_model_prefix', 'model')}."
    return sorted(n for n in loading.unexpected if n.startswith(body) and not n.endswith(_TABLES))


def _score_head(where: str, model: Model, module: nn.Module, missing: set[str]) -> None:
    if model.head != "scalar":
        return
    fresh, weight = model.trainable or model.follows is not None, f"{head_name(module)}.weight"
    fix = "a base that was saved with its trained score head, or a Model that is trained"
    if weight in missing and not fresh:
        found = "none, and nothing here trains one"
        _refuse(where, model, f"a trained score head ({weight})", found, fix)
    with torch.no_grad():
        for name in missing:
            module.get_parameter(name).zero_()
    if not fresh and not scalar_head(module).weight.any():  # type: ignore[operator]
        found = f"{weight} that is all zeros, as it is before training"
        _refuse(where, model, "a trained score head", found, fix)


@torch.no_grad()
def _require_finite(where: str, model: Model, module: nn.Module) -> None:
    """One pass over each weight: aminmax propagates NaN, and an infinity is an extreme."""
    named = {n: p for n, p in _kept(module).items() if p.is_floating_point() and p.numel()}
    if not named:
        return
    finite = torch.stack(
        [torch.isfinite(torch.stack(torch.aminmax(p))).all().cpu() for p in named.values()]
    )
    if not finite.all():
        name = list(named)[int((~finite).nonzero()[0])]
        at = (~torch.isfinite(named[name])).nonzero()
        found = float(named[name][tuple(at[0])])
        place = f"{name}{at[0].tolist()}"
        _refuse(
            where,
            model,
            "finite weights",
            f"{found} at {place} ({len(at):,} there)",
            "a base that did not diverge",
        )


def _kept(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _refuse(where: str, model: Model, expected: str, found: str, fix: str) -> None:
    raise KernelError(f"{where}: expected {expected} at {model.base}, found {found}. Fix: {fix}.")
