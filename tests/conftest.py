"""What holds for all tests: output is as wide as where nobody says how wide a screen is."""

from __future__ import annotations

import os

for _name in ("COLUMNS", "LINES", "NO_COLOR"):
    os.environ.pop(_name, None)
    # Importing readline, as pytest does, sets the first two behind the back of os.environ, and
    # processes that tests start would have them.
    os.unsetenv(_name)
