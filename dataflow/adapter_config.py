"""What an adapter that was saved must be, so that a Model can begin with it, or its base be merged.

Owns: reading adapter_config.json and the digest of its base without torch, and what is refused of
them, with the fix. Does not own: its weights (operators/kernels/torch/adapter_files.py), the digest
(base_digest.py), peft's format itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dataflow.adapters import ALL_LINEAR, Lora, Scale
from dataflow.base_digest import base_digest
from dataflow.model_files import folder_of, header, listing, parse_object, read_metadata

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE_DIGEST = "base_digest"
"""The key in the header of its weights; peft and others write none."""

Complaint = tuple[str, str]
"""What is wrong, and the fix."""

_PLAIN = "an adapter of plain LoRA"
_MERGED = f"{_PLAIN}, or a base into which PEFT has merged it (merge_and_unload)"
_FRESH_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base as it is; `pissa`, `olora`, `corda` and `loftq` change it."""
_HEADS = ("lm_head", "embed_tokens")
_ABSENT = {
    "use_dora": "DoRA, which scales the base's own matrices",
    "use_qalora": "QA-LoRA, which needs a quantised base",
    "rank_pattern": "matrices of several ranks",
    "alpha_pattern": "matrices of several scales",
    "modules_to_save": "whole weights of the base that were trained beside it",
    "layer_replication": "layers that its base has once and it has several times",
    "trainable_token_indices": "trained rows of the embedding",
    "lora_bias": "biases of its own",
    "alora_invocation_tokens": "an adapter that begins at some token",
}
"""Settings of peft that change what is computed, by their names, and what they are."""


_FIRST = ".lora_A.weight"
_PREFIX = "base_model.model."
_HEADS_BY_TASK: dict[Any, Literal["lm", "scalar"]] = {
    None: "lm",
    "CAUSAL_LM": "lm",
    "TOKEN_CLS": "scalar",
}
"""peft's task_type, by which a Model's head is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """What an adapter's folder says of it. adapter: with the targets that its weights have, and the
    folder as its beginning. base: the name of its base; empty if it has none.
    """

    adapter: Lora
    base: str
    head: Literal["lm", "scalar"]


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder has an adapter in peft's format."""
    return (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file()


def find_adapter_complaint(adapter: Lora, folder: Path) -> Complaint | None:
    """Find the first reason why a Model with this adapter cannot begin with what a folder has; None
    if it can. Raises DataError for a damaged file.
    """
    if not is_adapter_folder(folder):
        return _describe_absence(folder)
    path = folder / CONFIG
    config = parse_object(path, path.read_bytes())
    for problem, fix in _list_complaints(adapter, config):
        return f"{path}: {problem}", fix
    return None


def find_base_complaint(base: str, path: Path) -> Complaint | None:
    """Find whether an adapter was trained beside another base than this one, as far as both are
    known. path: of its weights. Raises DataError for a damaged file.
    """
    base_folder = folder_of(base)
    saved_digest = read_metadata(path).get(BASE_DIGEST, "")
    if base_folder is None or not saved_digest:
        return None
    digest = base_digest(base_folder)
    if digest in ("", saved_digest):
        return None
    problem = (
        f"expected an adapter that was trained beside its base {base}, digest {digest}, found in"
        f" {path.parent} one of a base of digest {saved_digest}"
    )
    return problem, "the base beside which it was trained"


def read_saved_adapter(folder: Path) -> SavedAdapter | Complaint:
    """Read what an adapter is, or why it is none that works here. Raises DataError for a damaged
    file.
    """
    if not is_adapter_folder(folder):
        return _describe_absence(folder)
    path = folder / CONFIG
    config = parse_object(path, path.read_bytes())
    rank, alpha, task = config.get("r"), config.get("lora_alpha"), config.get("task_type")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        problem = f"{path}: expected numbers r and lora_alpha, found {rank!r} and {alpha!r}"
        return problem, _PLAIN
    if task not in _HEADS_BY_TASK:
        problem = f"{path}: expected an adapter of a causal language model, found task_type {task}"
        return problem, _PLAIN
    scale: Scale = "rslora" if config.get("use_rslora") else "lora"
    targets: str | tuple[str, ...] = tuple(_find_targets(folder))
    if config.get("target_parameters"):
        targets = ALL_LINEAR
    adapter = Lora(rank=rank, alpha=alpha, targets=targets, start=str(folder), scale=scale)
    complaint = find_adapter_complaint(adapter, folder)
    if complaint is not None:
        return complaint
    base = config.get("base_model_name_or_path")
    return SavedAdapter(adapter=adapter, base=base or "", head=_HEADS_BY_TASK[task])


def _find_targets(folder: Path) -> Iterator[str]:
    """The paths of the modules that have a matrix A in an adapter's file."""
    for name in header(folder / WEIGHTS):
        if name.endswith(_FIRST):
            yield name.removeprefix(_PREFIX).removesuffix(_FIRST)


def _describe_absence(folder: Path) -> Complaint:
    what = "nothing there"
    if folder.is_dir():
        what = listing(folder)
    problem = f"expected {WEIGHTS} and {CONFIG} in {folder}, found {what}"
    return problem, "the folder that save_pretrained of PEFT wrote, or a checkpoint of a run"


def _list_complaints(adapter: Lora, config: Mapping[str, Any]) -> Iterator[Complaint]:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield f"expected {_PLAIN}, found peft_type {kind}", _PLAIN
    for name, meaning in _ABSENT.items():
        if config.get(name):
            yield f"expected {_PLAIN}, found {meaning} ({name}={config[name]!r:.60})", _MERGED
    if config.get("bias", "none") != "none":
        yield f"expected no trained biases, found bias={config['bias']!r}", _MERGED
    yield from _check_start(config)
    yield from _check_targets(config)
    yield from _check_scale(adapter, config)


def _check_start(config: Mapping[str, Any]) -> Iterator[Complaint]:
    start = config.get("init_lora_weights", True)
    if start in _FRESH_STARTS:
        return
    problem = (
        f"expected an adapter that leaves its base as it is, found one that began with {start!r},"
        " which takes away from the base what the adapter begins with"
    )
    fix = "save it with path_initial_model_for_weight_conversion (PEFT), which makes it a plain one"
    yield problem, fix


def _check_targets(config: Mapping[str, Any]) -> Iterator[Complaint]:
    targets = config.get("target_modules") or ()
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    for name in names:
        if name.rpartition(".")[2] in _HEADS:
            problem = f"expected targets in the layers, found {name}, which samplers do not serve"
            yield problem, _MERGED


def _check_scale(adapter: Lora, config: Mapping[str, Any]) -> Iterator[Complaint]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    scale = "rslora" if config.get("use_rslora") else "lora"
    saved = (rank, alpha, scale)
    if saved == (adapter.rank, adapter.alpha, adapter.scale):
        return
    fix = f"lora(rank={rank}, alpha={alpha}, start=...)"
    if scale == "rslora":
        fix = f"lora(rank={rank}, alpha={alpha}, scale='rslora', start=...)"
    yield f"expected {adapter}, found r={rank}, lora_alpha={alpha} and scale {scale!r}", fix
