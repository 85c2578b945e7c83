"""answers: completions of a dataset column.

Owns: the declaration. Does not own: tokenising (kernels/answers.py), which tokenizer that is (a
pass of the planner).
"""

from __future__ import annotations

from typing import Literal

from dataflow.limits import choice, text
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same, declares
from dataflow.schema import Completion, Prompt

ANSWERS = Operator(
    path="operators.answers:ANSWERS",
    name="answers",
    work="tokenise",
    rows=Same("prompt"),
    inputs=(
        Input(
            name="prompt",
            schema=Prompt,
            columns=("prompt",),
            ancestors_from="column",
            required_from="column",
        ),
    ),
    outputs=(Completion,),
    kernels={"host": "operators.kernels.answers:DatasetAnswers"},
    limits={
        "column": text(like="answer"),
        "overlong": choice("error", "drop", "truncate"),
    },
)


@declares
def answers(
    prompt: Port[Prompt],
    *,
    column: str,
    overlong: Literal["error", "drop", "truncate"] = "error",
    name: str = "answers",
) -> Port[Completion]:
    """The answer of each prompt that the data has in a column, as a completion of that row:
    `concat(rollout, answers(prompt, column="solution"))` puts gold answers into the groups.

    column: of texts, or of lists of messages where the prompts are such; a null ends the run. The
    answer is tokenised as `demonstrations` does: with the tokenizer of the Model that reads it and
    its chat template, ended by its end token, mask 1 on what the assistant said. Nothing was
    sampled: such rows have no recorded log-probs, and count as sampled at temperature 1. overlong:
    what happens to a row with more tokens than the positions of a Model that reads it: `error` ends
    the run, `drop` drops its prompt and admits another, `truncate` keeps its first tokens, and
    drops the prompt if they include none of the answer. The metric prompt/overlong counts them.
    """
    params = {"column": column, "overlong": overlong}
    return Node(ANSWERS, name, inputs={"prompt": prompt}, params=params).port()
