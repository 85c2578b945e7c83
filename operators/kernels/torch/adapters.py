"""Models of which a part is trained: their modules, on one copy of the base.

Owns: which weights of a module are trained, the matrices that an adapter adds (made by peft), how
they begin, and that a base is in memory once. Does not own: what a user says (the language), files
of adapters (adapter_files.py), who shares what (the plan), updates (optimizer.py).

Each Model has a module of its own, and modules of one base share its weights: they are the same
Parameters. So policy, reference and critic compute side by side, and nobody switches an adapter on
or off: what is recomputed, captured or compiled has the adapter of its own Model. peft's own way,
named adapters of one module, has one active adapter at a time, which is state that outlives an
error.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dataflow.adapters import ALL_LINEAR, Lora, WeightSubset, is_at, leaf_of
from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.trained_weights import is_last_norm
from operators.kernels.torch.adapter_layers import ADAPTER, is_added, use_lean_layers
from operators.kernels.torch.decoder_layers import find_decoder_layers
from operators.kernels.torch.scalar import HEADS

LINEAR = (nn.Linear, Conv1D)
"""Of these types themselves: a router of experts may be a kind of one, and return its choice."""
NOT_SERVED = ("embed_tokens", "lm_head")


class BaseWeights:
    """The weights of one base on one device, which all Models of it share and nobody changes."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}

    def share(self, module: nn.Module, trained_names: frozenset[str] = frozenset()) -> None:
        """Replace the module's weights by those that are here under the same names, and keep the
        others for the Models that follow; but for those that are trained, which are its own.
        """
        named = module.named_parameters(remove_duplicate=False)
        for name, parameter in list(named):
            if name in trained_names:
                continue
            parameter.requires_grad_(False)
            shared = self._parameters.setdefault(name, parameter)
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, shared)


def share_base(module: PreTrainedModel, model: Model, weights: BaseWeights) -> None:
    """Let the module have the weights of its base from those that are shared, but for those that
    are trained. Raises as `find_trained_names`.
    """
    weights.share(module, find_trained_names(module, model))


def find_trained_names(module: PreTrainedModel, model: Model) -> frozenset[str]:
    """The names of the base's weights that are trained, and not shared: those of the subset, and of
    a scalar head. Raises KernelError, naming the Model, if a subset has none.
    """
    heads = [name for name, _ in _named_head(module)] if model.head == "scalar" else []
    if model.subset is None:
        return frozenset(heads)
    names = list(_list_subset(module, model.subset))
    if not names:
        raise _error(model, f"expected weights in {model.subset}, found none", "other parts")
    return frozenset((*names, *heads))


def add_adapter(module: PreTrainedModel, model: Model, seed: int) -> None:
    """Add the Model's adapter to a module, in place: A is drawn from the seed and the Model's name,
    of a follower its leader's, and B is zero. All other weights but a scalar head are frozen.
    Raises KernelError, naming the Model, without peft, for targets that the base does not have, or
    that peft passes over.
    """
    adapter = model.adapter
    assert isinstance(adapter, Lora)
    peft = _import_peft(model)
    targets = find_targets(module, model, adapter)
    experts = find_fused_experts(module) if adapter.targets == ALL_LINEAR else []
    config = make_config(peft, model, targets, experts)
    trained_ids = {id(p) for p in module.parameters() if p.requires_grad}
    peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    _require_adapters(module, model, targets)
    use_lean_layers(peft, module)
    # One that moves by a part of a difference would stand still in bfloat16.
    dtype = torch.float32 if model.rate != 1.0 else module.dtype
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_added(name) or id(parameter) in trained_ids)
        if is_added(name):
            parameter.data = parameter.data.to(dtype)
    trained = model.follows or model
    for name, parameter in _named_added(module):
        _begin(parameter, name, f"{seed} {trained.name}")


def _require_adapters(module: nn.Module, model: Model, targets: list[str]) -> None:
    """Require that peft gave each target its matrices."""
    without = [path for path in targets if not hasattr(module.get_submodule(path), "lora_A")]
    if without:
        problem = (
            f"expected an adapter on each of {len(targets)} linear layers, found none on"
            f" {len(without)}, {without[0]} among them, which PEFT takes for those of experts"
        )
        raise _error(model, problem, "targets without these, as targets=('q_proj', 'v_proj')")


def make_config(peft: ModuleType, model: Model, targets: list[str], experts: list[str]) -> Any:
    """Make peft's description of a Model's adapter. targets: the paths of linear layers. experts:
    the names of experts' weights.
    """
    adapter = model.adapter
    assert isinstance(adapter, Lora)
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=targets,
        target_parameters=experts or None,
        lora_dropout=0.0,
        bias="none",
        use_rslora=adapter.scale == "rslora",
        init_lora_weights=True,
        base_model_name_or_path=model.base,
        task_type="CAUSAL_LM" if model.head == "lm" else "TOKEN_CLS",
    )


def find_targets(module: PreTrainedModel, model: Model, adapter: Lora) -> list[str]:
    """The paths of the modules that get two matrices each, in the module's order. Raises
    KernelError, naming the Model, for a name that no linear layer has, and for a head or embedding,
    which samplers do not serve.
    """
    in_layers = list(_list_linear(module))
    if not in_layers:
        problem = f"expected linear layers in its base, found none in {type(module).__name__}"
        raise _error(model, problem, "no adapter=")
    if adapter.targets == ALL_LINEAR:
        return in_layers
    chosen_paths: set[str] = set()
    for name in adapter.target_names:
        matches = {path for path in in_layers if is_at(path, name)}
        if not matches:
            leaves = sorted({leaf_of(path) for path in in_layers})
            names = ", ".join(leaves)
            problem = f"expected targets among its linear layers, {names}, found {name!r}"
            raise _error(model, problem, f"targets={ALL_LINEAR!r}")
        chosen_paths |= matches
    return [path for path in in_layers if path in chosen_paths]


def _list_linear(module: PreTrainedModel) -> Iterator[str]:
    """The paths of its linear layers but for a head or embedding."""
    for path, part in module.named_modules():
        if type(part) in LINEAR and leaf_of(path) not in (*NOT_SERVED, *HEADS):
            yield path


def find_fused_experts(module: PreTrainedModel) -> list[str]:
    """The names of experts' weights of three dimensions, [experts, out, in]: no linear layers."""
    names: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.dim() == 3 and ".experts." in name:
            names.append(name)
    return names


def named_trained(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that are trained; those of a module that nobody trains count as such."""
    named = list(module.named_parameters(remove_duplicate=remove_duplicate))
    if not any(parameter.requires_grad for _, parameter in named):
        yield from named
        return
    for name, parameter in named:
        if parameter.requires_grad:
            yield piece_name(name), parameter


def piece_name(name: str) -> str:
    """A trained weight's name in adapter_model.safetensors and on a weight edge: without the name
    that peft has for the adapter.
    """
    return name.replace(f".{ADAPTER}.", ".")


def is_second_matrix(name: str) -> bool:
    """Whether a weight of this name is a matrix B, which begins as zero."""
    return ".lora_B." in name


def has_adapter(module: nn.Module) -> bool:
    """Whether `add_adapter` has added one."""
    return hasattr(module, "peft_config")


def describe_adapter(module: nn.Module) -> dict[str, Any]:
    """What peft writes to adapter_config.json, as values of JSON."""
    configs: Any = module.peft_config
    config = configs[ADAPTER].to_dict()
    for name, setting in config.items():
        if isinstance(setting, set):
            config[name] = sorted(setting)
    config["inference_mode"] = True
    return config


def _named_added(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if is_added(name):
            yield piece_name(name), parameter


@torch.no_grad()
def _begin(parameter: nn.Parameter, name: str, seed: str) -> None:
    """Draw a matrix A as peft does, from a stream of its own; B is zero.

    By name, so that neither the order of modules nor the number of ranks changes a bit.
    """
    if is_second_matrix(name):
        parameter.zero_()
        return
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    matrix = torch.empty(parameter.shape, dtype=torch.float32)
    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=stream)
    parameter.copy_(matrix)


def _list_subset(module: PreTrainedModel, subset: WeightSubset) -> Iterator[str]:
    layers = find_decoder_layers(module)
    first = subset.first_layer(len(layers))
    layer_of: dict[int, int] = {}
    for number, layer in enumerate(layers):
        layer_of |= {id(weight): number for weight in layer.parameters()}
    for name, parameter in module.named_parameters():
        number = layer_of.get(id(parameter), -1)
        is_behind = number < 0 and is_last_norm(name)
        if (number >= first or is_behind) and subset.has_part(name):
            yield name


def _named_head(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] in HEADS:
            yield name, parameter


def _import_peft(model: Model) -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError:
        problem = "expected peft, which makes the modules of an adapter, found no such package"
        raise _error(model, problem, "pip install 'dataflow-rl[lora]'") from None


def _error(model: Model, problem: str, fix: str) -> KernelError:
    return KernelError(f"Model {model.name!r}: {problem}. Fix: {fix}.")
