"""Bases: the directories of Models contain what their nodes need, as far as can be read without
torch.

Owns: the faults in those files: configuration, weights (headers only), score heads, tokenizers,
positions. Does not own: reading them (model_files.py); which architectures work (architectures.py);
what only a loaded model shows, such as NaN, which kernels refuse when they open; hub names that are
not in the cache, about which nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from dataflow.positions import row_positions
from dataflow.prompt_types import is_messages
from dataflow.rows import generations, nearest_prompt, reader_of
from dataflow.rules.context import Context, fault_at, place
from dataflow.schema import TokenPrompt

Complaint = tuple[str, str]
"""What is wrong, and the fix."""

_VOCABULARIES = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "auto")
_SAID = ("prompt", "completion", "chosen", "rejected")
_HEADS = ("score.weight", "classifier.weight")
_SAVED = "save model and tokenizer there with save_pretrained"


def check(context: Context) -> Iterator[Fault]:
    """Bases that are missing or incomplete, heads that nothing trains, answers that cannot end or
    cannot fit.
    """
    sound: dict[str, Path] = {}
    told: set[tuple[str, Complaint]] = set()
    for model, node in _first_uses(context):
        complaints = list(_complaints(context, model))
        for problem, fix in complaints:
            if (model.base, (problem, fix)) not in told:  # once for Models of one base
                yield _fault(node, f"Model {model.name!r}: {problem}", fix)
        told |= {(model.base, complaint) for complaint in complaints}
        folder = folder_of(model.base)
        if folder is not None and not complaints:
            sound[model.name] = folder
    for node in context.graph.nodes:
        yield from _answers(context, node, sound)
        yield from _likeliest(node, sound)
        yield from _rendered(context, node, sound)
        yield from _tokenised(context, node, sound)
    yield from _too_long(context)


def _likeliest(node: Node, sound: Mapping[str, Path]) -> Iterator[Fault]:
    """More of the likeliest tokens than there are."""
    asked, model = node.params.get("top_k"), node.states.get("model")
    if not node.operator.log_probs or not isinstance(asked, int) or not isinstance(model, Model):
        return
    folder = sound.get(model.name)
    size = read_object(folder / CONFIG).get("vocab_size") if folder is not None else None
    if isinstance(size, int) and asked > size:
        problem = (
            f"expected top_k of at most the {size} tokens that Model {model.name!r} knows, found"
            f" {asked}"
        )
        yield _fault(node, problem, f"top_k={size}, the whole distribution")


def _fault(node: Node, problem: str, fix: str) -> Fault:
    return fault_at(node, "base", problem, fix)


def _first_uses(context: Context) -> Iterator[tuple[Model, Node]]:
    """Each Model once, with the first node that uses it."""
    seen: set[str] = set()
    for node in context.graph.nodes:
        for state in node.states.values():
            if isinstance(state, Model) and state.name not in seen:
                seen.add(state.name)
                yield state, node


def _complaints(context: Context, model: Model) -> Iterator[Complaint]:
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
    trained = model.name in context.trained or model.trainable or model.follows is not None
    trained = trained or model.name in context.carried
    try:
        yield from _looked_at(folder, model, fresh=trained)
    except DataError as error:
        yield _split(error)
    except OSError as error:
        yield (
            f"expected files that can be read, found {error}",
            "a directory and files that this user may read",
        )


def _looked_at(folder: Path, model: Model, *, fresh: bool) -> Iterator[Complaint]:
    """The files, one after another, up to the first wrong one: its consequences would hide it."""
    first = next(_files(folder), None)
    config = read_object(folder / CONFIG) if first is None else {}
    looks = (
        _configuration(folder, config),
        _weights(folder, model, config, fresh=fresh),
        _tokens(folder, config),
    )
    for look in looks if first is None else ():
        first = first or next(look, None)
    if first is not None:
        yield first


def _split(error: DataError) -> Complaint:
    problem, _, fix = str(error).rstrip(".").partition(". Fix: ")
    return problem, fix or AGAIN


def _files(folder: Path) -> Iterator[Complaint]:
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        yield (
            f"expected a whole model in {folder}, found an adapter (PEFT), which has no weights of"
            " its own model",
            "merge it into its model (merge_and_unload of PEFT), save that, and name its directory",
        )
        return
    for needed in (CONFIG, TOKENIZER_CONFIG):
        if not (folder / needed).is_file():
            yield f"expected {needed} in {folder}, found {listing(folder)}", _SAVED
            return
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        yield f"expected a tokenizer ({TOKENIZER}) in {folder}, found {listing(folder)}", _SAVED


def _configuration(folder: Path, config: dict[str, Any]) -> Iterator[Complaint]:
    if not isinstance(config.get("model_type"), str):
        found = f"found {config.get('model_type')!r}"
        yield (
            f"{folder / CONFIG}: expected a model_type, {found}",
            'the architecture\'s name, such as "qwen2"',
        )
    elif (why := refusal(config)) is not None:
        yield (
            f"{folder / CONFIG}: expected an architecture that works here, found {why.reason}",
            why.fix,
        )
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype.removeprefix("torch.") not in _DTYPES:
        yield (
            f"{folder / CONFIG}: expected a dtype such as float32 or bfloat16, found {dtype!r:.40}",
            AGAIN,
        )
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = config.get(key)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            yield (
                f"{folder / CONFIG}: expected {key} to be a whole number >= 1, found {value!r:.40}",
                AGAIN,
            )


def _weights(
    folder: Path, model: Model, config: dict[str, Any], *, fresh: bool
) -> Iterator[Complaint]:
    stored = stored_weights(folder)
    if stored is None:  # pickles: the kernel looks when it opens them
        return
    yield from _sizes(folder, config, stored)
    if model.head == "scalar" and not fresh:
        yield from _score(folder, stored)


def _sizes(
    folder: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterator[Complaint]:
    """The embedding has the configuration's size, and there are as many layers."""
    embedding = [n for n in stored if n.endswith("embed_tokens.weight")]
    expected = (config.get("vocab_size"), config.get("hidden_size"))
    if len(embedding) == 1 and None not in expected and stored[embedding[0]].shape != expected:
        found = stored[embedding[0]].shape
        yield (
            f"{folder}: expected {embedding[0]} of {expected} by config.json, found {found}",
            AGAIN,
        )
    layers, wanted = _stored_layers(stored), config.get("num_hidden_layers")
    if layers and isinstance(wanted, int) and (gone := sorted(set(range(wanted)) - layers)):
        problem = f"expected the weights of {wanted} layers, found none of layer {gone[0]}"
        yield f"{folder}: {problem}", AGAIN


def _stored_layers(stored: Iterable[str]) -> set[int]:
    parts = (part for name in stored for top, part in _after_layers(name) if top == "model")
    return {int(part) for part in parts if part.isdigit()}


def _after_layers(name: str) -> Iterator[tuple[str, str]]:
    parts = name.split(".")
    if len(parts) > 3 and parts[1] == "layers":
        yield parts[0], parts[2]


def _score(folder: Path, stored: Mapping[str, StoredTensor]) -> Iterator[Complaint]:
    """The files of a reward model or critic that nothing trains contain its head."""
    name = next((n for n in _HEADS if n in stored), "")
    if not name:
        problem = (
            f"expected a trained score head in {folder}, found no score.weight, and nothing here"
            " trains one"
        )
        yield problem, "a base that was saved with its score head, or a Model that is trained"
    elif stored[name].shape[:1] != (1,):
        found = f"found {name} of {stored[name].shape}"
        yield f"{folder}: expected a score head of one number, {found}", "num_labels=1"


def _tokens(folder: Path, config: dict[str, Any]) -> Iterator[Complaint]:
    """The embedding knows every id that the tokenizer produces."""
    ends, rows = end_ids(folder) or frozenset(), config.get("vocab_size")
    has_template(folder)  # reads a file that may be unread so far: finds a broken one here
    if not isinstance(rows, int):
        return
    beyond = _ids_beyond(folder / TOKENIZER, rows)
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


def _ids_beyond(tokenizer: Path, rows: int) -> list[tuple[int, str]]:
    """Ids and tokens for which the embedding has no row, placeholders left out."""
    known = token_ids(tokenizer) if tokenizer.is_file() else {}
    apart = placeholder_ids(tokenizer) if known else frozenset()
    return [(i, token) for token, i in known.items() if i >= rows and i not in apart]


def _answers(context: Context, node: Node, sound: dict[str, Path]) -> Iterator[Fault]:
    """Generations whose answers cannot end, or that cannot render their prompts."""
    models = [s for s in node.states.values() if isinstance(s, Model)]
    if not node.operator.traits.generates or not models or models[0].name not in sound:
        return
    name, folder = models[0].name, sound[models[0].name]
    if end_ids(folder) == frozenset() and not node.params.get("stop"):
        problem = (
            f"Model {name!r}: expected a token that ends an answer, found no eos_token in {folder}"
        )
        yield _fault(node, problem, "eos_token in tokenizer_config.json, or stop=")
    prompt = next(iter(node.inputs.values()))
    if _conversations(context, prompt) and not has_template(folder):
        problem = (
            f"Model {name!r}: the prompts are messages, and its tokenizer in {folder} has no chat"
            " template"
        )
        yield _fault(node, problem, "a Model with a chat template, or prompts that are text")


def _conversations(context: Context, prompt: Port) -> bool:
    """Whether the data of a source has its prompts as lists of messages."""
    kind = context.dataset(prompt).get("prompt") if prompt.node.operator.work == "source" else None
    return kind is not None and is_messages(kind)


def _rendered(context: Context, node: Node, sound: dict[str, Path]) -> Iterator[Fault]:
    """Conversations that a reward Model reads as text, and turns added to an answer: both need a
    chat template.
    """
    models = [s for s in node.states.values() if isinstance(s, Model)]
    needs = ""
    if node.operator.reads_text:
        asked = nearest_prompt(next(iter(node.inputs.values())), context.domains)
        if asked is not None and _conversations(context, asked.port()):
            needs, fix = "the prompts are messages", "prompts that are text"
    elif node.operator.decodes and node.params.get("then"):
        makers = generations(node.inputs[node.operator.decodes])
        models = [s for maker in makers for s in maker.states.values() if isinstance(s, Model)]
        needs, fix = "then= is the user's next turn", "leave then= out"
    for model in models if needs else ():
        folder = sound.get(model.name)
        if folder is not None and not has_template(folder):
            problem = f"{needs}, and its tokenizer in {folder} has no chat template"
            fault = f"Model {model.name!r}: {problem}"
            yield _fault(node, fault, f"a Model with a chat template, or {fix}")


def _tokenised(context: Context, node: Node, sound: dict[str, Path]) -> Iterator[Fault]:
    """Data that has conversations, tokenised for a Model that cannot render them."""
    reader = reader_of(context.graph, node) if node.operator.tokenises else None
    models = [s for s in reader.states.values() if isinstance(s, Model)] if reader else []
    folder = sound.get(models[0].name) if models else None
    if folder is None or has_template(folder):
        return
    columns = context.dataset(node.port(0))
    pairs = {"prompt", "completion"} <= columns.keys()
    names = (*_SAID, str(node.params.get("column")), *(() if pairs else ("messages",)))
    if any(name in columns and is_messages(columns[name]) for name in names):
        problem = (
            f"Model {models[0].name!r}, which reads these rows: the data has messages, and its"
            f" tokenizer in {folder} has no chat template"
        )
        yield _fault(node, problem, "a Model with a chat template, or data that is text")


def _too_long(context: Context) -> Iterator[Fault]:
    """Answers that, with the requested prompts or with those made of other answers, exceed the
    positions of a Model that reads them.
    """
    known = row_positions(context.graph)
    for node in context.graph.nodes:
        asked, longest = node.params.get("max_tokens"), node.params.get("max_prompt_tokens")
        if (
            not node.operator.traits.generates
            or node.name not in known
            or not isinstance(asked, int)
        ):
            continue
        least = known[node.name]
        reads = "" if least.node is node else f", which {place(least.node)} reads these rows with,"
        has = f"Model {least.model!r}{reads} has {least.limit:,} positions"
        if asked >= least.limit:
            problem = f"{has}, and max_tokens={asked} leaves none for a prompt"
            yield _fault(node, problem, f"max_tokens={max(1, least.limit // 2)}")
        elif isinstance(longest, int) and longest + asked > least.limit:
            problem = f"{has}, found max_prompt_tokens={longest} and max_tokens={asked}"
            yield _fault(node, problem, f"max_prompt_tokens={least.limit - asked}")
        elif longest is None and node.params.get("overlong_prompt") == "error":
            yield from _too_long_before(node, has, least.limit - asked)


def _too_long_before(node: Node, has: str, room: int) -> Iterator[Fault]:
    """Answers that are continued, and may alone exceed the room for prompts."""
    asked = next(iter(node.inputs.values()))
    for maker in generations(asked) if issubclass(asked.schema, TokenPrompt) else ():
        before = maker.params.get("max_tokens")
        if isinstance(before, int) and before >= room:
            problem = (
                f"{has}, found max_tokens={node.params['max_tokens']} after the {before} that"
                f" {maker.name!r} may write"
            )
            fix = "overlong_prompt='drop' or 'truncate', or a smaller max_tokens"
            yield _fault(node, problem, fix)
