"""Imports all of imported.py, in the place of a call: a fork server is told a module."""

from tests.vllm.imported import import_all

import_all()
