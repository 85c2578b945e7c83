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
        shapes = info["mismatched_keys"]
        mismatched = sorted((name, tuple(stored), tuple(loaded)) for name, stored, loaded in shapes)
        return Loading(
            missing=frozenset(info["missing_keys"]),
            unexpected=frozenset(info["unexpected_keys"]),
            mismatched=tuple(mismatched),
        )


@contextmanager
def loading_errors(where: str, base: str) -> Iterator[None]:
    """Turn what transformers raises for a base into one line that names the base."""
    try:
        yield
    except (torch.OutOfMemoryError, KernelError):
        raise
    except _UNREADABLE as error:
        raise KernelError(
            f"{where}: expected a model that can be loaded at {base!r}, found"
            f" {_describe(error):.260}. Fix: a complete model directory or hub name."
        ) from error


def _describe(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # its own words say how to let it run code
        return "a file of weights that is damaged, or has more than tensors in it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:2]).rstrip(".:") or "no reason was given"
    return f"{type(error).__name__}: {reason}"


def require_sound(where: str, model: Model, module: nn.Module, loading: Loading) -> None:
    """Raise KernelError unless every weight was read unchanged from the base, and all are finite.

    A Model that is trained, or follows a trained one, may lack its score head, which is then zero;
    one that is only read must have one that is not all zeros.
    """
    for name, stored, own_shape in loading.mismatched:
        fix = "weights that belong to its config.json"
        _refuse(where, model, f"{name} of shape {own_shape}", f"{stored}", fix)
    missing_head: set[str] = set()
    if model.head == "scalar":
        head = f"{head_name(module)}."
        missing_head = {name for name in loading.missing if name.startswith(head)}
    missing = sorted(loading.missing - missing_head)
    if missing:
        names = ", ".join(missing[:5])
        if len(missing) > 5:
            names += f" and {len(missing) - 5:,} more"
        _refuse(where, model, "all weights", f"none for {names}", "a complete checkpoint")
    if foreign := _find_foreign(module, loading):
        fix = "the config.json of these weights"
        _refuse(where, model, "only weights of this model", f"{foreign[0]} too", fix)
    if model.head == "scalar":
        _settle_score_head(where, model, module, missing_head)
    # After the head: what was missing there is only now no longer random.
    _require_finite(where, model, module)


def _find_foreign(module: nn.Module, loading: Loading) -> list[str]:
    """Find weights of the backbone that are in the files and not in the module."""
    body = f"{getattr(module, 'base_model_prefix', 'model')}."
    names = (name for name in loading.unexpected if name.startswith(body))
    return sorted(name for name in names if not name.endswith(_TABLES))


def _settle_score_head(where: str, model: Model, module: nn.Module, missing: set[str]) -> None:
    """Zero a missing score head. Raises KernelError for a Model that is never trained without a
    trained one.
    """
    is_trained = model.trainable or model.follows is not None
    weight = f"{head_name(module)}.weight"
    fix = "a base that was saved with its trained score head, or a Model that is trained"
    if weight in missing and not is_trained:
        problem = "none, and nothing here trains one"
        _refuse(where, model, f"a trained score head ({weight})", problem, fix)
    with torch.no_grad():
        for name in missing:
            module.get_parameter(name).zero_()
    if not is_trained and not scalar_head(module).weight.any():  # type: ignore[operator]
        problem = f"{weight} that is all zeros, as it is before training"
        _refuse(where, model, "a trained score head", problem, fix)


@torch.no_grad()
def _require_finite(where: str, model: Model, module: nn.Module) -> None:
    """Raise KernelError for a weight or buffer with NaN or infinity, after one pass over each."""
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    weights = {n: w for n, w in weights.items() if w.is_floating_point() and w.numel()}
    for name, weight in weights.items():
        if not _is_finite(weight):
            places = (~torch.isfinite(weight)).nonzero()
            number = float(weight[tuple(places[0])])
            problem = f"{number} at {name}{places[0].tolist()} ({len(places):,} there)"
            _refuse(where, model, "finite weights", problem, "a base that did not diverge")


def _is_finite(weight: Tensor) -> bool:
    """aminmax propagates NaN, and an infinity is an extreme: nothing of the weight's size is
    made.
    """
    extremes = torch.stack(torch.aminmax(weight))
    return bool(torch.isfinite(extremes).all())


def _refuse(where: str, model: Model, expected: str, problem: str, fix: str) -> None:
    raise KernelError(f"{where}: expected {expected} at {model.base}, found {problem}. Fix: {fix}.")
