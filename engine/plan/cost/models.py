"""What a Model is made of, read from its Hugging Face directory without torch.

Owns: parameters (of safetensors headers, else by formula), shape. Does not own: bytes, seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from dataflow.errors import DataError, PlanError
from dataflow.model_files import CONFIG, header, read_object

Head = Literal["lm", "scalar"]

FAMILY = ("qwen2", "qwen3", "llama", "mistral")
"""`model_type`s that the formula counts; others need safetensors files."""

_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size")
_NEEDED = (*_WIDTHS, "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder: sizes as in its config.json. `context`: max_position_embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied: bool

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

    def part(self, tensor: int) -> Shape:
        """The shape of one of so many tensor ranks: its heads and part of the MLP's width."""
        return replace(
            self,
            heads=self.heads // tensor,
            kv_heads=self.kv_heads // tensor,
            intermediate=self.intermediate // tensor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Parameters and shape of a Model; `why`: where the count comes from, or why it is missing."""

    parameters: int | None = None
    shape: Shape | None = None
    why: str = ""

    def part(self, tensor: int) -> ModelCost:
        """The cost of one of so many tensor ranks; each has all embeddings, norms and head."""
        if tensor == 1 or self.shape is None:
            return self
        part, held = self.shape.part(tensor), self.parameters
        if held is not None:
            held += part.matrices - self.shape.matrices
        return replace(self, parameters=held, shape=part)


def model_cost(base: str, head: Head = "lm") -> ModelCost:
    """Read config.json and the headers of *.safetensors. A scalar head is a linear [hidden, 1] with
    bias. Raises PlanError for a damaged file.
    """
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return ModelCost(why="base is not a local directory")
    if not (folder / CONFIG).is_file():
        return ModelCost(why="no config.json in its base")
    try:
        config, tensors = read_object(folder / CONFIG), _tensors(folder)
    except DataError as error:
        raise PlanError(str(error)) from error
    shape, kind = _shape(config), config.get("model_type")
    if tensors is not None:
        counted = _counted(tensors, head, shape)
        return ModelCost(parameters=counted, shape=shape, why="counted in its safetensors files")
    if shape is None or kind not in FAMILY:
        return ModelCost(why=f"no safetensors files, and no formula for model_type {kind!r}")
    counted = formula(shape, config, head)
    return ModelCost(parameters=counted, shape=shape, why="by formula from config.json")


def model_type(base: str) -> str | None:
    """The architecture that a base's config.json names; None where there is none to read."""
    path = Path(base).expanduser() / CONFIG
    try:
        return read_object(path).get("model_type") if path.is_file() else None
    except DataError as error:
        raise PlanError(str(error)) from error


def some_windows(base: str) -> bool:
    """Whether only some layers of a base have a sliding window, by its config.json."""
    path = Path(base).expanduser() / CONFIG
    config = read_object(path) if path.is_file() else {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds and len(set(kinds)) > 1
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        return False
    layers, first = (config.get(name) for name in ("num_hidden_layers", "max_window_layers"))
    return isinstance(layers, int) and isinstance(first, int) and 0 < first < layers


def formula(shape: Shape, config: Mapping[str, Any], head: Head = "lm") -> int:
    """Parameters of a dense decoder of the Llama family.

    vocabulary * hidden for the embedding, once more for a head that is not tied to it; a layer:
    query, key, value and output projections, three MLP matrices, two norms; a last norm (Touvron et
    al., arXiv:2302.13971, section 2.2; grouped key heads: arXiv:2305.13245). Qwen2 adds biases to
    query, key and value (arXiv:2407.10671), Qwen3 norms of queries and keys in their place
    (arXiv:2505.09388).
    """
    kind, d, inner = config.get("model_type"), shape.hidden, shape.intermediate
    projections = 2 * d * shape.attention + 2 * d * shape.kv
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    biases = (shape.attention + 2 * shape.kv) * qkv_bias
    biases += d * (kind != "qwen2" and config.get("attention_bias", False))
    biases += (2 * inner + d) * bool(config.get("mlp_bias", False))
    norms = 2 * d + 2 * shape.head_dim * (kind == "qwen3")
    body = shape.layers * (projections + 3 * d * inner + biases + norms) + d
    embedding = shape.vocabulary * d
    return body + embedding + (d + 1 if head == "scalar" else 0 if shape.tied else embedding)


def _shape(config: Mapping[str, Any]) -> Shape | None:
    if any(not isinstance(config.get(key), int) for key in _NEEDED):
        return None
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings") or 0,
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") not in FAMILY)),
    )


def _tensors(folder: Path) -> dict[str, int] | None:
    """Elements of each tensor; None without safetensors files."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]  # a pipe would block
    sizes = {n: prod(t.shape) for path in sorted(files) for n, t in header(path).items()}
    return sizes if files else None


def _counted(tensors: Mapping[str, int], head: Head, shape: Shape | None) -> int:
    """Elements that the module trains: one of the two heads, no buffers of old files."""
    sizes: Counter[str] = Counter()
    for name, size in tensors.items():
        root = name.split(".")[0]
        if not name.endswith(("rotary_emb.inv_freq", ".masked_bias")):
            sizes[root if root in ("lm_head", "score") else "body"] += size
    if head == "lm":
        tied = shape is not None and shape.tied
        return sizes["body"] + (0 if tied else sizes["lm_head"])
    return sizes["body"] + (sizes["score"] or (shape.hidden + 1 if shape else 0))
