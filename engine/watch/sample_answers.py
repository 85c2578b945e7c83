"""What is asked of a run's samples: pages of them, one in full, its conversation and its tokens.

Owns: these answers, and that a damaged file is left out of them. Does not own: which rows there are
and what is in them (engine/keep/reader), HTTP (app.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.keep.reader.open_folder import NotServed, OpenFolder
from engine.keep.reader.sample_index import Chosen, DamagedFile, SampleIndex, SampleQuery
from engine.keep.reader.sample_rows import conversation_page, row_tokens, short_rows, whole_row
from engine.watch.token_texts import Vocabulary

_SAME = 500
"""Samples of one prompt."""

SampleKey = tuple[int, str, int, int]
"""(Step, train node, position, sample)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswers:
    """Answers about the samples of one run, while its folder is open. vocabulary: of a train node's
    tokenizer, where it is known.
    """

    folder: OpenFolder
    index: SampleIndex
    vocabulary: Callable[[str], Vocabulary | None]

    def page(self, query: SampleQuery) -> dict[str, Any]:
        """A page of samples; read and files tell how far the index is, problems which files are
        damaged and left out.
        """
        return self.past_damage(lambda: self._page(self.index.choose(self.folder, query)))

    def whole(self, key: SampleKey) -> dict[str, Any]:
        """One sample in full."""
        place = self.index.row_of(self.folder, *key)
        return whole_row(self.folder, place, self._texts(key))

    def conversation(self, key: SampleKey, first: int) -> dict[str, Any]:
        """A page of an episode's messages, from this one on."""
        return conversation_page(self.folder, self.index.row_of(self.folder, *key), first)

    def tokens(self, key: SampleKey, first: int, last: int) -> dict[str, Any]:
        """The tokens first..last of a sample, the last one not included; as many as are sent
        together.
        """
        place = self.index.row_of(self.folder, *key)
        return row_tokens(self.folder, place, self._texts(key), first, last)

    def group(self, step: int, node: str, position: int) -> dict[str, Any]:
        """The samples of one prompt in a Step."""
        places = self.index.of_prompt(self.folder, step, node, position)
        return {"total": len(places), "rows": short_rows(self.folder, places[:_SAME])}

    def same(self, step: int, node: str, position: int) -> dict[str, Any]:
        """The samples of the same prompt text over all Steps, the newest first."""

        def page() -> dict[str, Any]:
            places = self.index.of_prompt(self.folder, step, node, position)
            if not places:
                raise NotServed(f"no prompt {position} in Step {step}")
            return self._page(self.index.same_prompt(self.folder, places[0], _SAME))

        return self.past_damage(page)

    def past_damage(self, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """An answer without the sample files that turn out to be damaged as it is made."""
        while True:
            try:
                return answer()
            except DamagedFile as damaged:
                if not self.index.leave_out(damaged):
                    raise

    def _page(self, chosen: Chosen) -> dict[str, Any]:
        return {
            "total": chosen.total,
            "rows": short_rows(self.folder, chosen.rows),
            "read": chosen.read,
            "files": chosen.files,
            "problems": chosen.problems,
        }

    def _texts(self, key: SampleKey) -> Callable[[list[int]], list[str]] | None:
        known = self.vocabulary(key[1])
        if known is None:
            return None
        return known.texts
