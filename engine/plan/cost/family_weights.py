"""The shape of a dense decoder, and its weights as the Llama family names them.

Owns: both. Does not own: reading them from a directory (models.py), which of them are trained
(dataflow/trained_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Head = Literal["lm", "scalar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder: sizes as in its config.json. `context`: max_position_embeddings. sharers: of
    a tensor rank's part, how many ranks have a part of the vocabulary, and so of embedding and
    head.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied: bool
    sharers: int = 1

    @property
    def attention(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads together; the values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Elements of the matrices of attention and MLP, which tensor ranks divide."""
        width = 2 * self.attention + 2 * self.kv + 3 * self.intermediate
        return self.layers * self.hidden * width

    def tables(self, head: Head) -> int:
        """Elements of the embedding, and of a language model's head that is not tied to it."""
        count = 1
        if head == "lm" and not self.tied:
            count = 2  # a head of its own, as large as the embedding
        return count * self.vocabulary * self.hidden

    def part(self, tensor: int, head: Head = "lm") -> Shape:
        """The shape of one of so many tensor ranks: its heads, its part of the MLP's width, and of
        a language model's vocabulary, if that is divisible.
        """
        sharers = tensor if head == "lm" and self.vocabulary % tensor == 0 else 1
        return replace(
            self,
            heads=self.heads // tensor,
            kv_heads=self.kv_heads // tensor,
            intermediate=self.intermediate // tensor,
            vocabulary=self.vocabulary // sharers,
            sharers=sharers,
        )


def list_weights(shape: Shape, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List names and shapes of the weights of a dense decoder of the Llama family, without a head.

    The embedding; a layer: query, key, value and output projections, three MLP matrices, two norms;
    a last norm (Touvron et al., arXiv:2302.13971, section 2.2; grouped key heads:
    arXiv:2305.13245). Qwen2 adds biases to query, key and value (arXiv:2407.10671), Qwen3 norms of
    queries and keys in their place (arXiv:2505.09388).
    """
    hidden, inner = shape.hidden, shape.intermediate
    kind = config.get("model_type")
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden)
    widths = {
        "self_attn.q_proj": (shape.attention, hidden),
        "self_attn.k_proj": (shape.kv, hidden),
        "self_attn.v_proj": (shape.kv, hidden),
        "self_attn.o_proj": (hidden, shape.attention),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    biased = _list_biased(config)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        for name, matrix in widths.items():
            yield f"{layer}.{name}.weight", matrix
            if name in biased:
                yield f"{layer}.{name}.bias", matrix[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (hidden,)
        for norm in ("q_norm", "k_norm") if kind == "qwen3" else ():
            yield f"{layer}.self_attn.{norm}.weight", (shape.head_dim,)
    yield "model.norm.weight", (hidden,)


def _list_biased(config: Mapping[str, Any]) -> list[str]:
    """The matrices of a layer that have a bias; Qwen2's whatever attention_bias says."""
    names: list[str] = []
    is_qwen2 = config.get("model_type") == "qwen2"
    if is_qwen2 or config.get("attention_bias", False):
        names += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if not is_qwen2 and config.get("attention_bias", False):
        names.append("self_attn.o_proj")
    if config.get("mlp_bias", False):
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return names
