"""Rotary position embeddings whose frequencies follow the longest row of a batch.

Owns: up to which length a row's numbers do not depend on the rows next to it, and the refusal of
longer ones. Does not own: rotation itself (transformers), limits of positions
(dataflow/model_files.py), which kinds there are (dataflow/architectures.py).

transformers picks the frequencies of two kinds anew in each forward, for all rows together:
`dynamic` beyond max_position_embeddings, `longrope` beyond original_max_position_embeddings
(`modeling_rope_utils.py`, `dynamic_rope_update`). A long row would then change what the model says
of a short one beside it, and generation and training would differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dataflow.architectures import ROTARY
from dataflow.errors import KernelError

_LIMITS = {
    "dynamic": ("max_position_embeddings", "changes its base by"),
    "longrope": ("original_max_position_embeddings", "picks its factors by"),
}
"""The other kinds have the frequencies of the configuration, whatever the rows."""


def require_steady(module: nn.Module, longest: int) -> None:
    """Raise KernelError if rows of `longest` tokens would get other frequencies than alone."""
    config: Any = module.config
    for kind, limit, name, does in _limits(config):
        if longest > limit:
            raise KernelError(
                f"{config.model_type}: rope_scaling {kind!r} {does} the length of a whole batch, so"
                f" that a row longer than {name} of {limit:,} changes the numbers of all rows"
                f" beside it; found a row of {longest:,} tokens. Fix: prompts and answers of at"
                f" most {limit:,} tokens together, or a base with rope_scaling 'yarn' or 'llama3'."
            )


def find_length_dependent(module: nn.Module) -> str | None:
    """Find a kind of rotary embedding whose frequencies transformers picks anew in each forward; it
    reads positions on the host to do so. None if this module has none.
    """
    config: Any = module.config
    for kind, _ in _kinds(config):
        if kind in _LIMITS:
            return kind
    return None


def require_known_rotary(module: nn.Module, where: str) -> None:
    """Raise KernelError for a kind of rotary embedding that this module does not know of."""
    config: Any = module.config
    for kind, _ in _kinds(config):
        if kind not in ROTARY:
            known = ", ".join(sorted(ROTARY))
            raise KernelError(
                f"{where}: expected rope_scaling of a kind known to keep rows apart ({known}),"
                f" found {kind!r} ({config.model_type}). Fix: a base with one of them."
            )


def _limits(config: Any) -> Iterator[tuple[str, int, str, str]]:
    """kind, length, the name of that length in config.json, what the kind does."""
    for kind, fields in _kinds(config):
        if kind in _LIMITS:
            name, does = _LIMITS[kind]
            limit = fields.get(name) or getattr(config, name, None)
            if limit is None:
                limit = config.max_position_embeddings
            yield kind, int(limit), name, does


def _kinds(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each kind with its fields: one for all layers, or one for each type of layer (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for fields in (parameters, *parameters.values()):
        if isinstance(fields, Mapping) and "rope_type" in fields:
            yield fields["rope_type"], fields
