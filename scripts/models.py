"""Writes docs/models.md: what works with each architecture, by doing it.

    .venv/bin/python scripts/models.py [FOLDER]

A tiny model of each, with tied and with untied embeddings, generates, is read, trained, made a
critic and a reward model, and split over two tensor ranks. FOLDER: where to write, docs/ by
default.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForSequenceClassification  # noqa: E402
from transformers.utils import logging  # noqa: E402

from dataflow.architectures import (  # noqa: E402
    ALIBI,
    OWN_ATTENTION,
    REFUSED,
    refusal,
)
from dataflow.errors import DataflowError  # noqa: E402
from dataflow.model_files import CONFIG, read_object, rotary_of  # noqa: E402
from tests.kit import differences  # noqa: E402
from tests.kit.architectures import ARCHITECTURES, tiny  # noqa: E402

Found = float | DataflowError

LEAST = 1e-5
"""Differences up to this are rounding, and shown as this."""

MOST = 1e-3
"""A larger difference is no rounding: nothing is written."""

SHORT = {ALIBI: "ALiBi", OWN_ATTENTION: "own attention"}
"""Reasons in a word, for cells."""

COLUMNS = (
    "architecture", "`model_type`", "generate", "log-probs", "train", "values", "scores",
    "tensor parallel", "sliding window", "notes",
)  # fmt: skip

HEAD = """# Models

What can be done with a model of each architecture. `scripts/models.py` writes this page by doing
it with tiny models of random weights in float32, once with tied and once with untied embeddings. It
compares their numbers with those of transformers' own eager attention.

*yes* comes with the larger of the two differences, |ours - theirs| / (1 + |theirs|), rounded up to
a power of ten; up to 1e-5 it is rounding. *refused* is an error before anything is computed, with
its reason. Compared are the log-probs that generation records (generate) and those of given rows
(log-probs), the weights after an update (train, and once more on two tensor ranks), a critic's
values and a reward model's scores. *sliding window*: rows were longer than the layers' windows;
*none*: this form has none. A name with a hyphen is a form of an architecture that differs in its
config.json.

"""

TAIL = """
## How to bring a model

- A base is a directory with config.json, safetensors files and the tokenizer's files, as
  `save_pretrained` writes them, or a hub name: `Model("policy", "path/to/model")`,
  `Model("policy", "owner/name")`.
- The check knows nothing of a hub name that is not in the cache. What it would refuse is then
  refused when a run opens the base.
- Code in a model's folder is never run: transformers must know the `model_type`.

## What is checked

`dataflow check` reads the files of each base before anything runs, without torch:

- the architecture, its attention and its rotary positions, by config.json;
- that weights are complete, belong to config.json, and have a score head where nothing trains one;
- that the tokenizer belongs to the weights, and has a token that ends an answer;
- that prompts and answers fit the model's positions, of every Model that reads them;
- that there is a chat template where the data has messages.

When a run opens a base, it looks at what only a loaded model shows: weights that are not finite or
that nothing has, and, by a few tokens, that rows packed side by side do not see each other.

## What is refused, and why

Rows lie side by side without padding, and share the keys of a common prompt. So attention must go
through transformers' attention interface, and a row must be the same wherever it lies.

| reason | `model_type` |
|---|---|
{refused}
| no test compares it with transformers | every other |

And whatever the architecture:

- quantised weights: they can neither be trained nor compared. Take the base that they were
  quantised from.
- `alibi`, cross attention, attention in both directions, and layers that are neither
  `full_attention` nor `sliding_attention`.
- rotary positions of an unknown kind. Those of `dynamic` and `longrope` depend on the longest row
  of a batch beyond `max_position_embeddings` and `original_max_position_embeddings`; rows end
  there.
- tensor ranks, where transformers has no plan for them or one with parts that are not known here.

That no test compares it is a reason to refuse and not to warn: most of these would run, and one
that computed something else would train on wrong numbers without a word.

To add an architecture: a line in `ARCHITECTURES` (tests/kit/architectures.py), its `model_type` in
`TESTED` (dataflow/architectures.py), and this script. The tests compare it from then on.

## dtype

`Model(dtype=)` is what a run computes in: float32, or bfloat16 with float32 copies for the
optimizer. By default, `"auto"`, the base decides, on a CPU as on a GPU:

| the Model | computes in |
|---|---|
| names a dtype | that |
| follows another at a rate below 1 | float32 |
| follows another, or is its frozen copy | the dtype of that one |
| has a base in bfloat16 | bfloat16 |
| has any other base | float32 |

A Model that follows by small parts of a way would stand still in bfloat16, which has nothing left
of a part below 1/256 of a weight; one that names it is warned of.

A base in float16 computes in float32, which has each of its numbers: gradients of float16 vanish
unless the loss is scaled, and nothing scales it here. `dtype="bfloat16"` takes half the memory for
weights and activations, and rounds those weights to 8 bits.

The dtype of a base is `dtype` (or `torch_dtype`) in its config.json, else that of its safetensors
files. The graph says `auto` and nothing of the base, and so does a run's graph.json; `dataflow
check` and `dataflow explain` print what it comes to. A run whose graph.json says float32 goes on in
float32.

What a run saves has the base's own dtype, in the files and in config.json: a base in bfloat16 or
float16 stays one. Where that rounds, a checkpoint has the unrounded weights in its folder `exact/`,
and a resume or the next phase of a Program reads those. A base in float32 is saved in the dtype
that the run computes in. The float32 copies of a Model in bfloat16 are in its optimizer's state,
so that a resume has their bits; a phase of a Program whose optimizer begins anew begins with the
bfloat16 weights.

## Chat template

Prompts that are messages are rendered by the tokenizer's chat template, and so are demonstrations,
preferences and the conversations that a reward model reads as text. A base without one (most base
models) takes prompts that are text. Which tokens of a conversation are trained is in
[data](data.md#shapes). A template that reads a content only as a list of parts is given one.

## Critics and reward models

`Model("critic", base, head="scalar")` is the base's layers with a linear from the last hidden state
to one number. The base may be a language model, where the Model is trained or follows one that is:
the head then begins at zero. Or it is a token or sequence classifier of transformers with one
label, of any architecture above, or what a run has saved.

Saved is a class of transformers, where it has one: the base's own, if that is a classifier; else
`...ForTokenClassification`, if its head is named `score`; else `...ForSequenceClassification`.
Where transformers has none, the directory has the form of the latter, and transformers reads its
layers.
A token classifier has a bias and a sequence classifier has none: read as the other, a saved critic
gives scores that differ by that bias.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedArchitecture:
    """What was found of an architecture. by column: for tied and untied embeddings."""

    name: str
    config: Any
    found: dict[str, list[Found]]
    refused: str


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs"
    with tempfile.TemporaryDirectory() as made:
        (folder / "models.md").write_text(page(list(measured(Path(made)))))


def measured(made: Path) -> Iterator[TriedArchitecture]:
    """Every architecture; the tensor ranks of all start once."""
    bases = {
        name: [_base(made, name, tied) for tied in (True, False)] for name in sorted(ARCHITECTURES)
    }
    ranks = made / "ranks"
    ranks.mkdir()
    whole = iter(differences.split([b for both in bases.values() for b in both], ranks))
    for name, both in bases.items():
        why = refusal(read_object(Path(both[0]) / CONFIG))
        found = {
            column: [differences.attempt(lambda base=base, do=do: do(base)) for base in both]
            for column, do in WORK.items()
        }
        found["tensor parallel"] = [next(whole) for _ in both]
        config = AutoConfig.from_pretrained(both[0])
        yield TriedArchitecture(
            name=name, config=config, found=found, refused=why.reason if why else ""
        )


def _base(made: Path, name: str, tied: bool) -> str:
    folder = made / f"{name}-{'tied' if tied else 'untied'}"
    return str(tiny(name, folder, tied=tied, **differences.ROOM.get(name, {})))


def _critic(base: str) -> Path:
    return Path(f"{base}-critic")


WORK: dict[str, Callable[[str], float]] = {
    "generate": differences.generated,
    "log-probs": differences.logprobs,
    "train": differences.trained,
    "values": lambda base: differences.values(base, _critic(base)),
    "scores": lambda base: differences.scores(base, _critic(base)),
}


def page(all_of: Sequence[TriedArchitecture]) -> str:
    """The page as Markdown. Raises AssertionError for differences that are no rounding."""
    odd = [
        f"{each.name}: {column} {one:.1e}"
        for each in all_of
        for column, found in each.found.items()
        for one in found
        if isinstance(one, float) and not one <= MOST
    ]
    assert not odd, f"expected differences of at most {MOST}, found {', '.join(odd)}"
    rows = [_row(*COLUMNS), _row(*("---" for _ in COLUMNS))]
    rows += [_row(*line(each)) for each in all_of]
    reasons = dict.fromkeys(REFUSED.values())
    of = {why: [f"`{t}`" for t, reason in REFUSED.items() if reason == why] for why in reasons}
    refused = "\n".join(_row(why, ", ".join(sorted(types))) for why, types in of.items())
    return HEAD + "\n".join(rows) + "\n" + TAIL.format(refused=refused)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def line(each: TriedArchitecture) -> Iterator[str]:
    """Its cells."""
    yield each.name
    yield f"`{each.config.model_type}`"
    for column in (*WORK, "tensor parallel"):
        yield cell(each, each.found[column])
    windowed = each.found["generate"] + each.found["log-probs"]
    yield cell(each, windowed) if window_of(each.config) else "none"
    yield "; ".join(notes(each)) or "-"


def cell(each: TriedArchitecture, found: Sequence[Found]) -> str:
    """`yes` with the largest difference, or the reasons of a refusal."""
    refusals = [one for one in found if isinstance(one, DataflowError)]
    if refusals:
        return " / ".join(dict.fromkeys(f"refused: {reason(each, one)}" for one in refusals))
    worst = max(one for one in found if isinstance(one, float))
    return f"yes, 1e{math.ceil(math.log10(max(worst, LEAST)) - 1e-9)}"


def reason(each: TriedArchitecture, error: DataflowError) -> str:
    """What was found, in a few words."""
    if each.refused:
        return next(short for why, short in SHORT.items() if why in each.refused)
    said = str(error)
    plan = re.search(r"tensor-parallel plan of .* found (none|one with [^.]*)\.", said)
    if plan:
        none = plan[1] == "none"
        return "no plan in transformers" if none else f"a plan {plan[1].removeprefix('one ')}"
    left_out = re.search(r"tensor-parallel plan .* found nothing of ([^,]*),", said)
    if left_out:
        return f"a plan without {left_out[1]}"
    return said.partition("found ")[2].partition(". Fix:")[0]


def window_of(config: Any) -> int | None:
    """The tokens that a layer's window shows, if some layer has one."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return window if kinds is None or "sliding_attention" in kinds else None


def notes(each: TriedArchitecture) -> Iterator[str]:
    """What is unlike Llama in its config.json."""
    config = each.config
    if each.refused:
        yield each.refused.partition(": ")[2]
        return
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        yield "experts"
    if getattr(config, "attn_logit_softcapping", None):
        yield "capped scores"
    if getattr(config, "final_logit_softcapping", None):
        yield "capped logits"
    if config.model_type == "gpt_oss":
        yield "attention sinks"
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        yield "layers without positions"
    kinds = {kind for kind, _ in rotary_of(config.to_dict())} - {"default"}
    ends = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    for kind in sorted(kinds):
        yield f"rotary `{kind}`" + (f", rows up to `{ends[kind]}`" if kind in ends else "")
    auto: Any = AutoModelForSequenceClassification
    if auto._model_mapping.get(type(config), None) is None:
        yield "no reward model in transformers"


if __name__ == "__main__":
    main()
