"""Run as a script or with `-m`, prints what an interpreter has set for it."""

from __future__ import annotations

import sys

print(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path)
