"""What was measured of Models on this machine, and the coefficients fitted to it, as a file.

Owns: the data, its file, and the refusal of a file of another machine, installation or format. Does
not own: measuring and fitting (engine/predict/profile), the formulas (model_passes.py and its
neighbours).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from dataflow.errors import PlanError
from engine.plan.cost.devices import Coefficients, Device, Kind
from engine.plan.cost.machine import Fingerprint, this_installation, this_machine
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.process_memory import ProcessMemory
from engine.plan.cost.transfers import MESSAGE

FORMAT = 2
"""Of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCell:
    """One measurement. rows with prompts and answers of so many tokens; samples: answers of one
    prompt. cores: threads. slots, budget: rows at once, and tokens of a micro-batch or prefill.
    seconds: mean; None where there was not enough memory. cpu: mean of the process's CPU
    seconds; by_cpu: whether `seconds` are these. others: the share of the cores that it wanted
    which others had meanwhile. fitted: what the fitted coefficients say. peak: bytes above the
    memory before the kernel was opened; 0 where not measured. estimated: what the memory formulas
    say, before any correction.
    """

    rows: int
    prompt: int
    answer: int
    samples: int = 1
    cores: int = 1
    slots: int = 0
    budget: int = 0
    seconds: float | None = None
    cpu: float = 0.0
    by_cpu: bool = False
    others: float = 0.0
    fitted: float | None = None
    peak: int = 0
    estimated: int = 0

    @property
    def tokens(self) -> int:
        """Live tokens: each prompt once, all answers."""
        return -(-self.rows // self.samples) * self.prompt + self.rows * self.answer

    @property
    def error(self) -> float | None:
        """Fitted over measured, less one."""
        if self.seconds is None or self.fitted is None:
            return None
        return self.fitted / self.seconds - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCorrection:
    """How predicted peak bytes are corrected: base + factor x what the formulas say."""

    base: int = 0
    factor: float = 1.0

    def of(self, size: int) -> int:
        """The corrected peak."""
        return math.ceil(self.base + self.factor * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKey:
    """What counts for the times of passes, on however many threads. model: `model_key`; kernel:
    `torch` or `vllm`; samples: answers of one prompt in the rows.
    """

    model: str
    kind: Kind
    kernel: str = "torch"
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledNode:
    """One kind of pass of one Model: see PassKey. cores: threads that it was fitted at; node: which
    node of the graph was measured; beside: how much longer it takes while the host's other cores do
    the same; in_run: how much longer in a run of the graph than when one call follows another.
    opening: seconds until its kernel was open, its libraries imported before; 0 where nobody
    measured it.
    """

    model: str
    kind: Kind
    kernel: str = "torch"
    samples: int = 1
    cores: int = 1
    node: str = ""
    coefficients: Coefficients
    peak: PeakCorrection = field(default_factory=PeakCorrection)
    beside: float = 1.0
    in_run: float = 1.0
    opening: float = 0.0
    cells: tuple[ProfileCell, ...] = ()

    @property
    def key(self) -> PassKey:
        """What tells it from other entries, together with the cores."""
        return PassKey(model=self.model, kind=self.kind, kernel=self.kernel, samples=self.samples)

    @property
    def worst(self) -> float:
        """The greatest relative error of the fit, of all cells with a time."""
        errors = (cell.error for cell in self.cells)
        return max((abs(error) for error in errors if error is not None), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured on one machine with one installation. functions: seconds a row of users' functions
    and column operators, by node, each with a core of its own. cpu: the share of these seconds in
    which one computes; in the others it waits, for a judge over HTTP say. message: seconds from
    what a Worker says until what follows. handling: seconds of a core that processes of the run
    take for each message beside nodes, with all else of a Step; 0 where nobody measured it.
    load: how busy others kept the machine meanwhile. process: what Workers' processes take.
    """

    machine: Fingerprint
    installation: Fingerprint
    device: Device
    nodes: tuple[ProfiledNode, ...] = ()
    functions: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    message: float = MESSAGE
    handling: float = 0.0
    load: MachineLoad = field(default_factory=MachineLoad)
    process: ProcessMemory = field(default_factory=ProcessMemory)
    format: int = FORMAT

    def node(
        self, model: str, kind: Kind, *, samples: int = 0, cores: int = 0, kernel: str = ""
    ) -> ProfiledNode | None:
        """Find the entry of a Model (`model_key`) and kind of pass; None where it was not measured.
        samples: of a prompt; of those that were measured the nearest counts, and of its entries
        that of the nearest cores. cores: of one rank. kernel, samples: any, where they are empty.
        """
        entries = [n for n in self.nodes if (n.model, n.kind) == (model, kind)]
        if kernel:
            entries = [n for n in entries if n.kernel == kernel]

        def distance(entry: ProfiledNode) -> tuple[float, float]:
            of_samples = abs(math.log(entry.samples / samples)) if samples else 0.0
            return of_samples, abs(math.log(entry.cores / (cores or 1)))

        return min(entries, key=distance, default=None)


def model_key(model: Sizes) -> str:
    """Name what counts of a Model for its times: shape, dtype, head."""
    sizes = [f"{f.name} {getattr(model.shape, f.name)}" for f in fields(model.shape)]
    key = f"{', '.join(sizes)}, {model.parameters} parameters, {model.dtype}, {model.head}"
    if model.trained is not None:
        key += f", trained {model.trained.parameters} in {model.trained.layers} layers"
    return key


def read_profile(path: Path, *, here: bool = True) -> Profile:
    """Read the profile in a file. here: whether it is for this machine. Raises PlanError for one
    that is missing, damaged, of another format, or, if it is for here, stale: measured on another
    machine, or with another installation.
    """
    profile = _read_any_profile(path)
    if here:
        _require_same(path, "machine", this_machine(), profile.machine)
        _require_same(path, "installation", this_installation(), profile.installation)
    return profile


def _require_same(path: Path, what: str, here: Fingerprint, profiled: Fingerprint) -> None:
    if here.digest != profiled.digest:
        problem = f"expected a profile of this {what} ({here.words}), found {profiled.words}"
        raise _profile_error(path, problem)


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    path.write_bytes(document + b"\n")


def _read_any_profile(path: Path) -> Profile:
    """Read a profile, whatever machine it is of. Raises PlanError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _profile_error(path, f"expected a profile, found {error.strerror}") from error
    try:
        # First the format alone: a file of another one may lack what a Profile needs.
        version = msgspec.json.decode(content, type=_Begin).format
        if version != FORMAT:
            raise _profile_error(path, f"expected format {FORMAT}, found {version}")
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _profile_error(
            path, f"expected what dataflow profile writes, found: {error}"
        ) from error
    for problem in _check_numbers(profile):
        raise _profile_error(path, problem)
    return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """What files of every format have."""

    format: int


def _check_numbers(profile: Profile) -> Iterator[str]:
    """Name the numbers that no measurement gives."""
    rates = (*profile.device.operations.values(), profile.device.memory_rate)
    if min(rates) <= 0:
        yield f"expected rates above 0, found {min(rates):g}"
    for entry in profile.nodes:
        yield from _check_node(entry)
    if not 0 <= profile.load.share <= 1:
        yield f"expected others to have a share of cores, found {profile.load.share:g}"
    yield from _check_processes_and_functions(profile)


def _check_node(entry: ProfiledNode) -> Iterator[str]:
    fit = entry.coefficients
    parts = (fit.step, fit.layer, fit.row, fit.hop, float(entry.peak.base))
    shares = (fit.compute, fit.reads, fit.link, fit.attention, entry.peak.factor, entry.cores)
    counts = (entry.samples, *(cell.samples for cell in entry.cells))
    if min(shares) <= 0 or min(parts) < 0:
        yield f"{entry.kind} of {entry.node}: expected shares above 0 and seconds of 0 or more"
    if min(counts) < 1:
        yield f"{entry.kind} of {entry.node}: expected 1 or more samples, found {min(counts)}"
    if not entry.beside >= 1.0:
        where = f"{entry.kind} of {entry.node}: beside busy cores"
        yield f"{where}: expected 1 or more times as long, found {entry.beside:g}"
    if not 0 <= entry.opening < math.inf:
        where = f"{entry.kind} of {entry.node}: until its kernel is open"
        yield f"{where}: expected 0 or more seconds, found {entry.opening:g}"
    if not 0 < entry.in_run < math.inf:
        where = f"{entry.kind} of {entry.node}: in a run"
        yield f"{where}: expected more than 0 times as long, found {entry.in_run:g}"


def _check_processes_and_functions(profile: Profile) -> Iterator[str]:
    """Name those that belong to no node's passes."""
    plain, torch = profile.process.plain, profile.process.torch
    if min(plain.anonymous, plain.files, torch.anonymous, torch.files) < 0:
        yield "expected bytes of processes of 0 or more"
    if not profile.message >= 0:
        yield f"expected seconds of a message of 0 or more, found {profile.message:g}"
    if not 0 <= profile.handling < math.inf:
        yield f"expected seconds of handling a message of 0 or more, found {profile.handling:g}"
    if min(profile.functions.values(), default=0.0) < 0:
        yield "expected seconds of functions of 0 or more"
    for name, share in profile.cpu.items():
        if not 0.0 <= share <= 1.0:
            yield f"{name}: expected a share of CPU from 0 to 1, found {share:g}"


def _profile_error(path: Path, problem: str) -> PlanError:
    return PlanError(f"profile {path}: {problem}. Fix: dataflow profile GRAPH --out {path}.")
