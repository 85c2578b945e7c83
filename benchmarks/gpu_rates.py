"""What this card reaches: a product of large square matrices, a copy, and a copy from the host.

    python -m benchmarks.gpu_rates [--quick] [--json FILE]

Owns: the rates that shares in gpu_train.py, gpu_generate.py and gpu_weights.py are of. Does not
own: rates of profiles (engine/predict/profile/machine_rates.py), which multiply matrices of ones: a
card does that faster than numbers of a Model.
"""

from __future__ import annotations

import json as json_
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.report import SavedResults, SideResult

PRODUCT, COPY, FROM_HOST = "bf16 matrix product", "device copy", "host to device"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRates:
    """product: operations a second of bfloat16. copy: bytes a second, read and written. from_host:
    bytes a second of a copy from pinned memory.
    """

    product: float
    copy: float
    from_host: float


def card_device() -> torch.device:
    """The card, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def await_card() -> None:
    """Wait until the card has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_calls(work: Callable[[], object], *, warm_up: int, repeats: int) -> float:
    """Seconds of a call: the mean of so many, which are given to the card without a pause."""
    for _ in range(warm_up):
        work()
    await_card()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    await_card()
    return (time.perf_counter() - begun) / repeats


def measure_card_rates(*, quick: bool) -> CardRates:
    """Measure all three. quick: with small numbers, as a CPU can."""
    side, copied, repeats = (256, 1 << 20, 2) if quick else (8192, 1 << 31, 50)
    device = card_device()
    matrix = torch.randn(side, side, device=device).to(torch.bfloat16)
    product = torch.empty_like(matrix)
    product_seconds = time_calls(
        lambda: torch.matmul(matrix, matrix, out=product), warm_up=repeats, repeats=2 * repeats
    )
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = time_calls(lambda: target.copy_(source), warm_up=3, repeats=repeats)
    host = torch.zeros(copied // 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
    part = target[: len(host)]
    host_seconds = time_calls(
        lambda: part.copy_(host, non_blocking=True), warm_up=1, repeats=max(1, repeats // 5)
    )
    return CardRates(
        product=2.0 * side**3 / product_seconds,
        copy=2.0 * copied / copy_seconds,
        from_host=len(host) / host_seconds,
    )


def rate_results(rates: CardRates) -> tuple[SideResult, ...]:
    """The rates as results."""
    return (
        SideResult(name=PRODUCT, value=rates.product / 1e12, unit="TFLOP/s"),
        SideResult(name=COPY, value=rates.copy / 1e9, unit="GB/s"),
        SideResult(name=FROM_HOST, value=rates.from_host / 1e9, unit="GB/s"),
    )


def find_card_rates(path: Path | None, *, quick: bool) -> CardRates:
    """Read what this benchmark wrote; measure now where there is no such file."""
    if path is None or not path.is_file():
        return measure_card_rates(quick=quick)
    values = {result["name"]: result["value"] for result in json_.loads(path.read_text())}
    return CardRates(
        product=1e12 * values[PRODUCT],
        copy=1e9 * values[COPY],
        from_host=1e9 * values[FROM_HOST],
    )


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure the rates.

    Args:
        quick: small numbers; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    results = SavedResults(json)
    results.add(*rate_results(measure_card_rates(quick=quick)))
    results.show("rates of this card")


if __name__ == "__main__":
    tyro.cli(main)
