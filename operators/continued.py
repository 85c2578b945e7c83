"""Continued: prompts made of rows that have their tokens already.

Owns: the declaration. Does not own: joining the tokens (kernels/continued.py).
"""

from __future__ import annotations

from dataflow.limits import text
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same, declares
from dataflow.schema import Completion, TokenPrompt

CONTINUED = Operator(
    path="operators.continued:CONTINUED",
    name="continued",
    work="host",
    rows=Same("rows"),
    inputs=(Input(name="rows", schema=Completion, columns=("prompt_ids", "completion_ids")),),
    outputs=(TokenPrompt,),
    decodes="rows",
    kernels={"host": "operators.kernels.continued:Continued"},
    limits={"then": text(like="Check your answer.", optional=True, filled=True)},
)


@declares
def continued(
    rows: Port[Completion], *, then: str | None = None, name: str = "continued"
) -> Port[TokenPrompt]:
    """Prompts for a further generation: each row's prompt and completion, by their token ids.

    Nothing is rendered or tokenised again, so what the first generation wrote stands in the second
    one's `prompt_ids` token by token. then: the user's next turn after the answer, and where the
    assistant begins again, by the chat template; only these are tokenised, by themselves, once. The
    answer's end of turn is added if the answer did not write it. Without then, an answer that ended
    by itself is continued behind its end; `select` leaves such rows out.
    """
    return Node(CONTINUED, name, inputs={"rows": rows}, params={"then": then}).port()
