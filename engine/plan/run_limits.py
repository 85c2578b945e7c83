"""Numbers by which a run goes on, and by which its plan is priced.

Owns: what both have to know alike. Does not own: estimates (engine/plan/cost).
"""

from __future__ import annotations

BEAT = 1.0
"""Seconds between two heartbeats of a Worker. With each, a generation whose Step is worked on in
parts hands over what is ready, and says its watermark.
"""

FAN_OUT = 2
"""Loads of a version over the network from one source at a time, and as many into other regions."""
