"""A run that was planned by a profile: the folder has a copy, which a resume and explain read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.errors import PlanError
from engine.api import resume
from engine.keep.untrusted_files import PROFILE, kept_options
from engine.plan.cost.profile import read_profile, write_profile
from tests.kit import runs
from tests.kit.run_graphs import small
from tests.kit.tiny_runs import TinyRuns
from tests.unit.test_profile_file import made

pytestmark = pytest.mark.timeout(180)


def test_a_run_keeps_the_profile_that_it_was_planned_by(tiny: TinyRuns, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    write_profile(path, made())
    first = tiny.run(small, 1, inproc=True, profile=path)
    path.unlink()
    assert kept_options(first.folder)[0].profile == first.folder / PROFILE
    assert read_profile(first.folder / PROFILE) == made()
    resumed = resume(first.folder, steps=2, progress=False)
    assert [row["step"] for row in runs.metrics(resumed)] == [1, 2]
    with pytest.raises(PlanError, match=r"here\.json"):
        resume(first.folder, steps=3, progress=False, profile=path)
