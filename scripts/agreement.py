"""Measures how far samplers and trainer are apart, and prints the tables of docs/agreement.md.

    .venv/bin/python scripts/agreement.py [--write]

--write: also put them between the page's markers. A sampler is a kernel of `generate`, the trainer
is the torch kernel of `train`; both are used by their contract alone. Each pair has a process of
its own: an engine may change what another one does in its process.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.utils import logging  # noqa: E402

from dataflow.batch import Batch  # noqa: E402
from dataflow.model import Model  # noqa: E402
from operators.generate import GENERATE  # noqa: E402
from tests.kit.architectures import tiny  # noqa: E402
from tests.kit.differences import PROMPTS  # noqa: E402
from tests.kit.kernels import open_kernel, prompt_chunk  # noqa: E402
from tests.kit.training import SUPERVISED, assignment, opened  # noqa: E402

PAGE = ROOT / "docs" / "agreement.md"
BEGIN, END = "<!-- scripts/agreement.py begins -->\n", "<!-- scripts/agreement.py ends -->\n"

SAMPLERS = ("torch", "vllm")

MODELS = ("llama", "qwen2", "qwen3")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "initializer_range": 0.1}
"""Heads of a size that engines have kernels for."""

DRAWS = {"float32": ((1.0, 1.0), (0.7, 0.9)), "bfloat16": ((1.0, 1.0),)}
"""(temperature, top_p) by dtype."""

LRS = (1e-3, 1e-5, 1e-6)
"""Of the update before the sampler loads; the first is that of the large table."""

MOST = 1e-3
"""A larger difference in float32 is no rounding: nothing is printed."""

COLUMNS = (
    "sampler", "model", "embeddings", "dtype", "temperature", "top_p", "tokens",
    "mean", "max", "KL", "loaded: mean", "max", "KL", "not loaded: mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementCase:
    """A sampler with the torch trainer, on one model."""

    sampler: str
    model: str
    tied: bool
    dtype: Any
    temperature: float
    top_p: float
    lr: float = LRS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Metrics of training on rows of the weights of the base; on the same rows after an update; and
    on rows that the sampler made once it had loaded the updated weights.
    """

    case: AgreementCase
    base: dict[str, float]
    stale: dict[str, float]
    loaded: dict[str, float]


def main() -> None:
    missing = {name: why for name in SAMPLERS if (why := lacking(name))}
    wanted = cases([name for name in SAMPLERS if name not in missing])
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        found, lost = (list(alone.map(measured, each)) for each in (wanted, lost_updates()))
    text = f"{table(found, missing)}\n{lost_table(lost)}"
    print(text)
    if "--write" in sys.argv:
        PAGE.write_text(placed(PAGE.read_text(), text))


def lacking(sampler: str) -> str:
    """Why it cannot be measured here; empty if it can."""
    if sampler not in GENERATE.kernels:
        return "`generate` has no such kernel"
    return "" if find_spec(sampler) else "its package is not installed"


def cases(samplers: Sequence[str]) -> list[AgreementCase]:
    """In the order of the table."""
    return [
        AgreementCase(
            sampler=sampler, model=model, tied=tied, dtype=dtype, temperature=at, top_p=top_p
        )
        for sampler, dtype, model, tied in product(samplers, DRAWS, MODELS, (True, False))
        for at, top_p in DRAWS[dtype]
    ]


def lost_updates() -> list[AgreementCase]:
    """By learning rate and dtype; with the torch kernel, as it is not about samplers."""
    one: Any = {"sampler": "torch", "model": "llama", "tied": False}
    return [
        AgreementCase(**one, dtype=dtype, temperature=1.0, top_p=1.0, lr=lr)
        for lr, dtype in product(LRS, DRAWS)
    ]


def measured(case: AgreementCase) -> Agreement:
    """Generate, train twice, load, generate, train."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        base = str(tiny(case.model, Path(folder), tied=case.tied, **SHAPE))
        sampler, trainer = opened_sampler(case, base), opened_trainer(case, base)
        try:
            rows = generated(sampler)
            first, stale = (dict(trainer.step(assignment(rows, step))) for step in (1, 2))
            sampler.load(trainer.pieces(), 2)
            loaded = dict(trainer.step(assignment(generated(sampler), 3)))
        finally:
            trainer.close()
            sampler.close()
    return Agreement(case=case, base=first, stale=stale, loaded=loaded)


def opened_sampler(case: AgreementCase, base: str) -> Any:
    """With a module of its own: `load` copies."""
    module, _, name = GENERATE.kernels[case.sampler].partition(":")
    model = Model("policy", base, trainable=True, dtype=case.dtype)
    params = {"n": 8, "max_tokens": 64, "temperature": case.temperature, "top_p": case.top_p}
    return open_kernel(getattr(import_module(module), name)(), model, **params)


def opened_trainer(case: AgreementCase, base: str) -> Any:
    """Its loss pulls at every token that it is given."""
    at: Any = {"temperature": case.temperature, "sampler_temperature": case.temperature}
    return opened(base, SUPERVISED, dtype=case.dtype, lr=case.lr, **at)


def generated(sampler: Any) -> Batch:
    """The rows of all prompts."""
    return Batch.concat(list(sampler.run(prompt_chunk(PROMPTS)))).sort()


def table(found: Sequence[Agreement], missing: dict[str, str]) -> str:
    """Markdown. Raises AssertionError for differences in float32 that are no rounding."""
    odd = [each for each in found if each.case.dtype == "float32" and worst(each) > MOST]
    assert not odd, f"expected differences of at most {MOST} in float32, found {odd}"
    lines = [f"Measured with {machine()}.", "", row(COLUMNS), row("---" for _ in COLUMNS)]
    lines += [row(cells(each)) for each in found]
    lines += [f"\nNot measured: `{name}`, as {why}." for name, why in missing.items()]
    return "\n".join(lines) + "\n"


def lost_table(found: Sequence[Agreement]) -> str:
    """Markdown: the mean that tells of one lost update, beside the noise."""
    columns = ("learning rate", "dtype", "mean where one update is lost", "mean where it is loaded")
    lines = [row(columns), row("---" for _ in columns)]
    for each in found:
        means = (metrics["policy/mismatch/mean"] for metrics in (each.stale, each.loaded))
        lines.append(row([f"{each.case.lr:.0e}", each.case.dtype, *(f"{x:.1e}" for x in means)]))
    return "\n".join(lines) + "\n"


def worst(each: Agreement) -> float:
    """The greatest difference of rows that the trainer's own weights made."""
    return max(metrics["policy/mismatch/max"] for metrics in (each.base, each.loaded))


def machine() -> str:
    """What the numbers depend on."""
    packages = f"torch {torch.__version__.partition('+')[0]}, transformers"
    python = f"{packages} {transformers.__version__}, Python {platform.python_version()}"
    return f"{python}, on {os.cpu_count()} cores of an {platform.machine()} CPU"


def row(texts: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(texts)} |"


def cells(each: Agreement) -> Iterator[str]:
    """Of one line, in the order of COLUMNS."""
    case = each.case
    yield from (f"`{case.sampler}`", case.model, "tied" if case.tied else "untied", case.dtype)
    yield from (f"{case.temperature}", f"{case.top_p}", f"{each.base['train/tokens']:.0f}")
    for metrics in (each.base, each.loaded):
        yield from (f"{metrics[f'policy/mismatch{end}']:.1e}" for end in ("/mean", "/max", "_kl"))
    yield f"{each.stale['policy/mismatch/mean']:.1e}"


def placed(page: str, text: str) -> str:
    """The page with this text between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
