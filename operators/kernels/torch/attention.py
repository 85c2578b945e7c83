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

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dataflow.errors import KernelError

ATTENTION = "dataflow"
"""The value for `attn_implementation`."""


class AttentionPass(Protocol):
    """Who attends to whom in one forward over packed tokens.

    longest: the most keys that one query attends to; a sliding window shorter than that is refused.
    """

    @property
    def longest(self) -> int: ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, key heads, dim], rotated -> [tokens,
        heads, dim].

        Query heads h * r .. h * r + r - 1 share key head h, with r = heads / key heads. The inputs
        may be strided views; the result may be one too.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_pass: AttentionPass | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, tokens, dim] -> [1, tokens, heads, dim]."""
    if attention_pass is None:
        raise KernelError(
            f"{type(module).__name__}: expected attention_pass=, which says who attends to whom,"
            " found none. Fix: call operators.kernels.torch.attention.forward, or load the model"
            " with another attn_implementation."
        )
    _refuse(module, attention_pass, dropout, sliding_window, kwargs)
    layer: Any = module.layer_idx
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_pass.attend(layer, q, k, v, scaling).unsqueeze(0), None


def _refuse(
    module: nn.Module,
    attention_pass: AttentionPass,
    dropout: float,
    window: int | None,
    kwargs: Any,
) -> None:
    """Raise KernelError for anything that would change the numbers and is not implemented."""
    found = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if dropout:
        found.append(f"attention dropout {dropout}")
    if window is not None and window < attention_pass.longest:
        found.append(f"a sliding window of {window} under {attention_pass.longest} keys")
    if found:
        raise KernelError(
            f"{type(module).__name__}: packed attention is plain softmax attention, found"
            f" {', '.join(found)}. Fix: a base without it, or shorter sequences."
        )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def forward(
    module: nn.Module,
    ids: Tensor,
    positions: Tensor,
    attention_pass: AttentionPass,
    keep: Tensor | None = None,
) -> Tensor:
    """Logits of a causal language model on packed tokens.

    ids, positions int64 [tokens] -> [tokens, vocabulary]. keep int64 [kept]: only the logits of the
    tokens with these indices are computed: [kept, vocabulary].
    """
    only = {} if keep is None else {"logits_to_keep": keep}
    out = module(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        attention_pass=attention_pass,
        **only,
    )
    return out.logits[0]


def hidden(
    module: nn.Module, ids: Tensor, positions: Tensor, attention_pass: AttentionPass
) -> Tensor:
    """Last hidden states of packed tokens: int64 [tokens] twice -> [tokens, hidden]."""
    backbone: Any = module.base_model
    out = backbone(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        attention_pass=attention_pass,
    )
    return out.last_hidden_state[0]


def attend_packed(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of right-padded rows: [rows, length, heads, dim] with [rows, length, key
    heads, dim].

    Padding is to the right of every real token, so causality alone keeps tokens from seeing it.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    shared = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return out.transpose(1, 2)
