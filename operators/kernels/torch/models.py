"""Models as modules: loading Hugging Face directories, and weights as pieces.

Owns: loading (head, dtype, attention), and the names of a module's weights. Does not own: saving
(saving.py), which weights are refused (soundness.py), who shares a module (Session.module), how
weights travel (engine/weights), tokenizing (operators/kernels/text.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from dataflow.architectures import refusal
from dataflow.errors import KernelError, nearest
from dataflow.kernel import Piece, Session
from dataflow.model import Model
from dataflow.model_dtype import ComputedDtype, choose_dtype
from dataflow.model_files import CONFIG, is_path, listing, near_directory, positions_of, read_object
from dataflow.side_module import Side
from operators.kernels.torch.adapter_files import read_adapter
from operators.kernels.torch.adapters import BaseWeights, add_adapter, named_trained, share_base
from operators.kernels.torch.attention import ATTENTION
from operators.kernels.torch.base_piece import find_base, note_base, require_saved_base, take_base
from operators.kernels.torch.host_memory import keep_freed_memory, return_freed_memory
from operators.kernels.torch.merged_matrices import merge_adapter, merge_again
from operators.kernels.torch.packing_trial import require_packable
from operators.kernels.torch.parallel import part_like
from operators.kernels.torch.saving import exact_folder
from operators.kernels.torch.scalar import scalar_class
from operators.kernels.torch.side_files import read_side
from operators.kernels.torch.side_modules import add_side
from operators.kernels.torch.soundness import Loading, loading_errors, require_sound
from operators.kernels.torch.transformers_log import quiet

# transformers compiles thousands of patterns before it loads its first model, in 0.15 s: here, so
# that a template has done it for all Workers that it forks. Older versions have no such table.
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")

_ALIGNMENT = 64
"""Bytes: where allocators begin all that they give."""


def open_module(
    session: Session, model: Model, *, is_split: bool = False, is_merged: bool = False
) -> PreTrainedModel:
    """Return the module of a Model that the plan lets a kernel use, loaded by the first kernel; all
    Models that leave their base as it is have it in memory once. is_split: each rank will keep a
    part of it, so that it shares no weight. is_merged: it computes with the adapter merged into
    matrices of its own (merged_matrices.py). Raises as `load_model`.
    """

    def make() -> PreTrainedModel:
        module = _load_for(session, model, is_split)
        if is_merged:
            merge_adapter(module)
        return module

    return session.module(model, make)


def _load_for(session: Session, model: Model, is_split: bool) -> PreTrainedModel:
    if is_split or not model.leaves_base:
        return load_model(model, seed=session.seed)
    # By its dtype, not by the name of one: `auto` and `float32` may be the same.
    name = f"weights of {model.base} in {load_dtype(model)}"
    return load_model(model, weights=session.shared(name, BaseWeights), seed=session.seed)


def load_model(
    model: Model,
    device: str | torch.device | None = None,
    weights: BaseWeights | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load the module of a Model: eval mode, dropout off, packed attention (attention.py), weights
    in the dtype that it computes in (`load_dtype`).

    head `lm`: the base's causal language model. head `scalar`: its backbone with a linear [hidden,
    1] (scalar.py), read from the base if it has one (a token or sequence classifier with one
    label). The base of a Model that is trained, or follows a trained one, may lack it: it is then
    zero, and so the same in every process. device: default_device() if None. weights: of its base,
    which it shares. seed: the run's, by which an adapter begins. Raises KernelError,
    naming the base, if it is missing, damaged or incomplete (soundness.py), has no tokenizer, or
    has an architecture that is refused (dataflow/architectures.py).
    """
    where = f"Model {model.name!r}"
    model_class: Any = _find_class(model, _read_config(where, model.base))
    with quiet(), loading_errors(where, model.base):
        module, info = model_class.from_pretrained(
            exact_folder(model.base),
            dtype=getattr(torch, load_dtype(model)),
            attn_implementation=ATTENTION,
            output_loading_info=True,
            trust_remote_code=False,  # never run code in a model's folder, nor ask about it
            ignore_mismatched_sizes=True,  # `require_sound` reports them
            **({"num_labels": 1} if model.head == "scalar" else {}),
        )
    # Not the folder that was read: what is saved has the dtype and tokenizer of the base.
    module.name_or_path = model.base
    require_sound(where, model, module, Loading.of(info))
    _drop_dropout(module)
    _align_weights(module)
    if model.is_partial or weights is not None:
        # Before it moves: what is shared is on the device already.
        share_base(module, model, weights or BaseWeights())
        return_freed_memory()
    if model.is_partial:
        note_base(module, model.base)
    module = module.to(device or default_device()).eval()
    _add_part(module, model, seed)
    _begin_part(module, model)
    if module.device.type == "cpu":
        keep_freed_memory()
    # Last: the trial needs eval mode, and finite weights.
    require_packable(where, module)
    return module


def _align_weights(module: PreTrainedModel) -> None:
    """Copy the weights that lie in a file's memory at an odd address. Products of the CPU round by
    where their vectors begin, and a version that is written later lies elsewhere.
    """
    for weight in module.parameters():
        if weight.data_ptr() % _ALIGNMENT:
            weight.data = weight.data.clone()


def _add_part(module: PreTrainedModel, model: Model, seed: int) -> None:
    """Add what a Model trains beside its base, if it has such a part."""
    if isinstance(model.adapter, Side):
        add_side(module, model, model.adapter, seed)
    elif model.adapter is not None:
        add_adapter(module, model, seed)


def _begin_part(module: PreTrainedModel, model: Model) -> None:
    """Load what that part begins with, if it is not drawn."""
    if model.adapter is not None and model.adapter.start is not None:
        folder = Path(model.adapter.start).expanduser()
        load_pieces(module, _read_part(model, folder))


def _read_part(model: Model, folder: Path) -> list[Piece]:
    if isinstance(model.adapter, Side):
        return read_side(model, model.adapter, folder)
    return read_adapter(model, folder)


def _find_class(model: Model, config: Any) -> type[PreTrainedModel]:
    """Find the transformers class with the Model's head, of an architecture that is supported."""
    if model.head == "scalar":
        return scalar_class(config)
    lm: Any = AutoModelForCausalLM
    return lm._model_mapping[type(config)]


def make_meta_module(model: Model) -> PreTrainedModel:
    """Make the module of a Model without its weights (on the meta device): its config, and the
    names and shapes that `pieces` gives; with its adapter. Raises KernelError as `load_model` does,
    before weights are read.
    """
    config = _read_config(f"Model {model.name!r}", model.base)
    with torch.device("meta"):
        module: Any = _find_class(model, config)(config)
    module.tie_weights()
    if model.is_partial:
        share_base(module, model, BaseWeights())
        note_base(module, model.base)
    _add_part(module, model, seed=0)
    return module


def load_dtype(model: Model) -> ComputedDtype:
    """Read from a Model's base, where that decides, the dtype that it computes in: torch's name.
    Raises KernelError for a hub name that does not tell.
    """
    where = f"Model {model.name!r}"
    with loading_errors(where, model.base):
        folder = Path(cached_file(model.base, CONFIG) or "").parent
        dtype = choose_dtype(model, folder)
    if dtype is None:
        raise KernelError(
            f"{where}: expected a dtype in the config.json of its base {model.base}, found none."
            " Fix: Model(..., dtype='float32') or 'bfloat16'."
        )
    return dtype


def find_position_limit(base: str) -> int | None:
    """Find the most tokens per row that a base supports; None if its config.json has no limit."""
    path = cached_file(base, CONFIG)
    if path is None:
        return None
    return positions_of(read_object(Path(path)))


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _read_config(where: str, base: str) -> Any:
    """Read the base's configuration, after checks for which transformers would print a page of
    text.
    """
    local = Path(base).expanduser()
    if local.is_file():
        raise KernelError(
            f"{where}: expected a model directory as its base, found a file, {base}. Fix: its"
            " directory."
        )
    if not local.is_dir() and is_path(base):
        raise KernelError(
            f"{where}: expected a model directory as its base, found nothing at {base}. Fix:"
            f" {near_directory(local)}."
        )
    if local.is_dir():
        for needed in ("config.json", "tokenizer_config.json"):
            if not (local / needed).is_file():
                raise KernelError(
                    f"{where}: expected {needed} in {base}, found {listing(local)}. "
                    "Fix: save model and tokenizer there with save_pretrained."
                )
    with loading_errors(where, base):
        config = read_object(Path(cached_file(base, CONFIG) or ""))
        refused = refusal(config)
        if refused is None:
            return AutoConfig.from_pretrained(base, trust_remote_code=False)
    raise KernelError(
        f"{where}: expected an architecture that works here at {base}, found {refused.reason}. Fix:"
        f" {refused.fix}."
    )


def _drop_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), int | float):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def restore_model(module: nn.Module, model: Model, directory: Path | str) -> None:
    """Read into the module what `save_model` wrote for this Model."""
    device = next(module.parameters()).device
    load_pieces(module, read_pieces(model, directory, device))


def read_pieces(model: Model, directory: Path | str, device: torch.device) -> Iterable[Piece]:
    """Read the weights that `save_model` wrote for this Model: those that are trained."""
    if model.adapter is not None:
        return _read_part(model, Path(directory))
    if model.subset is not None:
        require_saved_base(model, Path(directory))
    saved = replace(model, base=str(directory))
    return pieces(load_model(saved, device))


def pieces(module: nn.Module) -> Iterator[Piece]:
    """Every weight that is trained once (tied ones by their first name), as the module's own
    tensors.
    """
    for name, parameter in named_trained(module):
        yield Piece(name, parameter.detach())
    for name, buffer in _kept_buffers(module):
        yield Piece(name, buffer)


def whole_pieces(module: nn.Module) -> Iterator[Piece]:
    """Every weight once, trained or not, as `pieces`."""
    for name, parameter in module.named_parameters():
        yield Piece(name, parameter.detach())
    for name, buffer in _kept_buffers(module):
        yield Piece(name, buffer)


def load_pieces(module: nn.Module, new_pieces: Iterable[Piece], rate: float = 1.0) -> int:
    """Copy weights into the module, in place, and merge them where it computes with merged ones.
    Returns the number of pieces. No pieces: no change.

    rate: how far the weights move towards the new ones; 1.0 copies. A tied weight may come under
    any of its names, and moves once. Raises KernelError for an unknown name, a different shape, or
    a missing weight: half a version is no version; and for weights beside another base.
    """
    new_pieces = take_base(new_pieces, find_base(module), str(module.name_or_path))
    if not new_pieces:
        return 0
    targets: dict[str, Tensor] = dict(named_trained(module, remove_duplicate=False))
    targets |= dict(_kept_buffers(module))
    done: set[int] = set()
    with torch.no_grad():
        for piece in new_pieces:
            target = _find_target(targets, piece)
            if id(target) not in done:
                _move(target, part_like(target, piece.data), rate)
            done.add(id(target))
    left = [name for name, target in targets.items() if id(target) not in done]
    if left:
        raise KernelError(
            f"expected all weights, found {len(done)}: {left[0]} did not come. Fix: send all"
            " pieces."
        )
    merge_again(module)
    return len(new_pieces)


def _move(target: Tensor, towards: Tensor, rate: float) -> None:
    if rate == 1.0 or not target.is_floating_point():
        target.copy_(towards)
    else:
        target.lerp_(towards.to(device=target.device, dtype=target.dtype), rate)


def _find_target(targets: dict[str, Tensor], piece: Piece) -> Tensor:
    """Find the weight that a piece is for. Raises KernelError if there is none of its shape."""
    target = targets.get(piece.name)
    if target is None:
        near = nearest(piece.name, targets)
        hint = f"did you mean {near}" if near else "the reader's Model has another base or head"
        raise KernelError(f"expected a weight of the module, found {piece.name!r}. Fix: {hint}.")
    if tuple(target.shape) != tuple(piece.data.shape):
        raise KernelError(
            f"weight {piece.name!r}: expected shape {tuple(target.shape)}, found"
            f" {tuple(piece.data.shape)}. Fix: writer and reader need the same base."
        )
    return target


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint includes; rotary tables are not among them."""
    checkpoint_names = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in checkpoint_names:
            yield name, buffer
