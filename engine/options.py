"""The options of a run under the name by which users' code has always imported them.

Owns: nothing; see engine/plan/options.py. Nothing of the engine imports this.
"""

from engine.plan.options import RunOptions

__all__ = ["RunOptions"]
