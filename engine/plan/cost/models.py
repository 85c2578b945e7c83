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
from typing import Any

from dataflow.errors import DataError, PlanError
from dataflow.model import Model
from dataflow.model_dtype import ComputedDtype, find_dtype
from dataflow.model_files import CONFIG, header, read_object
from dataflow.trained_weights import Shapes, TrainedPart, count_trained_part
from engine.plan.cost.family_weights import Head as Head
from engine.plan.cost.family_weights import Shape as Shape
from engine.plan.cost.family_weights import list_weights

FAMILY = ("qwen2", "qwen3", "llama", "mistral")
"""`model_type`s that the formula counts; others need safetensors files."""

_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size")
_NEEDED = (*_WIDTHS, "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Parameters and shape of a Model; `why`: where the count comes from, or why it is missing."""

    parameters: int | None = None
    """Of the base, with the Model's head."""
    shape: Shape | None = None
    why: str = ""
    trained: TrainedPart | None = None
    """What is trained, of a Model that trains a part; None of all others."""
    head: Head = "lm"

    @property
    def version(self) -> int:
        """Parameters of a version of its weights; 0 if unknown."""
        if self.trained is None:
            return self.parameters or 0
        return self.trained.parameters

    @property
    def passed_layers(self) -> int | None:
        """Decoder layers that a backward pass goes through; None for all."""
        if self.trained is None:
            return None
        return self.trained.layers

    @property
    def read_layers(self) -> int:
        """Decoder layers of which a pass keeps what they leave, for a side module."""
        return 0 if self.trained is None else self.trained.read_layers

    @property
    def narrow(self) -> int:
        """Numbers of a token that a training pass keeps for an adapter."""
        return 0 if self.trained is None else self.trained.narrow

    @property
    def left(self) -> int:
        """Parameters of the base that the Model never changes, if it leaves some."""
        if self.trained is None or self.trained.is_added:
            return self.parameters or 0
        return (self.parameters or 0) - self.trained.parameters

    @property
    def beside(self) -> int:
        """Parameters that no other Model of the base has."""
        return 0 if self.trained is None else self.trained.parameters

    @property
    def added(self) -> int:
        """Parameters beside those of the base."""
        if self.trained is None or not self.trained.is_added:
            return 0
        return self.trained.parameters

    @property
    def mergeable(self) -> int:
        """Parameters of the base's matrices into which the Model's adapter can be merged."""
        if self.trained is None:
            return 0
        return self.trained.mergeable

    def part(self, tensor: int) -> ModelCost:
        """The cost of one of so many tensor ranks; each has all norms, and embedding and head as
        far as they are not split.
        """
        if tensor == 1 or self.shape is None:
            return self
        shape = self.shape.part(tensor, self.head)
        parameters, trained = self.parameters, self.trained
        if parameters is not None:
            parameters += shape.matrices - self.shape.matrices
            parameters += shape.tables(self.head) - self.shape.tables(self.head)
            if trained is not None:
                trained = trained.scaled(parameters, self.parameters or parameters)
        return replace(self, parameters=parameters, shape=shape, trained=trained)


def cost_of_model(model: Model) -> ModelCost:
    """Count the parameters of a Model's base, and of what it trains of it, or beside it. Raises as
    `model_cost`.
    """
    cost = model_cost(model.base, model.head)
    if not model.is_partial or cost.parameters is None:
        return cost
    folder = Path(model.base).expanduser()
    shapes, head = _read_tensors(folder), 0
    if cost.shape is not None:
        head = cost.shape.hidden + 1
        if shapes is None:
            shapes = dict(list_weights(cost.shape, read_object(folder / CONFIG)))
    return replace(cost, trained=count_trained_part(model, shapes or {}, head))


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
        parameters = _count_parameters(tensors, head, shape)
        why = "counted in its safetensors files"
        return ModelCost(parameters=parameters, shape=shape, why=why, head=head)
    if shape is None or kind not in FAMILY:
        return ModelCost(why=f"no safetensors files, and no formula for model_type {kind!r}")
    parameters = formula(shape, config, head)
    why = "by formula from config.json"
    return ModelCost(parameters=parameters, shape=shape, why=why, head=head)


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
    """Count the parameters of a dense decoder of the Llama family: its weights (family_weights.py),
    and vocabulary * hidden once more for a head that is not tied to the embedding.
    """
    body = sum(prod(dimensions) for _, dimensions in list_weights(shape, config))
    if head == "scalar":
        return body + shape.hidden + 1
    return body if shape.tied else body + shape.vocabulary * shape.hidden


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


def _read_tensors(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of each tensor, by the files' headers; None without safetensors files."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]  # a pipe would block
    if not files:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(files):
        for name, tensor in header(path).items():
            shapes[name] = tensor.shape
    return shapes


def _count_parameters(tensors: Shapes, head: Head, shape: Shape | None) -> int:
    """Count the elements of the module's weights: one of the two heads, no buffers of old files."""
    sizes: Counter[str] = Counter()
    for name, dimensions in tensors.items():
        if name.endswith(("rotary_emb.inv_freq", ".masked_bias")):
            continue
        root = name.split(".")[0]
        sizes[root if root in ("lm_head", "score") else "body"] += prod(dimensions)
    if head == "lm":
        tied = shape is not None and shape.tied
        return sizes["body"] if tied else sizes["body"] + sizes["lm_head"]
    if not sizes["score"] and shape is not None:
        return sizes["body"] + shape.hidden + 1  # a head that is still to be made
    return sizes["body"] + sizes["score"]
