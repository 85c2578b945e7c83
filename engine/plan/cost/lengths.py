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
    why. bound: of a guessed prompt, what would set it. context: most tokens of a whole row, where
    the graph says so (`interact(max_context=...)`); 0 where it does not.
    """

    prompt: int
    completion: int = 0
    limit: int | None = None
    counts: TokenCounts | None = None
    uncounted: str = ""
    bound: str = ""
    context: int = 0

    @property
    def row(self) -> int:
        """Tokens of a whole row."""
        whole = self.prompt + self.completion
        return min(whole, self.context) if self.context else whole

    def continue_with(self, more: int) -> Lengths:
        """Make prompts of whole rows and of `more` characters, at most a token each."""
        return Lengths(prompt=self.row + more, bound=self.bound, uncounted=self.uncounted)

    def take_prompts(self, prompt: Lengths) -> Lengths:
        """Take the prompts' own lengths, where their ids are known, unless a stated bound is
        shorter.
        """
        if not self.bound and self.prompt <= prompt.prompt:
            return self
        return replace(self, prompt=prompt.prompt, bound=prompt.bound, uncounted=prompt.uncounted)

    def clip(self, context: int) -> Lengths:
        """Limit prompts to what the completion leaves of the model's context, which is 0 if
        unknown. A guessed prompt is cut to it. Rows of a stated context end where that does,
        whatever their prompts leave: a prompt is a token shorter.
        """
        room = context - self.completion
        if self.context and context:
            room = min(self.context, context) - 1
        if room <= 0:
            return self
        limit, prompt = room, self.prompt
        if self.limit is not None:
            limit = min(self.limit, room)
        if self.bound:
            prompt = min(prompt, room)
        return replace(self, limit=limit, prompt=prompt)

    def take_counts(self, counts: TokenCounts | NotCounted, *, drops: bool) -> Lengths:
        """Take prompts as they were counted, within the limit. drops: longer ones are left out."""
        if isinstance(counts, NotCounted):
            return replace(self, uncounted=counts.why)
        if self.limit is not None:
            counts = counts.within(self.limit, drops=drops)
        return replace(self, prompt=counts.longest, counts=counts, bound="")

    def take_demonstrations(self, counts: TokenCounts | NotCounted, context: int) -> Lengths:
        """Take prompts and answers of the data as they were counted, no row longer than the model's
        context, which is 0 if unknown. They are those of the longest row, with the longest answer.
        """
        if isinstance(counts, NotCounted):
            return replace(self, uncounted=counts.why)
        row = counts.longest_row
        if context > 1:
            row = min(row, context)
            counts = counts.within(context - 1, drops=False)
        answer = min(counts.longest_answer, row - 1)
        return replace(self, prompt=row - answer, completion=answer, counts=counts, bound="")


def of_rollout(
    max_tokens: int,
    max_prompt_tokens: int | None,
    *,
    context: int = 0,
    operator: str = "generate",
) -> Lengths:
    """Lengths of rows that a generation makes. context: the most tokens of a row, if stated.
    operator: its name.
    """
    if context:
        max_tokens = min(max_tokens, context)
    if max_prompt_tokens is not None:
        limit = max_prompt_tokens
        return Lengths(prompt=limit, completion=max_tokens, limit=limit, context=context)
    bound = f"{operator}(max_prompt_tokens=...) sets a bound"
    return Lengths(prompt=ASSUMED_PROMPT, completion=max_tokens, bound=bound, context=context)


def of_demonstration() -> Lengths:
    """Lengths of rows that `demonstrations` makes, until they are counted."""
    bound = "nobody knows before the data is tokenised"
    return Lengths(prompt=ASSUMED_PROMPT, completion=ASSUMED_ANSWER, bound=bound)
