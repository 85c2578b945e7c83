"""How far our numbers of a model are from those of transformers' own eager attention.

A difference is the largest of |ours - theirs| / (1 + |theirs|): absolute for small numbers,
relative for large ones.

Owns: one number for each thing that is done with a model, by the kernels that a run has. Does not
own: the models (architectures.py), what is printed of them (scripts/models.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.model import Model
from operators.kernels.torch import heads
from operators.kernels.torch.forward import TorchLogprobs, TorchScores, TorchValues
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import load_model
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.scalar import scalar_head
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk, rows_chunk
from tests.kit.rows import padded_logprobs, plain, random_rows
from tests.kit.training import (
    SUPERVISED,
    as_ranks,
    assignment,
    gloo_world,
    opened,
    weights_of,
)

ROOM: Mapping[str, Mapping[str, Any]] = {
    "llama-dynamic": {"max_position_embeddings": 64},
    "phi3-longrope": {"original_max_position_embeddings": 64},
}
"""Positions of architectures that have too few for the rows of the tests, by name."""

PROMPTS = ["Reverse this word: abc", "Reverse this word: zyxwvu", "q", "what is 12+5?"]
"""Two begin alike, so that they share keys; one is shorter than a window."""

SETTINGS = {"lr": 1.0, "clip_norm": None, "optimizer": AdamW(eps=1.0)}
"""An update that is about the gradient itself: g / (|g| + 1)."""

FEW = 400
"""Logits of four tokens."""

LIMIT = 400.0
"""Seconds for the tensor-parallel ranks of all models."""


def generated(base: str) -> float:
    """Of the recorded log-probs of sampled answers."""
    kernel = open_kernel(TorchGenerate(), base, n=3, max_tokens=12)
    rows = Batch.concat(list(kernel.run(prompt_chunk(PROMPTS)))).sort()
    return _of_logprobs(base, rows, rows.ragged("sampler_logprobs").values)


def logprobs(base: str) -> float:
    """Of the log-probs of given answers, with all logits at once and with a few at a time."""
    rows, usual = random_rows(3, 3), heads.CHUNK
    kernel, each = open_kernel(TorchLogprobs(), base), []
    try:
        for heads.CHUNK in (usual, FEW):
            [made] = kernel.run(rows_chunk(rows))
            each.append(_of_logprobs(base, rows, made.ragged("logprobs").values))
    finally:
        heads.CHUNK = usual
    return max(each)


def _of_logprobs(base: str, rows: Batch, found: np.ndarray) -> float:
    with torch.no_grad():
        wanted = torch.cat(padded_logprobs(plain(base), rows))
    return far(torch.from_numpy(found.copy()), wanted)


def far(found: Tensor, wanted: Tensor) -> float:
    """The largest |found - wanted| / (1 + |wanted|); infinite where one is NaN."""
    apart = (found - wanted).abs() / (1 + wanted.abs())
    return float(apart.nan_to_num(nan=torch.inf).max())


def trained(base: str) -> float:
    """Of the weights after one update."""
    kernel = opened(base, SUPERVISED, **SETTINGS)
    kernel.step(assignment(random_rows(3, 3)))
    return _apart(weights_of(kernel), updated(base))


def updated(base: str) -> dict[str, Tensor]:
    """The weights after that update by transformers and torch alone."""
    rows, module = random_rows(3, 3), plain(base)
    mask = torch.from_numpy(rows.ragged("completion_mask").values.astype(np.float32))
    said = torch.cat(padded_logprobs(module, rows))
    (-(said * mask).sum() / mask.sum()).backward()
    chosen = SETTINGS["optimizer"]
    torch.optim.AdamW(
        module.parameters(), SETTINGS["lr"], chosen.betas, chosen.eps, chosen.weight_decay
    ).step()
    buffers = dict(module.named_buffers())
    kept = {name: held for name, held in buffers.items() if name in module.state_dict()}
    return {name: p.detach() for name, p in (dict(module.named_parameters()) | kept).items()}


def _apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(far(found[name], wanted[name]) for name in found)


def values(base: str, folder: Path) -> float:
    """Of the values of a critic; saves it in the folder."""
    module = load_model(Model("critic", base, head="scalar", trainable=True), "cpu")
    randomise(scalar_head(module))
    save_model(module, folder)
    rows = random_rows(3, 3)
    model = Model("critic", str(folder), head="scalar")
    [made] = open_kernel(TorchValues(), model).run(rows_chunk(rows))
    body = AutoModel.from_pretrained(folder, attn_implementation="eager")
    return _of_rows(body, scalar_head(module), rows, made.ragged("values"), slice(-1))


def scores(base: str, folder: Path) -> float:
    """Of the scores of a reward model: one that transformers saved, where it has such a class, else
    the one of the folder.
    """
    auto: Any = AutoModelForSequenceClassification
    rows = random_rows(3, 3)
    body = AutoModel.from_pretrained(base, attn_implementation="eager")
    if auto._model_mapping.get(type(body.config), None) is None:
        body = AutoModel.from_pretrained(folder, attn_implementation="eager")
        head = scalar_head(load_model(Model("rm", str(folder), head="scalar"), "cpu"))
    else:
        whole = auto.from_pretrained(base, num_labels=1, attn_implementation="eager")
        head, body = scalar_head(whole), whole.base_model
        randomise(head)
        whole.save_pretrained(folder)
    [made] = open_kernel(TorchScores(), Model("rm", str(folder), head="scalar")).run(
        rows_chunk(rows)
    )
    return _of_rows(body, head, rows, made.flat("reward")[:, None], slice(-1, None))


def randomise(head: nn.Module) -> None:
    """Weights with which values and scores are of the size of 1, as those of a trained head are."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.1)


@torch.no_grad()
def _of_rows(body: Any, head: nn.Module, rows: Batch, found: Any, which: slice) -> float:
    """which: of the last token of the prompt and of those of the answer."""
    body.eval()
    worst = 0.0
    for i in range(len(rows)):
        prompt, answer = rows.ragged("prompt_ids")[i], rows.ragged("completion_ids")[i]
        ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
        said = head(body(input_ids=ids[None]).last_hidden_state)[0, len(prompt) - 1 :, 0][which]
        worst = max(worst, far(torch.from_numpy(np.array(found[i])), said))
    return worst


def split(bases: Sequence[str], folder: Path) -> list[float | DataflowError]:
    """Of the weights after one update by two tensor ranks; or why they refuse."""
    as_ranks(2, _rank, bases, folder, limit=LIMIT)
    found: list[float | DataflowError] = []
    for number, base in enumerate(bases):
        made = torch.load(folder / f"{number}.pt", weights_only=False)
        found.append(made if isinstance(made, DataflowError) else _apart(made, updated(base)))
    return found


def _rank(number: int, bases: Sequence[str], folder: Path) -> None:
    with gloo_world(folder / "store", number, 2):
        for place, base in enumerate(bases):
            made = attempt(lambda base=base: _split_weights(number, base))
            if number == 0:
                torch.save(made, folder / f"{place}.pt")


def _split_weights(number: int, base: str) -> dict[str, Tensor]:
    session = FakeSession(5, "train_policy", rank=number, world=2, group=dist.group.WORLD)
    kernel = opened(base, SUPERVISED, session=session, tensor=2, **SETTINGS)
    kernel.step(assignment(random_rows(3, 3)))
    return weights_of(kernel)


def attempt(do: Callable[[], Any]) -> Any:
    """What it returns, or the refusal that it raises."""
    try:
        return do()
    except DataflowError as error:
        return error
