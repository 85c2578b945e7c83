"""Numbers as the page writes them, at both sides of each power of ten, where their form changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.watched import Watched

VALUES: dict[str, dict[float, str]] = {
    "number": {
        0.00094: "9.4e-4",
        0.000996: "0.000996",
        0.00099996: "0.001",
        0.0099996: "0.01",
        0.09996: "0.1",
        0.9994: "0.999",
        0.9996: "1",
        9.994: "9.99",
        9.996: "10",
        10: "10",
        99.94: "99.9",
        99.95: "100",
        99.96: "100",
        100: "100",
        100.06: "100.1",
        999.94: "999.9",
        999.96: "1,000",
        1000: "1,000",
        1234.56: "1,234.6",
        9999.94: "9,999.9",
        9999.96: "10.0k",
        99_949: "99.9k",
        99_960: "100k",
        999_499: "999k",
        999_600: "1.00M",
        999_600_000: "1.00G",
        -0.99996: "-1",
        -99.96: "-100",
        -999.96: "-1,000",
        -9999.96: "-10.0k",
        -999_999: "-1.00M",
        0: "0",
    },
    "count": {
        0: "0",
        999: "999",
        1000: "1,000",
        9_999: "9,999",
        9_999.6: "10.0k",
        10_000: "10.0k",
        99_949: "99.9k",
        99_950: "100k",
        999_499: "999k",
        999_999: "1.00M",
        999_999_999: "1.00G",
        -999_999: "-1.00M",
    },
    "digits": {0.996: "1.00", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100"},
    "signed": {99.96: "+100", -99.96: "-100", 0: "0"},
    "percent": {0.994: "99 %", 0.996: "100 %"},
    "bytes": {
        1_023: "1,023 B",
        1_024: "1.00 KiB",
        99.96 * 1024: "100 KiB",
        1_023.4 * 1024: "1023 KiB",
        2**20 - 1: "1.00 MiB",
        2**30 - 1: "1.00 GiB",
        1 - 2**20: "-1.00 MiB",
    },
    "seconds": {
        0: "0 s",
        1e-7: "1.0e-4 ms",
        0.000994: "0.99 ms",
        0.000999: "1.00 ms",
        0.00996: "9.96 ms",
        0.9994: "999 ms",
        0.9996: "1.00 s",
        9.996: "10.0 s",
        59.94: "59.9 s",
        59.96: "1 min 0 s",
        119.6: "2 min 0 s",
        3599.6: "1 h 0 min",
        -0.9996: "-1.00 s",
    },
}
RATES = {0: "0 rows/s", 0.04: "0.04 rows/s", 9.94: "9.9 rows/s", 9.96: "10 rows/s"}


@pytest.fixture
def written(wide: Watched) -> Any:
    """What a function of format.js makes of some numbers."""

    def ask(name: str, numbers: list[float], *more: str) -> list[str]:
        ask_page = """async ([name, numbers, more]) => {
            const format = await import("/static/format.js");
            return numbers.map((x) => format[name](x, ...more));
        }"""
        return wide.page.evaluate(ask_page, [name, numbers, list(more)])

    return ask


def test_a_number_is_rounded_before_its_form_is_chosen(written: Any) -> None:
    for name, texts in VALUES.items():
        found = dict(zip(texts, written(name, list(texts)), strict=True))
        assert found == texts, name
    assert written("rate", list(RATES), "rows") == list(RATES.values())


def test_each_number_is_within_half_a_digit_of_what_is_written(written: Any) -> None:
    """Three digits of any number from 0.001 to 10,000, negative ones too."""
    sizes = [10.0**power * step / 997 for power in range(-3, 4) for step in range(997, 9971, 41)]
    numbers = [sign * size for size in sizes for sign in (1, -1)]
    for number, text in zip(numbers, written("number", numbers), strict=True):
        assert float(text.replace(",", "")) == pytest.approx(number, rel=5.1e-3), text
