"""One attention function for every pass: the seam between transformers' decoders and packed tokens.

Owns: the function registered with transformers under the name ATTENTION, the protocol of the pass
that it calls, and the call of a module on packed tokens. Does not own: any pass (cache.py has
those of generation, shared_attention.py that of training), weights (models.py).

A module loaded with `attn_implementation=ATTENTION` runs on [1, tokens]: rows lie one after
another, positions are explicit, and linear layers, norms and MLPs never see padding. Only the pass
decides which token attends to which. It travels as a keyword argument through the module's
forward, never in a global, so two kernels cannot share one by mistake:

    logits = forward(module, ids, positions, my_pass)

transformers builds no mask for an implementation without a registered mask function, so none is
computed in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dataflow.errors import KernelError
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.rotary import require_steady

ATTENTION = "dataflow"
"""The value for `attn_implementation`."""


class AttentionPass(Protocol):
    """Who attends to whom in one forward over packed tokens.

    longest: the most keys that one query attends to where there is no window.
    """

    @property
    def longest(self) -> int: ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """query [tokens, heads, dim], key [tokens, key heads, dim], rotated, value [tokens, key
        heads, any] -> [tokens, heads, any].

        Query heads h * r .. h * r + r - 1 share key head h, with r = heads / key heads. The inputs
        may be strided views; the result may be one too.
        """
        ...


_IGNORED = frozenset({
    "position_ids", "use_cache", "cache_position", "is_causal", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
})  # fmt: skip
"""Keywords that change no logit: positions are in the queries and keys already, transformers caches
nothing, what is returned besides is not read, and `is_causal` is refused below if it is false."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attention_pass: AttentionPass | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by the pass; transformers calls this: query [1, heads, tokens, dim] -> [1, tokens,
    heads, dim].
    """
    if attention_pass is None:
        raise KernelError(
            f"{type(module).__name__}: expected attention_pass=, which says who attends to whom,"
            " found none. Fix: call operators.kernels.torch.attention.forward, or load the model"
            " with another attn_implementation."
        )
    _refuse(module, attention_mask, dropout, sliding_window, kwargs)
    if sliding_window is not None and sliding_window >= attention_pass.longest:
        sliding_window = None  # it hides nothing: the layer attends as one without a window
    kind = AttentionKind(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer: Any = module.layer_idx
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_pass.attend(layer, q, k, v, kind).unsqueeze(0), None


def _refuse(
    module: nn.Module,
    mask: Tensor | None,
    dropout: float,
    window: int | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Raise KernelError for anything that would change the numbers and is not implemented."""
    refused = [
        f"{name}="
        for name, argument in kwargs.items()
        if name not in _IGNORED and _asks_for_something(argument)
    ]
    if mask is not None:
        refused.append("attention_mask=")
    if dropout:
        refused.append(f"dropout={dropout}")
    if window is not None and window < 1:
        refused.append(f"sliding_window={window}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        refused.append("is_causal=False")
    if refused:
        raise KernelError(
            f"{type(module).__name__}: packed attention is causal, with scaling=, sliding_window=,"
            f" softcap= and s_aux= of each layer, found {', '.join(refused)} as well, which would"
            " change the numbers. Fix: a base of another architecture, or this base without it in"
            " its config.json."
        )


def _asks_for_something(argument: Any) -> bool:
    """Whether a keyword's argument asks for something: None and False do not."""
    return argument is not None and argument is not False


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def forward(
    module: nn.Module,
    ids: Tensor,
    positions: Tensor,
    attention_pass: AttentionPass,
    keep: Tensor | None = None,
) -> Tensor:
    """Compute the logits of a causal language model on packed tokens.

    ids, positions int64 [tokens] -> [tokens, vocabulary]. keep int64 [kept]: only the logits of the
    tokens with these indices are computed: [kept, vocabulary]. Raises KernelError for rows at whose
    length rotary frequencies would depend on other rows (rotary.py).
    """
    require_steady(module, attention_pass.longest)
    # 0 is the default of transformers' decoders: the logits of all tokens.
    out = module(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        attention_pass=attention_pass,
        logits_to_keep=0 if keep is None else keep,
    )
    return out.logits[0]


def compute_hidden(
    module: nn.Module, ids: Tensor, positions: Tensor, attention_pass: AttentionPass
) -> Tensor:
    """Compute the last hidden states of packed tokens: int64 [tokens] twice -> [tokens, hidden].
    Raises as `forward` does, and for a module without a backbone of its own.
    """
    require_steady(module, attention_pass.longest)
    backbone: Any = module.base_model
    out = backbone(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        attention_pass=attention_pass,
    )
    if not hasattr(out, "last_hidden_state"):
        raise KernelError(
            f"{type(module).__name__}: expected a backbone that returns hidden states as its"
            f" base_model, found {type(backbone).__name__}. Fix: a base of another architecture."
        )
    return out.last_hidden_state[0]
