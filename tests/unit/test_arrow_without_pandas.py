"""A Worker's process has pandas only if somebody in it asks for it, and Arrow then knows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")
_HIDDEN = """
import sys
import pyarrow as pa
from dataflow.arrow_without_pandas import keep_pandas_out
keep_pandas_out()
made = pa.array(["a", None]), pa.array([1.0]).to_numpy(), pa.scalar(1)
assert "pandas" not in sys.modules
"""
_KNOWN = """
import pandas
assert pandas.__spec__.loader is pandas.__loader__
assert pa.array(pandas.Series([1.0, float("nan")])).null_count == 1
assert type(pa.table({"a": [1]}).to_pandas()) is pandas.DataFrame
"""
_ASKED = """
assert pa.table({"a": [1, 2]}).to_pandas()["a"].sum() == 3
assert pa.array(sys.modules["pandas"].Series([float("nan")])).null_count == 1
"""
_EARLIER = """
import pandas, pyarrow as pa
from dataflow.arrow_without_pandas import keep_pandas_out
keep_pandas_out()
assert pa.array([pandas.NA], from_pandas=True).null_count == 1
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [_HIDDEN, _HIDDEN + _KNOWN, _HIDDEN + _ASKED, _EARLIER],
    ids=["hidden", "imported later", "asked for", "imported earlier"],
)
def test_arrow_knows_pandas_once_it_is_imported(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
