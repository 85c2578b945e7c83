"""A user's side module beside a base: what its layers leave goes in, what the head reads comes out.

Owns: making the module, its place in the base's, and the trial that it reads each token alone. Does
not own: what a user says (dataflow/side_module.py), its files (side_files.py), updates
(optimizer.py).

It is the submodule `side` of the base's module, so that its weights are `side.*` on weight edges
and in files. All other weights but a scalar head are frozen, and ids have no gradient, so autograd
keeps nothing below it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.side_config import describe_side
from dataflow.side_module import Side
from operators.kernels.torch.decoder_layers import find_decoder_layers

_NAME = "side"
_TOKENS = 5
_ALIKE = 0.02
"""The greatest difference between a token alone and among others, relative to the greatest number:
far above the rounding of bfloat16.
"""
_ALONE = "a forward(states, last) that computes each token from what is there at this token"


def add_side(module: PreTrainedModel, model: Model, side: Side, seed: int) -> None:
    """Make the Model's side module and put it between the last norm and the head, in place. All
    other weights but a scalar head are frozen. Raises KernelError, naming the Model, for what is no
    module that is trained, or reads other tokens.
    """
    where = f"Model {model.name!r}, {side}"
    layers = find_decoder_layers(module)
    if not layers:
        _refuse(where, f"decoder layers in {type(module).__name__}", "none", "no adapter=")
    trained_ids = {id(p) for p in module.parameters() if p.requires_grad}
    part = _build(where, module, model, side, seed)
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trained_ids)
    part.to(device=module.device, dtype=module.dtype).eval()
    if module.device.type != "meta":
        _require_apart(where, part, len(layers), module)
    module.add_module(_NAME, part)
    holder: Any = module
    holder.side_config = describe_side(side)
    _Route(part).attach(module, layers)


def find_side(module: nn.Module) -> nn.Module | None:
    """The side module of a module; None without one."""
    if not isinstance(getattr(module, "side_route", None), _Route):
        return None
    return module.get_submodule(_NAME)


def named_side(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a version has of a module with a side module: its trained weights, a scalar head's among
    them, and the side module's buffers.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    for name, tensor in module.get_submodule(_NAME).state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            yield f"{_NAME}.{name}", tensor


class _Route:
    """The way from the layers through the side module to the head, of one pass at a time."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._states: list[Tensor] = []

    def attach(self, module: PreTrainedModel, layers: list[nn.Module]) -> None:
        """Hook into the layers and the backbone."""
        holder: Any = module
        holder.side_route = self
        layers[0].register_forward_pre_hook(self._begin)
        for layer in layers:
            layer.register_forward_hook(self._note)
        module.base_model.register_forward_hook(self._add)

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        """A pass that failed may have left some."""
        del layer, inputs
        self._states.clear()

    def _note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        del layer, inputs
        self._states.append(output[0] if isinstance(output, tuple) else output)

    def _add(self, backbone: nn.Module, inputs: Any, output: Any) -> Any:
        del backbone, inputs
        states = tuple(self._states)
        self._states.clear()
        output.last_hidden_state = self._part(states, output.last_hidden_state)
        return output


def _build(where: str, module: PreTrainedModel, model: Model, side: Side, seed: int) -> nn.Module:
    """Call the user's function; what it draws depends on the run's seed and the name of the Model
    that is trained alone.
    """
    leader = model.follows.name if model.follows is not None else model.name
    digest = hashlib.blake2b(f"{seed} {leader} side".encode(), digest_size=7).digest()
    # No other stream is touched: those of devices belong to sampling.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
        part = side.build(module.config, **dict(side.params))
    if not isinstance(part, nn.Module):
        fix = "return a torch.nn.Module"
        _refuse(where, "a torch module", f"{type(part).__name__} {part!r:.60}", fix)
    parameters = list(part.named_parameters())
    if not parameters:
        _refuse(where, "parameters to train", "none", "a module with parameters")
    for name, parameter in parameters:
        if not parameter.requires_grad:
            shown = f"{name}, which is not"
            _refuse(where, "parameters that are trained", shown, "register_buffer for what stays")
    return part


def _require_apart(where: str, part: nn.Module, layers: int, module: PreTrainedModel) -> None:
    """Raise KernelError unless each token's output is of its own states: NaN in those of another
    token would show, and so would other numbers of the token alone.
    """
    config: Any = module.config
    stream = torch.Generator().manual_seed(1)
    drawn = torch.randn(layers + 1, 1, _TOKENS, config.hidden_size, generator=stream)
    states = drawn.to(device=module.device, dtype=module.dtype)
    with torch.inference_mode():
        together = _compute(where, part, states)
        for token in range(_TOKENS):
            alone = _compute(where, part, states[:, :, token : token + 1])[:, 0]
            difference = (together[:, token] - alone).abs().max()
            if difference > _ALIKE * together.abs().max():
                _refuse_reading(where, "other numbers at a token that is alone")
            spoilt = states.clone()
            spoilt[:, :, token] = torch.nan
            others = [other for other in range(_TOKENS) if other != token]
            if not _compute(where, part, spoilt)[:, others].isfinite().all():
                _refuse_reading(where, "numbers of one token in those of another")


def _compute(where: str, part: nn.Module, states: Tensor) -> Tensor:
    *of_layers, last = states.unbind()
    output = part(tuple(of_layers), last)
    expected = f"a tensor {list(last.shape)} of {last.dtype}"
    if not isinstance(output, Tensor):
        _refuse(where, expected, type(output).__name__, "return one as last is")
    if output.shape != last.shape or output.dtype != last.dtype:
        shown = f"{list(output.shape)} of {output.dtype}"
        _refuse(where, expected, shown, "return one as last is")
    return output


def _refuse_reading(where: str, shown: str) -> None:
    problem = f"{where}: a side module reads other tokens: expected {_ALONE}, found {shown}"
    raise KernelError(f"{problem}. Fix: no mixing of tokens in it.")


def _refuse(where: str, expected: str, shown: str, fix: str) -> None:
    raise KernelError(f"{where}: expected {expected}, found {shown}. Fix: {fix}.")
