"""The greatest lengths that rows can have.

Owns: most tokens of prompts and completions, and the assumptions where the graph sets no bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ASSUMED_PROMPT = 512
"""Tokens of a prompt where `max_prompt_tokens` is not given. A guess, and `explain` says so."""

ASSUMED_ANSWER = 512
"""Tokens of an answer in demonstrations, tokenised only in the run. A guess; `explain` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Most tokens of prompt and completion. bound: what would set a guessed prompt's."""

    prompt: int
    completion: int = 0
    bound: str = ""

    @property
    def row(self) -> int:
        """Tokens of a whole row."""
        return self.prompt + self.completion

    def continued(self, more: int) -> Lengths:
        """Prompts made of whole rows, and of `more` characters, at most a token each."""
        return replace(self, prompt=self.row + more, completion=0)

    def asked(self, prompt: Lengths) -> Lengths:
        """With prompts of known ids: theirs, if they are shorter than a stated bound."""
        if not self.bound and self.prompt <= prompt.prompt:
            return self
        return replace(self, prompt=prompt.prompt, bound=prompt.bound)

    def clipped(self, context: int) -> Lengths:
        """With a guessed prompt cut to what the completion leaves of the model's context."""
        room = context - self.completion
        return replace(self, prompt=room) if self.bound and 0 < room < self.prompt else self


def of_rollout(max_tokens: int, max_prompt_tokens: int | None) -> Lengths:
    """Rows of `generate`."""
    if max_prompt_tokens is not None:
        return Lengths(prompt=max_prompt_tokens, completion=max_tokens)
    bound = "generate(max_prompt_tokens=...) sets a bound"
    return Lengths(prompt=ASSUMED_PROMPT, completion=max_tokens, bound=bound)


def of_demonstration() -> Lengths:
    """Rows of `demonstrations`."""
    said = "nobody knows before the data is tokenised"
    return Lengths(prompt=ASSUMED_PROMPT, completion=ASSUMED_ANSWER, bound=said)
