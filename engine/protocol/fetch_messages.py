"""What is said of fetches that run ahead of their need.

Owns: these values. Does not own: the tasks that need what is fetched (messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataflow.batch import Keys
from engine.protocol.refs import Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A Load's weights have come and are verified, and its Worker keeps them as a block, too, from
    which other readers may load. Its end, Loaded, is still to come.
    """

    id: int
    worker: str
    block: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchAhead:
    """Fetch these rows, which a node below the cut will be given in Step `step`, as soon as there
    is time for it. No task: there is no answer, and nothing depends on it. The blocks stay until
    that Step is over. keys: of each row set, as the node is going to be given them.
    """

    node: str
    worker: str
    step: int
    keys: Mapping[str, Keys]
    inputs: Mapping[str, tuple[Gather, ...]]
