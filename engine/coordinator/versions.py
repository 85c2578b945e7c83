"""Who has which version of which trained Model.

Owns: what a publish tells each reader, and which readers have not loaded it yet. Does not
own: when a version is published (core.py), nor how the weights travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.coordinator.messages import Follow, Loaded, Publish
from engine.plan.plan import Plan, PlannedModel, PlannedNode


class Versions:
    """The readers of every Model that some train node writes, and those of its followers."""

    def __init__(self, plan: Plan) -> None:
        self._models = plan.models
        self._writers = {m.name: m.writer for m in plan.models if m.writer}
        self._loading: set[tuple[str, str]] = set()
        self._published = 0

    def publish(self, version: int, *, moved: bool = True) -> Iterator[Publish | Follow]:
        """Tell every reader to load this version, and followers to move towards their leader.

        moved: whether the version is new. It is not when a run begins or goes on: then every reader has to have it, but
        no follower moves.
        """
        self._published = version
        for model in self._models:
            if model.writer:
                for reader in model.readers:
                    self._loading.add((reader, model.name))
                    yield Publish(
                        model=model.name,
                        writer=model.writer,
                        reader=reader,
                        version=version,
                        alias=reader in model.aliases,
                    )
            elif moved and model.follows in self._writers and version % model.every == 0:
                yield from self._follow(model, version)

    def _follow(self, model: PlannedModel, version: int) -> Iterator[Follow]:
        for reader in model.readers:
            self._loading.add((reader, model.name))
            yield Follow(
                model=model.name,
                leader=model.follows,
                writer=self._writers[model.follows],
                reader=reader,
                rate=model.rate,
                version=version,
            )

    def loaded(self, event: Loaded) -> None:
        """A reader has a version; an older one than the published does not count."""
        if event.version == self._published:
            self._loading.discard((event.node, event.model))

    @property
    def settled(self) -> bool:
        """Whether every reader has the published version."""
        return not self._loading

    def behind(self, nodes: Iterable[PlannedNode]) -> bool:
        """Whether one of these nodes has not loaded the published version yet."""
        return bool(self._loading) and any((n.name, use.model) in self._loading for n in nodes for use in n.models)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        loading = sorted(self._loading)
        return [f"{node}: has not loaded {model!r} version {self._published}" for node, model in loading]
