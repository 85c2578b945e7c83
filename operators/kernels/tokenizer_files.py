"""The tokenizer of a Model's directory without transformers, which takes seconds to import.

Owns: reading tokenizer.json, its settings and its chat template, and what transformers adds to them
by those settings. Does not own: what is encoded and how (text.py). Runs use transformers; a class
of its own there may cut some texts otherwise, so this one only counts tokens beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dataflow.errors import DataError
from dataflow.model_files import TOKENIZER, TOKENIZER_CONFIG, maybe_object
from dataflow.prompt_types import Message
from operators.kernels.text import Tokenizer

TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
FILES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE_FILE, TEMPLATE_JSON)
"""All that a count depends on."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a directory. Raises DataError where its files cannot be read."""
    inner = FileTokenizer(folder)
    ends = frozenset({inner.eos_token_id} - {None})
    return Tokenizer(str(folder), cast("Any", inner), cast("frozenset[int]", ends))


class FileTokenizer:
    """What `text.Tokenizer` asks of a tokenizer of transformers."""

    def __init__(self, folder: Path) -> None:
        settings = maybe_object(folder / TOKENIZER_CONFIG)
        self.special_tokens_map = _special_tokens(settings)
        self.chat_template = _chat_template(folder, settings)
        self._path = folder / TOKENIZER
        if not self._path.is_file():
            problem = "no such file. Fix: tokenizer files, as save_pretrained writes them"
            raise DataError(f"{self._path}: {problem}.")
        with _as_data_error(self._path):
            self._encoder = _load_encoder(self._path, settings, self.special_tokens_map)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends an answer."""
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self._encoder.token_to_id(text)

    def __call__(
        self, texts: str | Sequence[str], *, add_special_tokens: bool, **unused: object
    ) -> dict[str, Any]:
        """The token ids of a text, or of each of several."""
        if isinstance(texts, str):
            return {"input_ids": self._ids(texts, special=add_special_tokens)}
        return {"input_ids": [self._ids(text, special=add_special_tokens) for text in texts]}

    def _ids(self, text: str, *, special: bool) -> list[int]:
        with _as_data_error(self._path):
            # One at a time: a batch starts threads, and this process may be forked later.
            return self._encoder.encode(text, add_special_tokens=special).ids

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | list[str]:
        """A conversation, or each of several, as the template shows it."""
        assert not tokenize
        render = _import_renderer()
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        texts, _ = render(
            conversations=conversation if several else [conversation],
            chat_template=self.chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self.special_tokens_map,
        )
        return cast("list[str]", texts) if several else texts[0]


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises plain Exception, for a broken file and others
        line = str(error).partition("\n")[0]
        problem = f"expected a tokenizer, found: {line:.120}"
        raise DataError(f"{path}: {problem}. Fix: copy the model again.") from error


def _import_renderer() -> Any:
    """Import what renders chat templates. Not with this file: it takes a second, and texts do
    without.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        problem = f"chat templates need another version of transformers: {error}"
        raise DataError(f"{problem}. Fix: pip install -U transformers.") from error
    return render_jinja_template


def _load_encoder(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> Any:
    """Load the encoder of tokenizer.json, with the special tokens of the settings."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(path))
    encoder.no_padding()
    encoder.no_truncation()
    known = encoder.get_vocab()
    if missing := [text for text in special.values() if text not in known]:
        encoder.add_special_tokens(missing)
    _set_ends(encoder, settings, special)
    return encoder


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, by name; each is a text, or an object that has it."""
    tokens: dict[str, str] = {}
    for name, setting in settings.items():
        text = setting.get("content") if isinstance(setting, Mapping) else setting
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """That of a file of its own before that of the settings; of several, `default`."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = maybe_object(folder / TEMPLATE_JSON).get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, list):
        objects = [each for each in template if isinstance(each, Mapping)]
        templates_by_name = {each.get("name"): each.get("template") for each in objects}
        template = templates_by_name.get("default")
    return template if isinstance(template, str) else None


def _set_ends(encoder: Any, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """bos before and eos behind every text, where the settings say so and not the tokenizer."""
    flags = {"bos_token": "add_bos_token", "eos_token": "add_eos_token"}
    if not settings.keys() & set(flags.values()):
        return
    from tokenizers.processors import TemplateProcessing

    names = [name for name, flag in flags.items() if settings.get(flag) and name in special]
    single = "$A"
    if "bos_token" in names:
        single = f"{special['bos_token']} {single}"
    if "eos_token" in names:
        single = f"{single} {special['eos_token']}"
    ids = [(special[name], encoder.token_to_id(special[name])) for name in names]
    encoder.post_processor = TemplateProcessing(single=single, special_tokens=ids)
