"""Forward passes over finished completions: log-probs, values, scalar scores.

Owns: the declarations. Does not own: any computation (kernels/torch/forward.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

from dataflow.calls import require
from dataflow.limits import Limit, choice, number, whole
from dataflow.model import Model
from dataflow.needs import Needs
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same, declares
from dataflow.schema import Completion, Logprobs, Reward, Values
from dataflow.top_logprobs import LARGEST, TopLogprobs

_TOKENS = ("prompt_ids", "completion_ids", "completion_mask")


def _make_operator(
    name: str, output: type, kernel: str, *, log_probs: bool = False, **limits: Limit
) -> Operator:
    return Operator(
        path=f"operators.forward:{name.upper()}",
        name=name,
        work="forward",
        rows=Same("rows"),
        inputs=(Input(name="rows", schema=Completion, columns=_TOKENS),),
        outputs=(output,),
        reads=("model",),
        log_probs=log_probs,
        kernels={"torch": f"operators.kernels.torch.forward:{kernel}"},
        needs={"torch": Needs(ranks=True)},
        limits={"max_lag": whole(0, like=0), **limits},
    )


LOGPROBS = _make_operator(
    "logprobs",
    Logprobs,
    "TorchLogprobs",
    log_probs=True,
    temperature=number(0.0, above=True, like=1.0, optional=True),
    top_k=whole(0, like=64),
)
VALUES = _make_operator("values", Values, "TorchValues")
_READS = choice("tokens", "text")
_OVERLONG = choice("error", "drop", "truncate")
SCORES = _make_operator("scores", Reward, "TorchScores", reads=_READS)
SCORES_OF_TEXT = replace(
    SCORES,
    path="operators.forward:SCORES_OF_TEXT",
    inputs=(
        Input(
            name="rows",
            schema=Completion,
            columns=("completion",),
            ancestors=("prompt",),
            readable=True,
        ),
    ),
    reads_text=True,
    kernels={"torch": "operators.kernels.torch.text_scores:TorchTextScores"},
    limits={**SCORES.limits, "overlong": _OVERLONG},
)


@overload
def logprobs(
    model: Model,
    rows: Port[Completion],
    *,
    temperature: float | None = None,
    top_k: Literal[0] = 0,
    max_lag: int = 0,
    name: str | None = None,
) -> Port[Logprobs]: ...
@overload
def logprobs(
    model: Model,
    rows: Port[Completion],
    *,
    temperature: float | None = None,
    top_k: int,
    max_lag: int = 0,
    name: str | None = None,
) -> Port[TopLogprobs]: ...
@declares
def logprobs(
    model: Model,
    rows: Port[Completion],
    *,
    temperature: float | None = None,
    top_k: int = 0,
    max_lag: int = 0,
    name: str | None = None,
) -> Port[Logprobs]:
    """Log-probability of each completion token under a Model; the node takes the Model's name.

    top_k: also the k most likely tokens in each place and their log-probs, as columns `top_ids` and
    `top_logprobs` of lists of k (8 bytes for each; explain shows them); at most the vocabulary,
    which is then the whole distribution. No candidate is removed: this is not sampling's top_k.

    temperature: None is the rollout's, which a ratio needs (1.0 if it was greedy). max_lag: 0 puts
    the node after the cut, where it sees the weights that the Step starts from; with more it may
    run earlier, on older weights.
    """
    params = {"temperature": temperature, "top_k": top_k, "max_lag": max_lag}
    # Any other top_k is refused by its limit.
    schemas = None
    if type(top_k) is int and 0 < top_k <= LARGEST:
        schemas = (TopLogprobs.of(top_k),)
    return Node(
        LOGPROBS,
        name or _name_after(model, "logprobs"),
        states={"model": model},
        inputs={"rows": rows},
        params=params,
        schemas=schemas,
    ).port()


@declares
def values(
    model: Model, rows: Port[Completion], *, max_lag: int = 0, name: str = "values"
) -> Port[Values]:
    """Expected return before each completion token, from a Model with head="scalar"."""
    return Node(
        VALUES, name, states={"model": model}, inputs={"rows": rows}, params={"max_lag": max_lag}
    ).port()


@declares
def scores(
    model: Model,
    rows: Port[Completion],
    *,
    reads: Literal["tokens", "text"] = "tokens",
    overlong: Literal["error", "drop", "truncate"] | None = None,
    max_lag: int = 0,
    name: str = "scores",
) -> Port[Reward]:
    """One number per row from a reward Model (head="scalar"), read at the last token.

    reads: `tokens`, the rows' own token ids, for a Model of the tokenizer that made them; `text`,
    prompt and completion as text, for one with another tokenizer or chat template: a conversation
    that ends in the assistant's answer, rendered by the Model's own template, tokenised by its own
    tokenizer, as `AutoModelForSequenceClassification` reads it. A prompt that is text is the user's
    turn; without a chat template the answer follows it directly. overlong, for reads="text": what
    happens to a row with more tokens than the Model has positions: `error` (the default) ends the
    run, `drop` drops its group, `truncate` keeps its last tokens. The metric <name>/overlong is
    their share.
    """
    params = {"reads": reads, "max_lag": max_lag}
    if reads == "text":
        operator = SCORES_OF_TEXT
        params["overlong"] = "error" if overlong is None else overlong
    else:
        operator = SCORES
        require(
            "scores",
            "overlong",
            overlong,
            fits=overlong is None,
            expected=f"left out with reads={reads!r}: those rows fit the Model, or are refused",
            fix='scores(..., reads="text", overlong=...)',
        )
    return Node(
        operator, name, states={"model": model}, inputs={"rows": rows}, params=params
    ).port()


def _name_after(model: object, default: str) -> str:
    """The Model's name; the default for what is no Model, which is refused elsewhere."""
    return model.name if isinstance(model, Model) else default
