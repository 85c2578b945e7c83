"""Which paths will compute a node's attention, by what its Model's config.json says.

Owns: reading what the rule looks at. Does not own: the rule (dataflow/attention_paths.py), which
the kernels apply again, to the tensors of each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.attention_paths import AttentionCall, AttentionPath, list_attention_paths
from dataflow.errors import DataError, PlanError
from dataflow.model_files import CONFIG, read_object

PACKED_WORK = ("forward", "train")
"""Kinds of work that feed finished rows to a Model, as a prefix tree."""

_WITH_SINKS = ("gpt_oss",)
"""`model_type`s whose attention has sinks, which no field of config.json says."""


def planned_attention(base: str, dtype: str, *, is_on_gpu: bool) -> tuple[AttentionPath, ...]:
    """List the paths of attention over packed rows; none where the Model's config.json is not here
    or does not say how wide its heads are. Raises PlanError for a damaged file.
    """
    path = Path(base).expanduser() / CONFIG
    try:
        if not path.is_file():
            return ()
        config = read_object(path)
    except DataError as error:
        raise PlanError(str(error)) from error
    widths = _read_head_widths(config)
    if widths is None:
        return ()
    head, value_head = widths
    device = "cpu"
    if is_on_gpu:
        device = "cuda"
    is_capped = bool(config.get("attn_logit_softcapping"))
    call = AttentionCall(
        device=device,
        dtype=dtype,
        head=head,
        value_head=value_head,
        plain=not is_capped and config.get("model_type") not in _WITH_SINKS,
    )
    return list_attention_paths(call)


def _read_head_widths(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The widths of a query head and a value head; None where they are not said."""
    width = config.get("head_dim")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        width = hidden // heads
    # Latent attention (arXiv:2405.04434): a head has a part with positions and one without.
    parts = (config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim"))
    value_width = config.get("v_head_dim")
    query_width = width
    if all(isinstance(part, int) for part in parts):
        query_width = sum(part for part in parts if isinstance(part, int))
    if value_width is None:
        value_width = width
    if isinstance(query_width, int) and isinstance(value_width, int):
        return query_width, value_width
    return None
