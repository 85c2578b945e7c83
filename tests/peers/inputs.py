"""The rows that every peer gets, and the file that keeps what it returned.

Owns: inputs by seed, padding, the form of a vector file. Does not own: any peer. Numbers are
multiples of 1/64, so that float32 holds them and their differences exactly.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FAR = (-1600, -1344, -640, -64, 0, 64, 640, 1344, 1600)
"""Log ratios, in 64ths: around clamps at 10 and 20, and at 0."""

EVEN = (4, 4, 4)
RAGGED = (4, 1, 3, 2)
ROUNDED = 64


def rows(seed: int, sizes: tuple[int, ...], *, far: bool = False, holes: bool = True) -> Any:
    """Rows in groups of these sizes, at most 6 tokens each, the last of each written.

    By row: group, reward, baseline. By token: mask, value, now, old, reference, advantage (one for
    the whole row), returns. far: ratios beyond every clamp.
    """
    draw = random.Random(seed)
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    lengths = [draw.randint(1, 6) for _ in group]

    def number(low: int, high: int) -> float:
        return draw.randint(low * ROUNDED, high * ROUNDED) / ROUNDED

    def tokens(low: int, high: int) -> list[list[float]]:
        return [[number(low, high) for _ in range(n)] for n in lengths]

    def away() -> list[list[float]]:
        """Log ratios."""
        if not far:
            return tokens(-1, 1)
        return [[draw.choice(FAR) / ROUNDED for _ in range(n)] for n in lengths]

    def less(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
        return [[x - y for x, y in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]

    now = tokens(-4, 0)
    gain = [draw.choice((-1.5, -0.5, 1.0, 2.0)) for _ in group]
    mask = [[int(not holes or draw.random() < 0.75) for _ in range(n - 1)] + [1] for n in lengths]
    return {
        "group": group,
        "reward": [number(-1, 3) for _ in group],
        "baseline": [number(0, 1) for _ in group],
        "mask": mask,
        "value": tokens(-1, 1),
        "old_value": tokens(-1, 1),
        "now": now,
        "old": less(now, away()),
        "reference": less(now, away()),
        "advantage": [[a] * n for a, n in zip(gain, lengths, strict=True)],
        "returns": tokens(-2, 2),
    }


def padded(tokens: list[list[float]]) -> list[list[float]]:
    """Rows of one length, zeros at their ends."""
    width = max(map(len, tokens))
    return [row + [0.0] * (width - len(row)) for row in tokens]


def cut(matrix: list[list[float]], like: list[list[Any]]) -> list[list[float]]:
    """The rows again, without what was padded."""
    return [row[: len(part)] for row, part in zip(matrix, like, strict=True)]


class PeerVectors:
    """The vectors of one peer: batches by name, and cases with their settings and outputs."""

    def __init__(self, peer: str, release: str) -> None:
        self.document: dict[str, Any] = {"peer": peer, "release": release, "batches": {}}
        self.document["cases"] = []

    def batch(self, name: str, given: Any) -> Any:
        """Keep a batch, once."""
        self.document["batches"][name] = given
        return given

    def case(self, batch: str, called: str, name: str, how: Any, **outputs: Any) -> None:
        """called: the peer's function. name, how: what of ours is compared, and its settings."""
        self.document["cases"].append(
            {"batch": batch, "called": called, "name": name, "how": how, "outputs": outputs}
        )

    def write(self) -> None:
        """Into vectors/, a line for each batch and case."""
        whole = dict(self.document)
        batches, cases = whole.pop("batches"), whole.pop("cases")
        lines = [f'"{key}": {json.dumps(value)},' for key, value in whole.items()]
        lines.append('"batches": {')
        lines.append(",\n".join(f'"{k}": {json.dumps(v)}' for k, v in batches.items()))
        lines.append('},\n"cases": [')
        lines.append(",\n".join(json.dumps(case) for case in cases))
        text = "\n".join(["{", *lines, "]", "}"]) + "\n"
        path = Path(__file__).parent / "vectors" / f"{whole['peer']}.json"
        path.write_text(text)
        print(f"{path}: {len(cases)} cases of {whole['peer']} {whole['release']}")
