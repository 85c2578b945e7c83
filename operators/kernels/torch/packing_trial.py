"""Packable modules: on packed tokens they compute what they compute of each row alone.

Owns: the trial of a loaded module that shows it, and its messages. Does not own: attention itself
(attention.py), sound weights (soundness.py).

A module may mix tokens where packed attention does not see it (convolutions, recurrences, masks of
its own), call attention in ways that a cache keyed by layers cannot follow, or number positions by
itself. None of this can be read from a configuration, so a few tokens are fed once when it is
loaded, under an attention implementation that also says which mask transformers would have built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dataflow.errors import KernelError
from operators.kernels.torch.attention import ATTENTION, attention, compute_hidden
from operators.kernels.torch.attention_kind import AttentionKind, attend_packed
from operators.kernels.torch.rotary import require_known_rotary
from operators.kernels.torch.soundness import loading_errors

TRIAL = "dataflow_trial"
"""The attention implementation of the trial: ATTENTION with a mask that is looked at."""

_ROW, _OTHER = 3, 2
"""Tokens of the row that is compared, and of the one before it."""

_FULL, _STRANGE = 0, -1
"""What a trial's mask says besides a window."""

_ALIKE = 0.02
"""The greatest difference of queries and keys of the first layer, relative to the greatest of them:
far above the rounding of bfloat16, far below a turn by another position."""


def require_packable(where: str, module: PreTrainedModel) -> None:
    """Raise KernelError for a module whose numbers of a row would depend on the rows packed with it
    or differ from those of transformers.

    The module must be in eval mode, and loaded with ATTENTION.
    """
    require_known_rotary(module, where)
    ids = torch.arange(1, 1 + _ROW + _OTHER, device=module.device) % module.config.vocab_size
    alone, packed = _Trial([_ROW]), _Trial([_OTHER, _ROW])
    with torch.inference_mode(), loading_errors(where, str(module.name_or_path)):
        with _implementation(module, TRIAL):
            states_alone = _feed(where, module, ids[_OTHER:], alone)
        _require_layers(where, module, alone)
        _require_masks(where, module, alone)
        with _spoil_embeddings(module, _OTHER):
            states_packed = _feed(where, module, ids, packed)[_OTHER:]
    # A row that is not finite by itself would show nothing of the one before it.
    if _are_finite([states_alone, *alone.fed]):
        _require_apart(where, module, states_packed, packed)
        _require_positions(where, module, alone, packed)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.isfinite().all() for tensor in tensors)


def _feed(where: str, module: nn.Module, ids: Tensor, trial: _Trial) -> Tensor:
    positions = torch.cat([torch.arange(n, device=ids.device) for n in trial.rows])
    try:
        return compute_hidden(module, ids, positions, trial)
    except KernelError as error:
        raise KernelError(f"{where}: {error}") from error


@dataclass(slots=True, eq=False)
class _Trial:
    """The AttentionPass of a trial: rows one after another, each causal.

    layers, masks, windows: by call. fed: query, key and value of each call, for the last row.
    """

    rows: list[int]
    layers: list[int] = field(default_factory=list)
    fed: list[Tensor] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return max(self.rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """See AttentionPass."""
        self.layers.append(layer)
        last_row = slice(-self.rows[-1], None)
        self.fed += [query[last_row], key[last_row], value[last_row]]
        outs: list[Tensor] = []
        by_row = (tensor.split(self.rows) for tensor in (query, key, value))
        for q, k, v in zip(*by_row, strict=True):
            out = attend_packed(q[None], k[None], v[None], kind)
            outs.append(out[0])
        return torch.cat(outs)


def _attention_of_trial(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_pass: _Trial | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Note the mask and the window of a layer, and attend; transformers calls this in the trial."""
    if attention_pass is None:
        raise KernelError(
            f"{type(module).__name__}: expected a decoder that passes keywords on to its attention"
            " (attention_pass=), found one that drops them. Fix: a base of another architecture."
        )
    attention_pass.masks.append(attention_mask)
    attention_pass.windows.append(sliding_window)
    return attention(
        module,
        query,
        key,
        value,
        None,
        attention_pass=attention_pass,
        sliding_window=sliding_window,
        **kwargs,
    )


def _describe_mask(
    *,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Return what a mask says in its place: int64 [1, 1, 1, 1], the window, _FULL or _STRANGE."""
    window = local_size or 1 << 20
    # Positions on both sides of where the window begins.
    at = torch.tensor([0, 1, 2, window - 1, window, window + 1, 2 * window + 1], device=device)
    q, k = at[:, None], at[None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        seen = mask_function(zero, zero, q, k)
    except IndexError:  # it looks positions up in a table of the tokens that were fed
        seen = torch.zeros((), dtype=torch.bool)
    expected = k <= q
    if local_size:
        expected &= q - k < window
    if torch.equal(seen.expand(len(at), -1), expected):
        code = local_size or _FULL
    else:
        code = _STRANGE
    return torch.full((1, 1, 1, 1), code)


ALL_ATTENTION_FUNCTIONS.register(TRIAL, _attention_of_trial)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRIAL, _describe_mask)


@contextmanager
def _implementation(module: PreTrainedModel, name: str) -> Iterator[None]:
    module.config._attn_implementation = name
    try:
        yield
    finally:
        module.config._attn_implementation = ATTENTION


@contextmanager
def _spoil_embeddings(module: PreTrainedModel, count: int) -> Iterator[None]:
    """Make the embeddings of the first `count` tokens NaN, and so all that they get into."""

    def spoil(_: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        embedded = embedded.clone()
        embedded[:, :count] = torch.nan
        return embedded

    hook = module.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def _require_masks(where: str, module: nn.Module, trial: _Trial) -> None:
    """Raise unless the mask that transformers builds for each layer is what the layer's keywords
    say.
    """
    for layer, mask, window in zip(trial.layers, trial.masks, trial.windows, strict=True):
        # More than one number is a mask that was not made by _describe_mask.
        code = int(mask) if mask is not None and mask.numel() == 1 else _STRANGE
        if code == _STRANGE:
            problem = "a mask that is neither causal nor a sliding window"
        elif code != (window or _FULL):
            problem = f"a mask with {_name_window(code)} and an attention call with"
            problem += f" {_name_window(window)}"
        else:
            continue
        _refuse(where, module, "causal attention, in a sliding window or not", problem, layer)


def _name_window(window: int | None) -> str:
    return f"a window of {window}" if window else "no window"


def _require_layers(where: str, module: nn.Module, trial: _Trial) -> None:
    """Raise unless each layer attends once, for its keys are cached by the number of the layer."""
    if not trial.layers:
        _refuse(where, module, "layers that call transformers' attention interface", "none")
    repeated = [layer for layer in set(trial.layers) if trial.layers.count(layer) > 1]
    if repeated:
        problem = f"{trial.layers.count(repeated[0])} of them"
        _refuse(where, module, "one attention per layer", problem, repeated[0])


def _require_apart(where: str, module: nn.Module, states: Tensor, trial: _Trial) -> None:
    """Raise if anything of the row before gets into a row: NaN, then."""
    for call, layer in enumerate(trial.layers):
        fed = trial.fed[3 * call : 3 * call + 3]
        if not _are_finite(fed):
            _refuse(where, module, *_APART, layer)
    if not _are_finite([states]):
        _refuse(where, module, *_APART)


_APART = (
    "a module in which only attention passes on what other tokens say",
    "numbers of one row in those of the next (a convolution, a recurrence or a mixing of its own)",
)


def _require_positions(where: str, module: nn.Module, alone: _Trial, packed: _Trial) -> None:
    """Raise unless the first layer sees a row at the same positions, wherever it is packed."""
    names = ("queries", "keys", "values")
    for name, one, other in zip(names, alone.fed[:3], packed.fed[:3], strict=True):
        difference = (one - other).abs().max()
        if difference > _ALIKE * one.abs().max():
            expected = "positions to be taken from position_ids"
            _refuse(where, module, expected, f"other {name} where another row is before it")


def _refuse(
    where: str, module: nn.Module, expected: str, problem: str, layer: int | None = None
) -> None:
    config: Any = module.config
    place = "" if layer is None else f" in layer {layer}"
    raise KernelError(
        f"{where}: expected {expected}, found {problem}{place} ({config.model_type}). Fix: a"
        " decoder such as Qwen2, Qwen3, Llama, Mistral or Gemma 2."
    )
