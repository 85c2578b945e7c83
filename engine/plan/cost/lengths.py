"""The greatest lengths that rows can have, and the counted lengths of prompts.

Owns: most tokens of prompts and completions, and the assumptions where neither data nor graph says
them. Does not own: counting (dataflow/token_counts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dataflow.token_counts import NotCounted, TokenCounts

ASSUMED_PROMPT = 512
"""Tokens of a prompt where its data is not read and `max_prompt_tokens` is not given. A guess, and
`explain` says so.
"""

ASSUMED_ANSWER = 512
"""Tokens of an answer in demonstrations, tokenised only in the run. A guess; `explain` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Most tokens of prompt and completion. limit: of a prompt, as graph and Model allow; None
    without one. counts: of rows in the data; None where none were counted, and `uncounted` says
    why. bound: of a guessed prompt, what would set it.
    """

    prompt: int
    completion: int = 0
    limit: int | None = None
    counts: TokenCounts | None = None
    uncounted: str = ""
    bound: str = ""

    @property
    def row(self) -> int:
        """Tokens of a whole row."""
        return self.prompt + self.completion

    def continued(self, more: int) -> Lengths:
        """Prompts made of whole rows, and of `more` characters, at most a token each."""
        return Lengths(prompt=self.row + more, bound=self.bound, uncounted=self.uncounted)

    def asked(self, prompt: Lengths) -> Lengths:
        """With prompts of known ids: theirs, if they are shorter than a stated bound."""
        if not self.bound and self.prompt <= prompt.prompt:
            return self
        return replace(self, prompt=prompt.prompt, bound=prompt.bound, uncounted=prompt.uncounted)

    def clipped(self, context: int) -> Lengths:
        """Within what the completion leaves of the model's context, which is 0 if unknown: a
        guessed prompt is cut to it.
        """
        room = context - self.completion
        if room <= 0:
            return self
        limit = room if self.limit is None else min(self.limit, room)
        prompt = min(self.prompt, room) if self.bound else self.prompt
        return replace(self, limit=limit, prompt=prompt)

    def counted(self, counts: TokenCounts | NotCounted, *, drops: bool) -> Lengths:
        """With prompts as they were counted, within the limit. drops: longer ones are left out."""
        if isinstance(counts, NotCounted):
            return replace(self, uncounted=counts.why)
        if self.limit is not None:
            counts = counts.within(self.limit, drops=drops)
        return replace(self, prompt=counts.longest, counts=counts, bound="")

    def demonstrated(self, counts: TokenCounts | NotCounted, context: int) -> Lengths:
        """With prompts and answers of the data as they were counted, no row longer than the model's
        context, which is 0 if unknown: the longest row, and the longest answer in it.
        """
        if isinstance(counts, NotCounted):
            return replace(self, uncounted=counts.why)
        row = counts.longest_row
        if context > 1:
            row, counts = min(row, context), counts.within(context - 1, drops=False)
        answer = min(counts.longest_answer, row - 1)
        return replace(self, prompt=row - answer, completion=answer, counts=counts, bound="")


def of_rollout(max_tokens: int, max_prompt_tokens: int | None) -> Lengths:
    """Rows of `generate`."""
    if max_prompt_tokens is not None:
        limit = max_prompt_tokens
        return Lengths(prompt=limit, completion=max_tokens, limit=limit)
    bound = "generate(max_prompt_tokens=...) sets a bound"
    return Lengths(prompt=ASSUMED_PROMPT, completion=max_tokens, bound=bound)


def of_demonstration() -> Lengths:
    """Rows of `demonstrations`."""
    said = "nobody knows before the data is tokenised"
    return Lengths(prompt=ASSUMED_PROMPT, completion=ASSUMED_ANSWER, bound=said)
