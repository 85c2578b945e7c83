"""The files in a Model's directory, read without torch: JSON files, tokenizer, headers of
safetensors.

Owns: finding a base's directory, reading those files, and the messages for broken ones. Does not
own: which of it is a fault of a graph (rules/bases.py), loading (operators/kernels), counting
parameters (engine/plan/cost/models.py).

Everything here raises DataError in the form `<path>: expected ..., found .... Fix: ....`
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, nearest

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"

AGAIN = "copy the model again"

_LARGEST_HEADER = 100 * 2**20
"""The format's own bound (safetensors README, "Format")."""

_POINTER = b"version https://git-lfs"

_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the types whose sizes are checked; the format has others, of partial bytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as its file's header declares it."""

    dtype: str
    shape: tuple[int, ...]


def is_path(base: str) -> bool:
    """Whether a base can only be a path; a hub name is `name` or `owner/name`."""
    return base.startswith((".", "/", "~")) or base.count("/") > 1


def folder_of(base: str) -> Path | None:
    """The directory of a base on this machine: a path, or a hub name that is in the cache; else
    None.

    The cache is laid out as huggingface_hub documents it ("Manage huggingface_hub cache-system").
    """
    local = Path(base).expanduser()
    if local.is_dir() or is_path(base):
        return local if local.is_dir() else None
    cached = _cache() / f"models--{base.replace('/', '--')}"
    main = cached / "refs" / "main"
    snapshot = (
        cached / "snapshots" / main.read_text(encoding="ascii").strip() if main.is_file() else None
    )
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def near_directory(missing: Path) -> str:
    """The fix for a directory that does not exist."""
    parent = missing.parent
    known = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    close = nearest(missing.name, known)
    return f"{parent / close}" if close else "give an existing directory or a hub name (owner/name)"


def _cache() -> Path:
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; cached as long as the file does not change."""
    stat = path.stat()
    return _object(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _object(path: Path, modified: int, size: int) -> dict[str, Any]:
    return parsed(path, path.read_bytes())


def parsed(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object from the bytes of a file."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected JSON, found: {error}. Fix: {AGAIN}.") from error
    if not isinstance(found, dict):
        raise DataError(
            f"{path}: expected a JSON object, found {type(found).__name__}. Fix: {AGAIN}."
        )
    return found


def maybe_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


# --- weights --------------------------------------------------------------------------------------


def stored_weights(folder: Path) -> Mapping[str, StoredTensor] | None:
    """Every tensor of the files that transformers would load, from their headers; None if these are
    pickles. Raises DataError if there are no weights, or a file is cut short, damaged or missing.
    """
    if (folder / SAFETENSORS).is_file():
        return header(folder / SAFETENSORS)
    index = folder / f"{SAFETENSORS}{INDEX}"
    if index.is_file():
        return _sharded(index)
    if any((folder / name).is_file() for name in (BIN, f"{BIN}{INDEX}")):
        return None
    found = listing(folder)
    raise DataError(
        f"{folder}: expected weights ({SAFETENSORS}), found {found}. Fix: a complete model"
        " directory."
    )


def listing(folder: Path) -> str:
    """The first names in a folder, for a message."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "an empty directory"


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index of sharded weights."""
    shards = read_object(index).get("weight_map")
    if isinstance(shards, dict) and shards and all(isinstance(s, str) for s in shards.values()):
        return shards
    raise DataError(
        f"{index}: expected a weight_map of tensors to files, found none. Fix: {AGAIN}."
    )


def _sharded(index: Path) -> dict[str, StoredTensor]:
    shards = _weight_map(index)
    gone = sorted({s for s in shards.values() if not (index.parent / s).is_file()})
    if gone:
        raise DataError(
            f"{index}: expected the file {gone[0]}, found none ({len(gone)} missing). Fix: {AGAIN}."
        )
    tensors = {shard: header(index.parent / shard) for shard in dict.fromkeys(shards.values())}
    for name, shard in shards.items():
        if name not in tensors[shard]:
            raise DataError(
                f"{index}: expected {name} in {shard}, found no such tensor. Fix: {AGAIN}."
            )
    return {name: tensors[shard][name] for name, shard in shards.items()}


def header(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file; cached as long as the file does not change.

    8 bytes little-endian length, a JSON header, then the tensors' bytes, without holes (safetensors
    README, "Format").
    """
    stat = path.stat()
    return _header(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _header(path: Path, modified: int, size: int) -> Mapping[str, StoredTensor]:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == _POINTER[:8] and (start + file.read(15)) == _POINTER:
            raise DataError(
                f"{path}: expected a safetensors file, found a Git LFS pointer. Fix: git lfs pull."
            )
        if not 2 <= length <= min(_LARGEST_HEADER, size):
            raise DataError(f"{path}: expected a safetensors file, found no header. Fix: {AGAIN}.")
        file.seek(8)
        entries = parsed(path, file.read(length))
    entries.pop("__metadata__", None)
    ends = [_checked(path, name, entry) for name, entry in entries.items()]
    whole = 8 + length + max(ends, default=0)
    if whole != size:
        raise DataError(f"{path}: expected {whole:,} bytes, found {size:,}. Fix: {AGAIN}.")
    return {n: StoredTensor(dtype=e["dtype"], shape=tuple(e["shape"])) for n, e in entries.items()}


def _checked(path: Path, name: str, entry: Any) -> int:
    """Where the tensor's bytes end, relative to the end of the header."""
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        size = prod(shape) * _BYTES[kind] if kind in _BYTES else end - begin
        right = 0 <= begin <= end and end - begin == size
    except (TypeError, KeyError, ValueError):
        right = False
    if not right:
        raise DataError(
            f"{path}: expected a type, a shape and a place for {name!r}, found {entry!r:.80}. Fix:"
            f" {AGAIN}."
        )
    return end


# --- tokenizer ------------------------------------------------------------------------------------


def token_ids(file: Path) -> Mapping[str, int]:
    """Token -> id in a tokenizer.json, including added tokens."""
    content = read_object(file)
    inner = content.get("model")
    vocabulary = inner.get("vocab", {}) if isinstance(inner, dict) else {}
    added = content.get("added_tokens") or []
    try:
        if isinstance(vocabulary, list):  # Unigram: [[token, score], ...] in the order of ids
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        found = {**vocabulary, **{one["content"]: one["id"] for one in added}}
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{file}: expected tokens with their ids, found {error!r}. Fix: {AGAIN}."
        ) from error
    odd = next((token for token, one in found.items() if type(one) is not int), None)
    if odd is not None:
        raise DataError(
            f"{file}: expected an id for token {odd!r:.40}, found {found[odd]!r:.40}. Fix: {AGAIN}."
        )
    return found


def placeholder_ids(file: Path) -> frozenset[int]:
    """Ids of added special tokens: some models have some, for media that they cannot read, beyond
    their embedding.
    """
    added = read_object(file).get("added_tokens") or []
    return frozenset(one["id"] for one in added if one.get("special"))


def end_ids(folder: Path) -> frozenset[int] | None:
    """Ids that end an answer, by generation_config.json and the tokenizer's files; None if these do
    not say. Raises DataError if generation_config.json has something other than ids.
    """
    given = maybe_object(folder / GENERATION).get("eos_token_id")
    ends = ends_of(given, folder / GENERATION)
    if ends:
        return ends
    settings = maybe_object(folder / TOKENIZER_CONFIG) | maybe_object(
        folder / "special_tokens_map.json"
    )
    if "eos_token" not in settings:
        return None  # the tokenizer's class may have a default
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return frozenset()
    file = folder / TOKENIZER
    known = token_ids(file).get(token) if file.is_file() and isinstance(token, str) else None
    return None if known is None else frozenset({known})


def ends_of(given: Any, where: Path | str) -> frozenset[int]:
    """eos_token_id as generation_config.json writes it: an id, a list of them, or none."""
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
        raise DataError(
            f"{where}: expected eos_token_id to be token ids, found {given!r:.60}. Fix:"
            " eos_token_id: 2."
        )
    return frozenset(ends)


def has_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = maybe_object(folder / TOKENIZER_CONFIG)
    return bool(settings.get("chat_template")) or any((folder / name).exists() for name in files)


# --- positions ------------------------------------------------------------------------------------

_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
"""The names that architectures use for the most positions of a row (as vLLM reads them,
`_get_and_verify_max_len`).
"""


def positions_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens per row, prompt and answer, whose numbers a model can give; None if its
    config.json has no limit.

    Rotary scaling counts as in vLLM: yarn stretches its original positions, linear those of the
    config; llama3 gives the stretched number itself. transformers picks the angles of two kinds by
    the longest row of a batch, and a row must not depend on those beside it: `dynamic` ends at the
    positions of the config, `longrope` at its original ones (`modeling_rope_utils.py`,
    `dynamic_rope_update`).
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    found = [config[key] for key in _LIMITS if type(config.get(key)) is int and config[key] > 0]
    if not found:
        return None
    each = rotary_of(config)
    return min(_stretched(min(found), kind, fields, config) for kind, fields in each)


def rotary_of(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The kinds of rotary positions with their settings: one for all layers, or one for each kind
    of layer. Phi-3's `su` and `yarn` are what transformers calls longrope.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling")
    given = given if isinstance(given, Mapping) else {}
    each = [one for one in given.values() if isinstance(one, Mapping)] or [given]
    phi3 = config.get("model_type") == "phi3"
    kinds = [str(one.get("rope_type", one.get("type", "default"))) for one in each]
    named = ["longrope" if phi3 and kind in ("su", "yarn") else kind for kind in kinds]
    return list(zip(named, each, strict=True))


def _stretched(
    positions: int, kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> int:
    """The positions with a rotary scaling."""
    factor, key = scaling.get("factor"), "original_max_position_embeddings"
    before = scaling.get(key, config.get(key))
    if kind == "longrope":
        return before if type(before) is int and before > 0 else positions
    if kind not in ("yarn", "linear") or not isinstance(factor, (int, float)):
        return positions
    if not 1 <= factor < math.inf:
        return positions
    start = scaling.get(key) if kind == "yarn" else None
    return int((start if type(start) is int else positions) * factor)
