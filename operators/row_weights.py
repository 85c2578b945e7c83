"""Weights of rows: how much a generation's rows are expected to take, and the lengths they had.

Owns: the declarations of what makes a Weight, of a Model's rows of prompts alone, and of lengths.
Does not own: the kernels (kernels/prompt_rows.py, kernels/data_weight.py), how a ranker is trained
(rank_losses.py), what a weight changes (generate.py, the coordinator).
"""

from __future__ import annotations

from typing import Literal

from dataflow.limits import choice, flag, text
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same, declares
from dataflow.schema import Completion, Prompt, Reward, Rollout, Weight
from dataflow.user import column_operator
from operators import weight_formulas as formulas

WEIGHT_OF = column_operator(formulas.weight_of, "operators.row_weights:WEIGHT_OF", name="weight_of")

ANSWER_LENGTH = column_operator(
    formulas.answer_length,
    "operators.row_weights:ANSWER_LENGTH",
    name="answer_length",
    columns={"rollout": ("completion_mask",)},
    limits={"log": flag()},
    whole_episodes=True,
)

_COLUMN = Input(
    name="prompt",
    schema=Prompt,
    columns=(),
    ancestors_from="column",
    required_from="column",
)

DATA_WEIGHT = Operator(
    path="operators.row_weights:DATA_WEIGHT",
    name="data_weight",
    work="host",
    rows=Same("prompt"),
    inputs=(_COLUMN,),
    outputs=(Weight,),
    kernels={"host": "operators.kernels.data_weight:DataWeight"},
    limits={"column": text(like="length")},
)

_OVERLONG = choice("error", "drop", "truncate")

_TEXT = Input(name="prompt", schema=Prompt, columns=("prompt",))

PROMPT_ROWS = Operator(
    path="operators.row_weights:PROMPT_ROWS",
    name="prompt_rows",
    work="tokenise",
    rows=Same("prompt"),
    inputs=(_TEXT,),
    outputs=(Completion,),
    kernels={"host": "operators.kernels.prompt_rows:PromptTokens"},
    limits={"overlong": _OVERLONG},
)


@declares
def weight_of(score: Port[Reward], *, name: str = "weight_of") -> Port[Weight]:
    """A Weight of any number of a row: `generate(policy, prompt, weight=weight_of(scores(ranker,
    prompt_rows(prompt))))`. A greater number is a heavier row.
    """
    return Node(WEIGHT_OF, name, inputs={"score": score}).port()


@declares
def data_weight(prompt: Port[Prompt], *, column: str, name: str = "data_weight") -> Port[Weight]:
    """A Weight that the data has: `generate(policy, prompt, weight=data_weight(prompt,
    column="length"))`.

    column: of numbers of any type, read as float32. A row without a finite number ends the run.
    """
    params = {"column": column}
    return Node(DATA_WEIGHT, name, inputs={"prompt": prompt}, params=params).port()


@declares
def answer_length(
    rollout: Port[Rollout], *, log: bool = True, name: str = "answer_length"
) -> Port[Reward]:
    """How many tokens the model wrote in each row, a number for `mean_over(answer_length(rollout),
    prompt)`. log: the natural logarithm of one more than that, whose mean a single long answer does
    not decide.
    """
    params = {"log": log}
    return Node(ANSWER_LENGTH, name, inputs={"rollout": rollout}, params=params).port()


@declares
def prompt_rows(
    prompt: Port[Prompt],
    *,
    overlong: Literal["error", "drop", "truncate"] = "truncate",
    name: str = "prompt_rows",
) -> Port[Completion]:
    """Each prompt as a row of the Model that reads it, without an answer: what a ranker scores and
    is trained on before anything is generated.

    The prompt is tokenised as for a generation, by the tokenizer and chat template of the first
    Model that reads these rows; the row's completion is the end token alone, mask 1, where `scores`
    reads the scalar head. Prompts of token ids stay as they are, so that such a Model needs the
    tokenizer that made them. overlong: what happens to a prompt with no room in the positions of a
    Model that reads it: `truncate` keeps its last tokens, `error` ends the run, `drop` drops the
    prompt, for the generation too. The metric <name>/overlong is their share.
    """
    params = {"overlong": overlong}
    return Node(PROMPT_ROWS, name, inputs={"prompt": prompt}, params=params).port()
