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
    if local.is_dir():
        return local
    if is_path(base):
        return None
    cached = _find_cache() / f"models--{base.replace('/', '--')}"
    main = cached / "refs" / "main"
    if not main.is_file():
        return None
    commit = main.read_text(encoding="ascii").strip()
    snapshot = cached / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def near_directory(missing: Path) -> str:
    """The fix for a directory that does not exist: the one beside it with the nearest name."""
    parent = missing.parent
    siblings: list[str] = []
    if parent.is_dir():
        siblings = [path.name for path in parent.iterdir() if path.is_dir()]
    close = nearest(missing.name, siblings)
    return f"{parent / close}" if close else "give an existing directory or a hub name (owner/name)"


def _find_cache() -> Path:
    """The hub's cache, found through the environment as huggingface_hub finds it."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = os.environ.get("HF_HOME") or cache_home / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    return Path(hub).expanduser()


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; cached as long as the file does not change."""
    stat = path.stat()
    return _read_unchanged_object(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _read_unchanged_object(path: Path, modified: int, size: int) -> dict[str, Any]:
    """modified, size: what tells a changed file from the one that is cached."""
    return parse_object(path, path.read_bytes())


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse a JSON object from the bytes of a file."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected JSON, found: {error}. Fix: {AGAIN}.") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise DataError(f"{path}: expected a JSON object, found {kind}. Fix: {AGAIN}.")
    return document


def maybe_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


# --- weights --------------------------------------------------------------------------------------


def stored_weights(folder: Path) -> Mapping[str, StoredTensor] | None:
    """Read every tensor of the files that transformers would load, from their headers; None if
    these are pickles. Raises DataError if there are no weights, or a file is cut short, damaged or
    missing.
    """
    if (folder / SAFETENSORS).is_file():
        return header(folder / SAFETENSORS)
    index = folder / f"{SAFETENSORS}{INDEX}"
    if index.is_file():
        return _read_shards(index)
    if any((folder / name).is_file() for name in (BIN, f"{BIN}{INDEX}")):
        return None
    raise DataError(
        f"{folder}: expected weights ({SAFETENSORS}), found {listing(folder)}. Fix: a complete"
        " model directory."
    )


def listing(folder: Path) -> str:
    """The first names in a folder, for a message."""
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) or "an empty directory"


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index of sharded weights."""
    shards = read_object(index).get("weight_map")
    if isinstance(shards, dict) and shards and all(isinstance(s, str) for s in shards.values()):
        return shards
    raise DataError(
        f"{index}: expected a weight_map of tensors to files, found none. Fix: {AGAIN}."
    )


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    """Read the headers of all files that an index names."""
    shard_of = _read_weight_map(index)
    shards = list(dict.fromkeys(shard_of.values()))
    missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    if missing:
        count = len(missing)
        raise DataError(
            f"{index}: expected the file {missing[0]}, found none ({count} missing). Fix: {AGAIN}."
        )
    headers = {shard: header(index.parent / shard) for shard in shards}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise DataError(
                f"{index}: expected {name} in {shard}, found no such tensor. Fix: {AGAIN}."
            )
        tensors[name] = headers[shard][name]
    return tensors


def header(path: Path) -> Mapping[str, StoredTensor]:
    """Read the tensors of a safetensors file; cached as long as the file does not change.

    8 bytes little-endian length, a JSON header, then the tensors' bytes, without holes (safetensors
    README, "Format").
    """
    stat = path.stat()
    return _read_unchanged_header(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _read_unchanged_header(path: Path, modified: int, size: int) -> Mapping[str, StoredTensor]:
    """modified, size: what tells a changed file from the one that is cached."""
    with path.open("rb") as file:
        start = file.read(8)
        # A shorter file has no length, and 0 is refused below.
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == _POINTER[:8] and (start + file.read(15)) == _POINTER:
            raise DataError(
                f"{path}: expected a safetensors file, found a Git LFS pointer. Fix: git lfs pull."
            )
        if not 2 <= length <= min(_LARGEST_HEADER, size):
            raise DataError(f"{path}: expected a safetensors file, found no header. Fix: {AGAIN}.")
        file.seek(8)
        entries = parse_object(path, file.read(length))
    entries.pop("__metadata__", None)
    ends = [_require_entry(path, name, entry) for name, entry in entries.items()]
    expected_size = 8 + length + max(ends, default=0)
    if expected_size != size:
        raise DataError(f"{path}: expected {expected_size:,} bytes, found {size:,}. Fix: {AGAIN}.")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        tensors[name] = StoredTensor(dtype=entry["dtype"], shape=tuple(entry["shape"]))
    return tensors


def read_metadata(path: Path) -> Mapping[str, str]:
    """Read what a safetensors file says of itself, by key; of a sound file, as `header` has it."""
    header(path)
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        entries = parse_object(path, file.read(length))
    metadata = entries.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _require_entry(path: Path, name: str, entry: Any) -> int:
    """Where the tensor's bytes end, relative to the end of the header. Raises DataError for an
    entry that does not say, or contradicts itself.
    """
    try:
        kind, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        size = end - begin
        if kind in _BYTES:
            size = prod(shape) * _BYTES[kind]
        is_sound = 0 <= begin <= end and end - begin == size
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        raise DataError(
            f"{path}: expected a type, a shape and a place for {name!r}, found {entry!r:.80}. Fix:"
            f" {AGAIN}."
        )
    return end


# --- tokenizer ------------------------------------------------------------------------------------


def token_ids(file: Path) -> Mapping[str, int]:
    """Token -> id in a tokenizer.json, including added tokens. Raises DataError."""
    content = read_object(file)
    inner = content.get("model")
    vocabulary = inner.get("vocab", {}) if isinstance(inner, dict) else {}
    added = content.get("added_tokens") or []
    try:
        if isinstance(vocabulary, list):  # Unigram: [[token, score], ...] in the order of ids
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added_ids = {token["content"]: token["id"] for token in added}
        ids = {**vocabulary, **added_ids}
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{file}: expected tokens with their ids, found {error!r}. Fix: {AGAIN}."
        ) from error
    for token, token_id in ids.items():
        if type(token_id) is not int:
            problem = f"expected an id for token {token!r:.40}, found {token_id!r:.40}"
            raise DataError(f"{file}: {problem}. Fix: {AGAIN}.")
    return ids


def placeholder_ids(file: Path) -> frozenset[int]:
    """Ids of added special tokens: some models have some, for media that they cannot read, beyond
    their embedding.
    """
    added = read_object(file).get("added_tokens") or []
    return frozenset(token["id"] for token in added if token.get("special"))


def end_ids(folder: Path) -> frozenset[int] | None:
    """Ids that end an answer, by generation_config.json and the tokenizer's files; None if these do
    not say. Raises DataError if generation_config.json has something other than ids.
    """
    eos_token_id = maybe_object(folder / GENERATION).get("eos_token_id")
    ends = ends_of(eos_token_id, folder / GENERATION)
    if ends:
        return ends
    settings = maybe_object(folder / TOKENIZER_CONFIG)
    settings = settings | maybe_object(folder / "special_tokens_map.json")
    if "eos_token" not in settings:
        return None  # the tokenizer's class may have a default
    token = settings["eos_token"]
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return frozenset()
    file = folder / TOKENIZER
    if not file.is_file() or not isinstance(token, str):
        return None
    token_id = token_ids(file).get(token)
    return None if token_id is None else frozenset({token_id})


def ends_of(eos_token_id: Any, where: Path | str) -> frozenset[int]:
    """Read eos_token_id as generation_config.json writes it: an id, a list of them, or none."""
    if isinstance(eos_token_id, list):
        ends = eos_token_id
    elif eos_token_id is None:
        ends = []
    else:
        ends = [eos_token_id]
    if not all(map(_is_token_id, ends)):
        raise DataError(
            f"{where}: expected eos_token_id to be token ids, found {eos_token_id!r:.60}. Fix:"
            " eos_token_id: 2."
        )
    return frozenset(ends)


def _is_token_id(end: Any) -> bool:
    return isinstance(end, int) and not isinstance(end, bool) and end >= 0


def has_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = maybe_object(folder / TOKENIZER_CONFIG)
    if settings.get("chat_template"):
        return True
    return any((folder / name).exists() for name in files)


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
    if isinstance(text, dict):
        config = {**config, **text}
    limits = [config.get(key) for key in _LIMITS]
    known_limits = [limit for limit in limits if type(limit) is int and limit > 0]
    if not known_limits:
        return None
    limit = min(known_limits)
    return min(_stretch(limit, kind, scaling, config) for kind, scaling in rotary_of(config))


def rotary_of(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The kinds of rotary positions with their settings: one for all layers, or one for each kind
    of layer. Phi-3's `su` and `yarn` are what transformers calls longrope.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        rope = {}
    # Settings of settings are those of the kinds of layers.
    scalings = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    is_phi3 = config.get("model_type") == "phi3"
    kinds: list[str] = []
    for scaling in scalings:
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        if is_phi3 and kind in ("su", "yarn"):
            kind = "longrope"
        kinds.append(kind)
    return list(zip(kinds, scalings, strict=True))


def _stretch(
    positions: int, kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> int:
    """The positions with a rotary scaling."""
    factor, key = scaling.get("factor"), "original_max_position_embeddings"
    if kind == "longrope":
        original = scaling.get(key, config.get(key))
        if type(original) is int and original > 0:
            return original
        return positions
    if kind not in ("yarn", "linear") or not isinstance(factor, (int, float)):
        return positions
    if not 1 <= factor < math.inf:
        return positions
    original = scaling.get(key)
    if kind == "yarn" and type(original) is int:
        return int(original * factor)
    return int(positions * factor)
