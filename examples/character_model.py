"""A randomly initialised Qwen2 directory with one token per character, for the examples and the
demo.

Owns: the architecture's shape and the tokenizer's form. Does not own: which characters there are.
"""

from __future__ import annotations

from pathlib import Path

EOS, PAD = "<eos>", "<pad>"


def make_model(
    path: Path,
    tokens: tuple[str, ...],
    *,
    hidden: int,
    mlp: int,
    layers: int,
    seed: int,
    chat_template: str | None = None,
    phrases: tuple[str, ...] = (),
) -> None:
    """Write the directory. tokens: the characters, including EOS and PAD; mlp: its inner width;
    phrases: longer texts that are one token each.
    """
    import torch  # not at the top: processes that score answers import the examples' files, too
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokens) + len(phrases),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=mlp,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokens.index(PAD),
        eos_token_id=tokens.index(EOS),
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    # Byte-level BPE without merges, as transformers expects in a Qwen2 directory; these are its
    # spellings of space and newline.
    spelled = {" ": "\u0120", "\n": "\u010a"}
    vocabulary = {spelled.get(token, token): i for i, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(phrases))
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
