"""Bases: the directories of Models contain what their nodes need, as far as can be read without
torch.

Owns: the faults in those files: configuration, weights (headers only), score heads, tokenizers,
positions. Does not own: reading them (model_files.py); which architectures work (architectures.py);
what only a loaded model shows, such as NaN, which kernels refuse when they open; hub names that are
not in the cache, about which nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dataflow.architectures import refusal
from dataflow.errors import DataError, Fault
from dataflow.model import Model
from dataflow.model_files import (
    AGAIN,
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    StoredTensor,
    end_ids,
    folder_of,
    has_template,
    is_path,
    listing,
    near_directory,
    placeholder_ids,
    read_object,
    stored_weights,
    token_ids,
)
from dataflow.node import Node, Port
from dataflow.positions import Positions, row_positions
from dataflow.prompt_types import is_messages
from dataflow.rows import generations, nearest_prompt, reader_of
from dataflow.rules.context import Context, fault_at, name_node, node_models
from dataflow.schema import TokenPrompt

Complaint = tuple[str, str]
"""What is wrong, and the fix."""

_VOCABULARIES = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "auto")
_TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")
_HEADS = ("score.weight", "classifier.weight")
_SAVED = "save model and tokenizer there with save_pretrained"


def check_model_files(context: Context) -> Iterator[Fault]:
    """Bases that are missing or incomplete, heads that nothing trains, answers that cannot end or
    cannot fit.
    """
    # By Model, the directories without a fault: the others have been reported.
    sound_folders: dict[str, Path] = {}
    reported: set[tuple[str, Complaint]] = set()
    for model, node in _first_uses(context):
        complaints = list(_check_base(context, model))
        for problem, fix in complaints:
            if (model.base, (problem, fix)) not in reported:  # once for Models of one base
                yield _fault(node, f"Model {model.name!r}: {problem}", fix)
        reported |= {(model.base, complaint) for complaint in complaints}
        folder = folder_of(model.base)
        if folder is not None and not complaints:
            sound_folders[model.name] = folder
    for node in context.graph.nodes:
        yield from _check_answers(context, node, sound_folders)
        yield from _check_top_k(node, sound_folders)
        yield from _check_templates(context, node, sound_folders)
        yield from _check_conversations(context, node, sound_folders)
    yield from _check_positions(context)


def _check_top_k(node: Node, sound_folders: Mapping[str, Path]) -> Iterator[Fault]:
    """More of the likeliest tokens than there are."""
    top_k, model = node.params.get("top_k"), node.states.get("model")
    if not node.operator.log_probs or not isinstance(top_k, int) or not isinstance(model, Model):
        return
    folder = sound_folders.get(model.name)
    if folder is None:
        return
    size = read_object(folder / CONFIG).get("vocab_size")
    if isinstance(size, int) and top_k > size:
        problem = (
            f"expected top_k of at most the {size} tokens that Model {model.name!r} knows, found"
            f" {top_k}"
        )
        yield _fault(node, problem, f"top_k={size}, the whole distribution")


def _fault(node: Node, problem: str, fix: str) -> Fault:
    return fault_at(node, "base", problem, fix)


def _first_uses(context: Context) -> Iterator[tuple[Model, Node]]:
    """Each Model once, with the first node that uses it."""
    names: set[str] = set()
    for node in context.graph.nodes:
        for model in node_models(node):
            if model.name not in names:
                names.add(model.name)
                yield model, node


# --- the files of a base --------------------------------------------------------------------------


def _check_base(context: Context, model: Model) -> Iterator[Complaint]:
    """Faults in one Model's directory; a file is looked at only if the earlier ones can be read."""
    local = Path(model.base).expanduser()
    if local.is_file():
        yield (
            f"expected a model directory as its base, found a file, {model.base}",
            f"{_SAVED}, and name the directory",
        )
        return
    folder = folder_of(model.base)
    if folder is None:
        if is_path(model.base):
            yield (
                f"expected a model directory as its base, found nothing at {model.base}",
                near_directory(local),
            )
        return
    is_trained = model.name in context.trained or bool(model.trainable) or model.follows is not None
    is_trained = is_trained or model.name in context.carried
    try:
        yield from _check_files(folder, model, fresh=is_trained)
    except DataError as error:
        problem, _, fix = str(error).rstrip(".").partition(". Fix: ")
        yield problem, fix or AGAIN
    except OSError as error:
        yield (
            f"expected files that can be read, found {error}",
            "a directory and files that this user may read",
        )


def _check_files(folder: Path, model: Model, *, fresh: bool) -> Iterator[Complaint]:
    """The files, one after another, up to the first wrong one: its consequences would hide it.
    fresh: whether the Model gets a new head where its base has none.
    """
    missing = next(_find_missing(folder), None)
    if missing is not None:
        yield missing
        return
    config = read_object(folder / CONFIG)
    # Generators: none looks at its files before those in front of it have found nothing.
    complaints = chain(
        _check_configuration(folder, config),
        _check_weights(folder, model, config, fresh=fresh),
        _check_token_ids(folder, config),
    )
    yield from islice(complaints, 1)


def _find_missing(folder: Path) -> Iterator[Complaint]:
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        yield (
            f"expected a whole model in {folder}, found an adapter (PEFT), which has no weights of"
            " its own model",
            f"the adapter's own base, with adapter=lora(..., start={str(folder)!r}); or dataflow"
            f" merge {folder} OUT, and OUT as the base",
        )
        return
    for name in (CONFIG, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            yield f"expected {name} in {folder}, found {listing(folder)}", _SAVED
            return
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        yield f"expected a tokenizer ({TOKENIZER}) in {folder}, found {listing(folder)}", _SAVED


def _check_configuration(folder: Path, config: dict[str, Any]) -> Iterator[Complaint]:
    file = folder / CONFIG
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        problem = f"expected a model_type, found {model_type!r}"
        yield f"{file}: {problem}", 'the architecture\'s name, such as "qwen2"'
    elif (why := refusal(config)) is not None:
        yield f"{file}: expected an architecture that works here, found {why.reason}", why.fix
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype.removeprefix("torch.") not in _DTYPES:
        yield f"{file}: expected a dtype such as float32 or bfloat16, found {dtype!r:.40}", AGAIN
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        count = config.get(key)
        if count is not None and not _is_positive(count):
            problem = f"expected {key} to be a whole number >= 1, found {count!r:.40}"
            yield f"{file}: {problem}", AGAIN


def _is_positive(count: Any) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


def _check_weights(
    folder: Path, model: Model, config: dict[str, Any], *, fresh: bool
) -> Iterator[Complaint]:
    stored = stored_weights(folder)
    if stored is None:  # pickles: the kernel looks when it opens them
        return
    yield from _check_sizes(folder, config, stored)
    if model.head == "scalar" and not fresh:
        yield from _check_score_head(folder, stored)


def _check_sizes(
    folder: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterator[Complaint]:
    """The embedding has the configuration's size, and there are as many layers."""
    embeddings = [name for name in stored if name.endswith("embed_tokens.weight")]
    expected = (config.get("vocab_size"), config.get("hidden_size"))
    if len(embeddings) == 1 and None not in expected:
        name = embeddings[0]
        shape = stored[name].shape
        if shape != expected:
            yield f"{folder}: expected {name} of {expected} by config.json, found {shape}", AGAIN
    layers, layer_count = _stored_layers(stored), config.get("num_hidden_layers")
    if layers and isinstance(layer_count, int):
        missing = sorted(set(range(layer_count)) - layers)
        if missing:
            problem = f"expected the weights of {layer_count} layers, found none of layer"
            yield f"{folder}: {problem} {missing[0]}", AGAIN


def _stored_layers(names: Iterable[str]) -> set[int]:
    """The numbers of the layers, by `model.layers.NUMBER.` in the names of tensors."""
    layers: set[int] = set()
    for name in names:
        parts = name.split(".")
        if len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit():
            layers.add(int(parts[2]))
    return layers


def _check_score_head(folder: Path, stored: Mapping[str, StoredTensor]) -> Iterator[Complaint]:
    """The files of a reward model or critic that nothing trains contain its head."""
    name = next((name for name in _HEADS if name in stored), "")
    if not name:
        problem = (
            f"expected a trained score head in {folder}, found no score.weight, and nothing here"
            " trains one"
        )
        yield problem, "a base that was saved with its score head, or a Model that is trained"
    elif stored[name].shape[:1] != (1,):
        problem = f"expected a score head of one number, found {name} of {stored[name].shape}"
        yield f"{folder}: {problem}", "num_labels=1"


def _check_token_ids(folder: Path, config: dict[str, Any]) -> Iterator[Complaint]:
    """The embedding knows every id that the tokenizer produces."""
    ends, rows = end_ids(folder) or frozenset(), config.get("vocab_size")
    has_template(folder)  # reads a file that may be unread so far: finds a broken one here
    if not isinstance(rows, int):
        return
    beyond = _find_ids_beyond(folder / TOKENIZER, rows)
    if beyond:
        first, token = min(beyond)
        problem = (
            f"{folder}: expected token ids below its vocab_size of {rows:,}, found {len(beyond):,}"
            f" beyond it, the first {first} ({token!r:.40})"
        )
        yield problem, "the tokenizer that belongs to this model"
    if ends and max(ends) >= rows:
        problem = (
            f"{folder}: expected the end of sequence below its vocab_size of {rows:,}, found"
            f" {max(ends)}"
        )
        yield problem, "eos_token_id in generation_config.json"


def _find_ids_beyond(tokenizer: Path, rows: int) -> list[tuple[int, str]]:
    """Ids and tokens for which the embedding has no row, placeholders left out."""
    if not tokenizer.is_file():
        return []
    beyond = [(number, token) for token, number in token_ids(tokenizer).items() if number >= rows]
    placeholders = placeholder_ids(tokenizer)
    return [(number, token) for number, token in beyond if number not in placeholders]


# --- nodes and the files of their Models ----------------------------------------------------------


def _check_answers(
    context: Context, node: Node, sound_folders: Mapping[str, Path]
) -> Iterator[Fault]:
    """Generations whose answers cannot end, or that cannot render their prompts."""
    models = node_models(node)
    if not node.operator.traits.generates or not models or models[0].name not in sound_folders:
        return
    name, folder = models[0].name, sound_folders[models[0].name]
    if end_ids(folder) == frozenset() and not node.params.get("stop"):
        problem = (
            f"Model {name!r}: expected a token that ends an answer, found no eos_token in {folder}"
        )
        yield _fault(node, problem, "eos_token in tokenizer_config.json, or stop=")
    prompt = next(iter(node.inputs.values()))
    if _has_conversations(context, prompt) and not has_template(folder):
        problem = (
            f"Model {name!r}: the prompts are messages, and its tokenizer in {folder} has no chat"
            " template"
        )
        yield _fault(node, problem, "a Model with a chat template, or prompts that are text")


def _has_conversations(context: Context, prompt: Port) -> bool:
    """Whether the data of a source has its prompts as lists of messages."""
    if prompt.node.operator.work != "source":
        return False
    kind = context.dataset(prompt).get("prompt")
    return kind is not None and is_messages(kind)


def _check_templates(
    context: Context, node: Node, sound_folders: Mapping[str, Path]
) -> Iterator[Fault]:
    """Conversations that a reward Model reads as text, and turns added to an answer: both need a
    chat template.
    """
    models: list[Model] = []
    if node.operator.reads_text:
        prompt = nearest_prompt(next(iter(node.inputs.values())), context.domains)
        if prompt is not None and _has_conversations(context, prompt.port()):
            models = node_models(node)
        why, fix = "the prompts are messages", "prompts that are text"
    elif node.operator.decodes and node.params.get("then"):
        for maker in generations(node.inputs[node.operator.decodes]):
            models += node_models(maker)
        why, fix = "then= is the user's next turn", "leave then= out"
    else:
        return
    for model in models:
        folder = sound_folders.get(model.name)
        if folder is not None and not has_template(folder):
            problem = f"{why}, and its tokenizer in {folder} has no chat template"
            fault = f"Model {model.name!r}: {problem}"
            yield _fault(node, fault, f"a Model with a chat template, or {fix}")


def _check_conversations(
    context: Context, node: Node, sound_folders: Mapping[str, Path]
) -> Iterator[Fault]:
    """Data that has conversations, tokenised for a Model that cannot render them."""
    if not node.operator.tokenises:
        return
    reader = reader_of(context.graph, node)
    if reader is None or not node_models(reader):
        return
    model = node_models(reader)[0]
    folder = sound_folders.get(model.name)
    if folder is None or has_template(folder):
        return
    columns = context.dataset(node.port(0))
    names = [*_TEXT_COLUMNS, str(node.params.get("column"))]
    if not {"prompt", "completion"} <= columns.keys():
        names.append("messages")
    if any(name in columns and is_messages(columns[name]) for name in names):
        problem = (
            f"Model {model.name!r}, which reads these rows: the data has messages, and its"
            f" tokenizer in {folder} has no chat template"
        )
        yield _fault(node, problem, "a Model with a chat template, or data that is text")


def _check_positions(context: Context) -> Iterator[Fault]:
    """Answers that, with the requested prompts or with those made of other answers, exceed the
    positions of a Model that reads them.
    """
    positions = row_positions(context.graph)
    for node in context.graph.nodes:
        if node.operator.traits.generates and node.name in positions:
            yield from _check_lengths(node, positions[node.name])


def _check_lengths(node: Node, positions: Positions) -> Iterator[Fault]:
    max_tokens, longest = node.params.get("max_tokens"), node.params.get("max_prompt_tokens")
    if not isinstance(max_tokens, int):
        return
    reads = ""
    if positions.node is not node:
        reads = f", which {name_node(positions.node)} reads these rows with,"
    limit = positions.limit
    has = f"Model {positions.model!r}{reads} has {limit:,} positions"
    context = node.params.get("max_context")
    if isinstance(context, int):
        # A row ends there, however many tokens it may have been given.
        yield from _check_context(node, context, has, limit)
    elif max_tokens >= limit:
        problem = f"{has}, and max_tokens={max_tokens} leaves none for a prompt"
        yield _fault(node, problem, f"max_tokens={max(1, limit // 2)}")
    elif isinstance(longest, int) and longest + max_tokens > limit:
        problem = f"{has}, found max_prompt_tokens={longest} and max_tokens={max_tokens}"
        yield _fault(node, problem, f"max_prompt_tokens={limit - max_tokens}")
    elif longest is None and node.params.get("overlong_prompt") == "error":
        yield from _check_continued_answers(node, has, limit - max_tokens)


def _check_context(node: Node, context: int, has: str, limit: int) -> Iterator[Fault]:
    """Rows that end at a stated length, which a Model does not reach, or whose prompts leave none
    of it.
    """
    longest = node.params.get("max_prompt_tokens")
    if context > limit:
        yield _fault(node, f"{has}, found max_context={context}", f"max_context={limit}")
    elif isinstance(longest, int) and longest >= context:
        problem = f"max_prompt_tokens={longest} leaves nothing of max_context={context}"
        yield _fault(node, problem, f"max_prompt_tokens={max(1, context // 2)}")


def _check_continued_answers(node: Node, has: str, room: int) -> Iterator[Fault]:
    """Answers that are continued, and may alone exceed the room for prompts."""
    prompt = next(iter(node.inputs.values()))
    if not issubclass(prompt.schema, TokenPrompt):
        return
    for maker in generations(prompt):
        before = maker.params.get("max_tokens")
        if isinstance(before, int) and before >= room:
            problem = (
                f"{has}, found max_tokens={node.params['max_tokens']} after the {before} that"
                f" {maker.name!r} may write"
            )
            fix = "overlong_prompt='drop' or 'truncate', or a smaller max_tokens"
            yield _fault(node, problem, fix)
