"""Kinds of devices, and what of their rates is reached, as data.

Owns: the catalogue (catalogue.toml), its reading, and where nodes can stand (Place). Does not own:
the formulas (model_passes.py, decode.py, training.py, transfers.py), measured coefficients
(profiles).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from dataflow.errors import PlanError, nearest_or_all

Kind = Literal["decode", "prefill", "forward", "train"]
"""Of a pass through a Model: each has coefficients of its own."""
KINDS: tuple[Kind, ...] = ("decode", "prefill", "forward", "train")

Origin = Literal["measured", "fitted", "catalogue"]
"""Where a number comes from: a run of this very work, a profile of others, or data sheets."""

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device; of a CPU, one core. operations: dense, a second, by dtype. memory: bytes,
    0 where the host's counts. Rates in bytes a second: memory_rate; link, to another device of the
    host; network, to another host; host_link, to the host's memory, 0 where that is not known.
    """

    name: str
    operations: Mapping[str, float]
    memory: int = 0
    memory_rate: float
    link: float
    network: float
    host_link: float = 0.0
    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether it has memory of its own, and counts one by one."""
        return self.name != CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What passes of one kind reach. compute, reads, link: shares of the device's rates; attention:
    of the operations a second that products with weights reach, how much those with keys do.
    Seconds: step, of a pass outside the layers; layer, of the launches of each; row, of each row in
    a pass; hop, of a collective before its first byte.
    """

    compute: float
    reads: float
    step: float
    layer: float
    row: float
    link: float
    hop: float
    attention: float = 1.0
    origin: Origin = "catalogue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one replica of a node stands: so many devices of a kind, and how it is divided.

    cores: of a CPU, those of each rank; 1 for a GPU. data, tensor, context: ranks by what they
    divide; shard: whether each data rank keeps a part of the state. rate: bytes a second between
    data ranks, 0 for the device's link, which tensor ranks always have: a share is on one host.
    coefficients: by kind.
    """

    device: Device
    coefficients: Mapping[Kind, Coefficients]
    cores: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    shard: bool = False
    rate: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of all ranks together."""
        return self.data * self.tensor * self.context

    @property
    def sharing(self) -> int:
        """Ranks that have the same weights, or of those that `shard` divides, a part each."""
        return self.data * self.context

    def operations(self, dtype: str) -> float:
        """Operations a second of one rank at best."""
        rate = self.device.operations.get(dtype)
        if rate is None:
            fix = nearest_or_all(dtype, list(self.device.operations))
            problem = f"expected a dtype whose rate is known, found {dtype!r}"
            raise PlanError(f"device {self.device.name}: {problem}. Fix: {fix}.")
        return rate * self.cores

    @property
    def between(self) -> float:
        """Bytes a second between its data ranks at best."""
        return self.rate or self.device.link


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two places: bytes a second, and seconds before the first byte arrives."""

    rate: float
    delay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All that is known without a measurement."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    coefficients: Mapping[str, Mapping[Kind, Coefficients]] = field(default_factory=dict)
    """Family of devices, `gpu` or `cpu`, -> kind of pass -> what is reached."""


@cache
def catalogue() -> Catalogue:
    """Read the catalogue that comes with the package, once a process."""
    import tomllib  # both here: every Worker has this module, none reads the file
    from importlib.resources import files

    text = files("engine.plan.cost").joinpath("catalogue.toml").read_text(encoding="utf-8")
    document: dict[str, Any] = tomllib.loads(text)
    devices = {name: _read_device(name, keys) for name, keys in document["devices"].items()}
    coefficients: dict[str, Mapping[Kind, Coefficients]] = {}
    for family, kinds in document["coefficients"].items():
        coefficients[family] = {kind: Coefficients(**kinds[kind]) for kind in KINDS}
    return Catalogue(devices=devices, coefficients=coefficients)


def device(name: str) -> Device:
    """Find the device of that name. Raises PlanError for one that is not in the catalogue."""
    devices = catalogue().devices
    if name in devices:
        return devices[name]
    problem = f"expected a device of the catalogue, found {name!r}"
    fix = f"{nearest_or_all(name, list(devices))}, or measure it: dataflow profile GRAPH on it"
    raise PlanError(f"device {name}: {problem}. Fix: {fix}.")


def kind_of(name: str) -> str:
    """Find the catalogue's name of a GPU that calls itself `NVIDIA A100-SXM4-80GB`; empty if it has
    none.
    """
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((kind for kind in catalogue().devices if kind in words), "")


def coefficients(device_kind: Device) -> Mapping[Kind, Coefficients]:
    """What is reached of a device's rates, where nobody has measured it."""
    return catalogue().coefficients["gpu" if device_kind.is_gpu else "cpu"]


def catalogue_place(
    device_kind: Device,
    *,
    cores: int = 1,
    data: int = 1,
    tensor: int = 1,
    context: int = 1,
    shard: bool = False,
    rate: float = 0.0,
) -> Place:
    """Make a place with the catalogue's coefficients. For the rest see Place."""
    return Place(
        device=device_kind,
        coefficients=coefficients(device_kind),
        cores=cores,
        data=data,
        tensor=tensor,
        context=context,
        shard=shard,
        rate=rate,
    )


def _read_device(name: str, keys: Mapping[str, Any]) -> Device:
    return Device(
        name=name,
        operations=keys["operations"],
        memory=keys.get("memory_mib", 0) * 2**20,
        memory_rate=keys["memory_rate"],
        link=keys["link"],
        network=keys["network"],
        host_link=keys.get("host_link", 0.0),
        source=keys["source"],
    )
