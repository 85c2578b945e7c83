"""Tiny models with random weights and a character tokenizer, saved as Hugging Face directories; and
a Session.

Owns: what the tests of the torch kernels load. Does not own: any trained weights.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk
from dataflow.randomness import row_seeds
from dataflow.schema import Prompt

CHARACTERS = string.printable[:95] + "\n"
PAD, EOS = len(CHARACTERS), len(CHARACTERS) + 1
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII and newline, then <pad> and <eos>; 98 ids, with a chat
    template.

    It is byte-level BPE without merges because AutoTokenizer, beside a Qwen2 config, makes a
    Qwen2Tokenizer whatever tokenizer.json says: that one then means the same. A word-level one
    would silently lose its spaces there.
    """
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letters.pre_tokenize_str(c)[0][0]: i for i, c in enumerate(CHARACTERS)}
    inner = Tokenizer(models.BPE(vocabulary | {"<pad>": PAD, "<eos>": EOS}, []))
    inner.pre_tokenizer = letters
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    made.chat_template = TEMPLATE
    return made


def save_tiny(
    directory: Path, kind: str = "qwen2", *, seed: int = 0, layers: int = 2, **changes: Any
) -> str:
    """A random model of this kind (qwen2: tied embeddings; llama: untied) with the character
    tokenizer.
    """
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    shape = {
        "vocab_size": len(CHARACTERS) + 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "qwen2",
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    module = model_class(config_class(**(shape | changes)))
    module.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return str(directory)


class FakeSession:
    """A Session that remembers metrics; of one process where no group is given."""

    def __init__(
        self,
        seed: int = 0,
        node: str = "rollout",
        *,
        rank: int = 0,
        world: int = 1,
        group: Any = None,
    ) -> None:
        self.seed, self.rank, self.world, self.group, self._node = seed, rank, world, group, node
        self.metrics: dict[str, list[tuple[float, float]]] = {}
        self.modules: dict[Any, Any] = {}
        self.tombstones: list[tuple[tuple[int, int, int], str]] = []

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """As the engine's: keyed by seed, node and row."""
        return row_seeds(self.seed, self._node, keys)

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Remember it."""
        self.metrics.setdefault(name, []).append((value, count))

    def tombstone(self, key: tuple[int, int, int], error: str, *, failed: bool = True) -> None:
        """Remember it."""
        self.tombstones.append((key, error))

    def module(self, model: Any, make: Callable[[], Any]) -> Any:
        """One module a Model name."""
        if model.name not in self.modules:
            self.modules[model.name] = make()
        return self.modules[model.name]

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """As in an outbox it holds whatever was there: here what no column can take for zeros."""
        return np.full(count * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)


def prompt_chunk(prompts: Sequence[Any], positions: Sequence[int] | None = None) -> Chunk:
    """A chunk of the operator `generate` with these prompts (strings or message lists)."""
    keys = Keys.of(range(len(prompts)) if positions is None else positions)
    batch = (
        Batch.make(keys, {"prompt": list(prompts)}, Prompt)
        if isinstance(prompts[0], str)
        else _chat(keys, prompts)
    )
    return Chunk(id=0, step=1, keys=keys, inputs={"prompt": batch})


def _chat(keys: Keys, prompts: Sequence[Any]) -> Batch:
    import pyarrow as pa

    from dataflow.schema import MESSAGE

    return Batch.make(keys, {"prompt": pa.array(prompts, pa.list_(MESSAGE))}, Prompt)
