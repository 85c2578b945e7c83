"""The settings for our engine and its peers: model, data and numbers of a run.

Owns: creating a small Qwen2 model directory with a character tokenizer, and a Parquet file of
prompts, once, under runs/benchmarks/. Does not own: running anything with them
(against_trl.py).

    python -m benchmarks.settings short demo long_tail
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from operators.task_library import import_library

EOS = "<eos>"
PAD = "<pad>"
ROOT = Path("runs/benchmarks")
Pair = tuple[str, str]
"""A prompt and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a side is told: one update per batch of prompts_per_step * num_generations rows."""

    model_dir: str
    data: str
    prompts_per_step: int
    num_generations: int
    max_new_tokens: int
    steps: int
    """Measured Steps, after `warmup_steps` that are not."""
    warmup_steps: int
    lr: float
    threads: int
    seed: int
    reward: str
    """A name in benchmarks.rewards.REWARDS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one setting's model and data are created, and how it is run."""

    name: str
    about: str
    pairs: Callable[[random.Random], Iterator[Pair]]
    tokens: tuple[str, ...]
    max_new_tokens: int
    reward: str
    lr: float
    teacher_steps: int
    """Supervised updates on a noisy teacher before the measurement; 0 leaves the policy random."""
    steps: int = 20
    warmup_steps: int = 5
    prompts_per_step: int = 32
    num_generations: int = 8
    rows: int = 4096
    threads: int = 2

    def digest(self) -> str:
        """Hash of everything that the files depend on."""
        shown = {
            k: v
            for k, v in asdict(self).items()
            if k in ("name", "tokens", "teacher_steps", "rows")
        }
        source = Path(__file__).read_bytes()
        return hashlib.sha256(json.dumps(shown).encode() + source).hexdigest()[:10]


def digit_pairs(rng: random.Random) -> Iterator[Pair]:
    """`417=` -> `714`: 3 to 6 digits, each length half as frequent as the one before."""
    while True:
        length = rng.choices((3, 4, 5, 6), weights=(8, 4, 2, 1))[0]
        digits = "".join(rng.choices(string.digits, k=length))
        yield f"{digits}=", digits[::-1]


def word_pairs(rng: random.Random) -> Iterator[Pair]:
    """reasoning-gym's spell_backward: words of 3 to 6 letters, prompts of 51 to 54 characters and a
    newline.
    """
    library = import_library()  # takes a second, and only one setting needs it
    data = library.create_dataset(
        "spell_backward", seed=rng.randrange(2**31), size=1 << 20, min_word_len=3, max_word_len=6
    )
    for item in data:
        yield item["question"] + "\n", item["answer"]


DIGIT_TOKENS = (*string.digits, "=", EOS)
"""No pad token: an untrained policy ends with probability 1/12 at each token: p50 8, p90 26."""
TEXT_TOKENS = (*(chr(c) for c in range(32, 127)), "\n", PAD, EOS)

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            name="short",
            about="reverse 3-6 digits, answers of 4-7 tokens",
            pairs=digit_pairs,
            tokens=DIGIT_TOKENS,
            max_new_tokens=8,
            reward="exact_match",
            lr=3e-4,
            teacher_steps=200,
        ),
        Setting(
            name="demo",
            about="spell_backward, prompts of 52-55 tokens, answers of 4-7",
            pairs=word_pairs,
            tokens=TEXT_TOKENS,
            max_new_tokens=10,
            reward="agreement",
            lr=1e-4,
            teacher_steps=80,
            steps=10,
            warmup_steps=3,
        ),
        Setting(
            name="long_tail",
            about="random policy, answers p50 8, p90 26, cap 43",
            pairs=digit_pairs,
            tokens=DIGIT_TOKENS,
            max_new_tokens=43,
            reward="even_share",
            # So small that on both sides lengths stay as they were at the start.
            lr=1e-6,
            teacher_steps=0,
            steps=10,
            warmup_steps=3,
        ),
    )
}


def prepare(setting: Setting, *, seed: int = 0, root: Path = ROOT) -> Run:
    """Create the setting's missing files; returns what a side is told."""
    folder = root / f"{setting.name}-{setting.digest()}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make(setting, folder)
        (folder / "done").touch()
    return Run(
        model_dir=str(folder / "model"),
        data=str(folder / "data.parquet"),
        prompts_per_step=setting.prompts_per_step,
        num_generations=setting.num_generations,
        max_new_tokens=setting.max_new_tokens,
        steps=setting.steps,
        warmup_steps=setting.warmup_steps,
        lr=setting.lr,
        threads=setting.threads,
        seed=seed,
        reward=setting.reward,
    )


def shortened(run: Run) -> Run:
    """The same run with as few Steps as are still meaningful."""
    return replace(run, steps=max(3, run.steps // 3), warmup_steps=2)


def _make(setting: Setting, folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(setting.threads)
    tokenizer = character_tokenizer(setting.tokens)
    model = Qwen2ForCausalLM(small_config(setting.tokens))
    stream = setting.pairs(random.Random(0))
    rows = [next(stream) for _ in range(setting.rows)]
    _teach(model, tokenizer, setting, rows)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompts, answers = zip(*rows, strict=True)
    pq.write_table(
        pa.table({"prompt": list(prompts), "answer": list(answers)}), folder / "data.parquet"
    )


def character_tokenizer(tokens: tuple[str, ...]) -> Qwen2Tokenizer:
    """One token per character. Pads with EOS if there is no PAD.

    transformers reads the tokenizer of a Qwen2 directory as byte-level BPE, whatever class saved
    it, and drops what that does not know; so this is one, without merges, and its space and newline
    are spelled as in byte-level BPE.
    """
    spelled = {" ": "\u0120", "\n": "\u010a"}
    vocabulary = {spelled.get(token, token): i for i, token in enumerate(tokens)}
    pad = PAD if PAD in tokens else EOS
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=EOS,
        eos_token=EOS,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )


def ending_and_padding(tokens: tuple[str, ...]) -> tuple[int, int]:
    """The ids of EOS and of the padding token."""
    end = tokens.index(EOS)
    return end, tokens.index(PAD) if PAD in tokens else end


def small_config(tokens: tuple[str, ...], positions: int = 512) -> Qwen2Config:
    """Two layers of 128 numbers, for rows of at most so many positions."""
    end, pad = ending_and_padding(tokens)
    return Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )


def _teach(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, setting: Setting, rows: list[Pair]
) -> None:
    """Supervised updates on answers in which each character but the end is replaced by another with
    probability 0.25.
    """
    rng = random.Random(1)
    letters = sorted({c for _, answer in rows for c in answer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    for _ in range(setting.teacher_steps):
        noisy = [
            (prompt, _noisy(answer, letters, rng)) for prompt, answer in rng.choices(rows, k=128)
        ]
        ids, mask, labels = _padded(tokenizer, noisy, *ending_and_padding(setting.tokens))
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _noisy(answer: str, letters: list[str], rng: random.Random) -> str:
    return "".join(rng.choice(letters) if rng.random() < 0.25 else c for c in answer)


def _padded(
    tokenizer: Qwen2Tokenizer, pairs: list[Pair], end: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and labels (-100 outside the answer), each [rows, longest], padded
    on the right.
    """
    encoded = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), end]) for prompt, answer in pairs
    ]
    longest = max(len(p) + len(a) for p, a in encoded)
    ids = torch.full((len(pairs), longest), pad)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(encoded):
        stop = len(prompt) + len(answer)
        ids[row, :stop] = torch.tensor(prompt + answer)
        mask[row, :stop] = 1
        labels[row, len(prompt) : stop] = torch.tensor(answer)
    return ids, mask, labels


def main(names: tyro.conf.Positional[tuple[str, ...]] = tuple(SETTINGS)) -> None:
    """Make the files of these settings and print what a side would be told."""
    for name in names:
        print(json.dumps(asdict(prepare(SETTINGS[name])), indent=2))


if __name__ == "__main__":
    tyro.cli(main)
