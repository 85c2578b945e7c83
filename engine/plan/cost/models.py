"""What a Model is made of, read from its Hugging Face directory without torch.

Owns: parameters (of safetensors headers, else by formula), shape, the dtype that a plan counts
with. Does not own: bytes, seconds, the rule of dtypes (dataflow/model_dtype.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from dataflow.errors import DataError, PlanError
from dataflow.model import Model
from dataflow.model_dtype import ComputedDtype, find_dtype
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

    def tables(self, head: Head) -> int:
        """Elements of the embedding, and of a language model's head that is not tied to it."""
        count = 1
        if head == "lm" and not self.tied:
            count = 2  # a head of its own, as large as the embedding
        return count * self.vocabulary * self.hidden

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
        part, parameters = self.shape.part(tensor), self.parameters
        if parameters is not None:
            parameters += part.matrices - self.shape.matrices
        return replace(self, parameters=parameters, shape=part)


def model_cost(base: str, head: Head = "lm") -> ModelCost:
    """Count a Model's parameters, by config.json and the headers of *.safetensors. A scalar head is
    a linear [hidden, 1] with bias. Raises PlanError for a damaged file.
    """
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return ModelCost(why="base is not a local directory")
    if not (folder / CONFIG).is_file():
        return ModelCost(why="no config.json in its base")
    try:
        config, tensors = read_object(folder / CONFIG), _read_tensors(folder)
    except DataError as error:
        raise PlanError(str(error)) from error
    shape, kind = _read_shape(config), config.get("model_type")
    if tensors is not None:
        parameters = _count_trained(tensors, head, shape)
        return ModelCost(parameters=parameters, shape=shape, why="counted in its safetensors files")
    if shape is None or kind not in FAMILY:
        return ModelCost(why=f"no safetensors files, and no formula for model_type {kind!r}")
    parameters = formula(shape, config, head)
    return ModelCost(parameters=parameters, shape=shape, why="by formula from config.json")


def planned_dtype(model: Model) -> ComputedDtype | None:
    """The dtype that a Model computes in; None where its base is not on this machine, and so not
    known before a kernel opens it. Raises PlanError for a damaged file.
    """
    try:
        return find_dtype(model)
    except DataError as error:
        raise PlanError(str(error)) from error


def counted_dtype(model: Model) -> ComputedDtype:
    """The dtype that estimates count with: float32, the wider one, where it is not known."""
    return planned_dtype(model) or "float32"


def model_type(base: str) -> str | None:
    """The architecture that a base's config.json names; None where there is none to read."""
    path = Path(base).expanduser() / CONFIG
    try:
        if not path.is_file():
            return None
        return read_object(path).get("model_type")
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
    """Count the parameters of a dense decoder of the Llama family.

    vocabulary * hidden for the embedding, once more for a head that is not tied to it; a layer:
    query, key, value and output projections, three MLP matrices, two norms; a last norm (Touvron et
    al., arXiv:2302.13971, section 2.2; grouped key heads: arXiv:2305.13245). Qwen2 adds biases to
    query, key and value (arXiv:2407.10671), Qwen3 norms of queries and keys in their place
    (arXiv:2505.09388).
    """
    hidden, inner = shape.hidden, shape.intermediate
    projections = 2 * hidden * shape.attention + 2 * hidden * shape.kv
    norms = 2 * hidden
    if config.get("model_type") == "qwen3":
        norms += 2 * shape.head_dim
    layer = projections + 3 * hidden * inner + _count_biases(shape, config) + norms
    embedding = shape.vocabulary * hidden
    body = shape.layers * layer + hidden + embedding
    if head == "scalar":
        return body + hidden + 1
    return body if shape.tied else body + embedding


def _count_biases(shape: Shape, config: Mapping[str, Any]) -> int:
    """Biases of one layer."""
    biases = 0
    if config.get("model_type") == "qwen2":
        # Whatever attention_bias says; the output projection has none.
        biases += shape.attention + 2 * shape.kv
    elif config.get("attention_bias", False):
        biases += shape.attention + 2 * shape.kv + shape.hidden
    if config.get("mlp_bias", False):
        biases += 2 * shape.intermediate + shape.hidden
    return biases


def _read_shape(config: Mapping[str, Any]) -> Shape | None:
    """The shape that a config.json names; None without all of its sizes."""
    needed = [config.get(key) for key in _NEEDED]
    if not all(isinstance(size, int) for size in needed):
        return None
    heads = config["num_attention_heads"]
    usually_tied = config.get("model_type") not in FAMILY
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings") or 0,
        tied=bool(config.get("tie_word_embeddings", usually_tied)),
    )


def _read_tensors(folder: Path) -> dict[str, int] | None:
    """Elements of each tensor, by the files' headers; None without safetensors files."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]  # a pipe would block
    if not files:
        return None
    sizes: dict[str, int] = {}
    for path in sorted(files):
        for name, tensor in header(path).items():
            sizes[name] = prod(tensor.shape)
    return sizes


def _count_trained(tensors: Mapping[str, int], head: Head, shape: Shape | None) -> int:
    """Count the elements that the module trains: one of the two heads, no buffers of old files."""
    sizes: Counter[str] = Counter()
    for name, size in tensors.items():
        if name.endswith(("rotary_emb.inv_freq", ".masked_bias")):
            continue
        root = name.split(".")[0]
        sizes[root if root in ("lm_head", "score") else "body"] += size
    if head == "lm":
        tied = shape is not None and shape.tied
        return sizes["body"] if tied else sizes["body"] + sizes["lm_head"]
    if not sizes["score"] and shape is not None:
        return sizes["body"] + shape.hidden + 1  # a head that is still to be made
    return sizes["body"] + sizes["score"]
