"""How a run is run: everything that is not the algorithm.

Owns: the options, for the command line and for Python; their form in a run folder; the Placing that
the planner gets of them. Does not own: the graph's own parameters (its function's signature).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from dataflow.calls import constructs
from dataflow.errors import PlanError, RunError, nearest
from dataflow.kernel import Offload, Recompute
from engine.plan.cluster import LEASE
from engine.plan.placement import Placing
from engine.plan.plan import Plan

HERE = "none"
"""The cluster of a run that is on no other host, though it was begun on some."""
AUTO = "auto"
"""`--relayout`: a search says which layouts there are."""
RelayoutWish = Mapping[str, str] | Literal["auto"]


@constructs
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:  # the fields' docstrings are the command line's help
    """How the run is run; the graph's own parameters say what it computes."""

    steps: int | None = None
    """Steps to run; without it one pass over the training data."""
    seed: int = 0
    """Every random draw of the run comes from it."""
    name: str | None = None
    """Name of the run folder; the graph's own by default."""
    runs: Path = Path("runs")
    """Folder that holds the run folders."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    checkpoint_minutes: float = 10.0
    """Minutes after the last checkpoint, when the next Step's end gets a timed one; 0: none."""
    keep: int = 2
    """Checkpoints to keep, and as many timed ones."""
    keep_every: int = 0
    """Steps between checkpoints that stay for good, beside those of --keep; 0: none does."""
    grace: float = 60.0
    """Seconds that a Step and its checkpoint may take after Ctrl-C, SIGTERM or SIGHUP."""
    error_budget: float = 0.1
    """Share of the admitted prompts that may be dropped; 10 always may. More end the run."""
    samples_every: int = 1
    """Steps between sample files."""
    samples: Literal["brief", "full"] = "brief"
    """What samples have of each token: brief; or full, also log-probs and advantage."""
    record: str = ""
    """Nodes whose rows are kept (rollout,score), or all: for rerun, and for diff of rows."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Views of the metrics beside metrics.jsonl."""
    workers: Literal["one", "auto", "apart"] = "auto"
    """Processes: one; apart, each node in its own; auto, one at max_lag 0, else overlapping."""
    kernel: Mapping[str, str] = field(default_factory=dict)
    """The kernel of a node (rollout=vllm); by default its operator's first that can run it."""
    pin: Mapping[str, str] = field(default_factory=dict)
    """The Worker of a node, or of its replicas (rollout=g0,g1@b,g2@gpu:H200), and on which host."""
    together: tuple[tuple[str, ...], ...] = ()
    """Nodes that share their Workers (rollout,score)."""
    replicas: Mapping[str, int | str] = field(default_factory=dict)
    """Workers that each do a part of a node's chunks (rollout=3); 2..8: they join and leave."""
    scaling: Literal["balance", "most", "fixed"] = "balance"
    """How many of 2..8: balance, as training keeps up with; most, all; fixed, as scale() says."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    """Parts that a node's rows of a Step are cut into (rollout=3); by default, its replicas."""
    spread: Mapping[str, int] = field(default_factory=dict)
    """Spans that a prompt's answers are cut into, for replicas (rollout=2); else by price."""
    tail: Mapping[str, float] = field(default_factory=dict)
    """Share of the rows of most weight that have chunks apart (rollout=0.2); else by price."""
    loads: Literal["equal", "priced", "measured"] = "priced"
    """Rows of unlike replicas and ranks: equal; priced, to end together; measured, as they did."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Data-parallel ranks of a train node (train_policy=2)."""
    tensor: Mapping[str, int] = field(default_factory=dict)
    """Tensor ranks of each data-parallel one, each replica of what computes, or an engine."""
    context: Mapping[str, int] = field(default_factory=dict)
    """Ranks that divide the tokens of the same rows, to train or read them (train_policy=2)."""
    shard: bool = False
    """Ranks each keep a part of weights and optimizer (FSDP2), not all."""
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """What a backward pass computes again (train_policy=layers), or none; else as memory asks."""
    offload: Mapping[str, Offload] = field(default_factory=dict)
    """What waits on the host (train_policy=optimizer, reference=weights), or none; likewise."""
    microbatch: Mapping[str, int] = field(default_factory=dict)
    """Tokens of one forward pass or micro-batch (train_policy=32768); by default 16384."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Rows that a replica of a generation decodes at once (rollout=64); by default 256."""
    compiled: Literal["auto", "none", "layers"] = "auto"
    """Layers compiled by torch.compile: layers, none; auto, on GPUs alone (CPUs promise bits)."""
    search: Literal["auto", "off"] = "auto"
    """Layouts that no option names: auto, by the price of whole plans; off, by rule alone."""
    objective: Literal["seconds", "cost"] = "seconds"
    """What the search makes least: a Step's seconds, or its cost by the prices of hosts."""
    profile: Path | None = None
    """Measured rates of this machine (dataflow profile), by which plans are priced and searched."""
    stream: Literal["auto", "off", "ordered", "arrival"] = "auto"
    """A Step in parts: while it is generated, with a lag once it is formed; auto: by price."""
    part_tokens: int = 0
    """Tokens of answers in a part of a streamed Step; 0: by price, at least a micro-batch."""
    live_tokens: int = 0
    """Most tokens of answers of prompts that wait beyond a Step's batch; 0: what memory holds."""
    relayout: RelayoutWish = field(default_factory=dict)
    """Other options from so many live tokens on (16384=replicas.rollout=2), at a Step; auto."""
    turns: tuple[tuple[str, ...], ...] = ()
    """Workers on the same devices, which take turns (gen,train)."""
    weights: Literal["auto", "pull", "collective", "ipc"] = "auto"
    """How new weights reach other Workers: pull, collective, ipc (one host); auto, by the GPUs."""
    verify: Literal["structure", "content"] = "structure"
    """What readers check of rows of their own host: structure; or content: hashes of them, too."""
    cluster: str | None = None
    """Hosts: ray, a Ray cluster; ray:local, one begun here; none; to explain or simulate a file."""
    wait: float = 600.0
    """Seconds to wait for room in the Ray cluster."""
    lease: float = LEASE
    """Seconds without a word after which the run and another host give each other up."""
    private: bool = False
    """Nobody else is on the hosts' network: rows travel without encryption."""
    threads: int | None = None
    """Threads of each kernel; by default all cores, shared by Workers that compute at one time."""
    inproc: bool = False
    """Run everything in this process, user functions too, for breakpoints; without time limits."""
    strict: bool = False
    """Make warnings errors: nothing runs that looks wrong."""
    progress: bool = True
    """Show progress."""
    log_every: int = 0
    """Steps between progress lines off a terminal; 0: each of the first 100, then every 10th."""
    watchdog: float = 300.0
    """Seconds without progress after which the run stops and names who waits for whom."""
    heartbeat: float = 30.0
    """Seconds of silence after which a Worker's process is killed and counts as lost."""


_NO_OPTIONS = ("hosts", "least", "sharded", "simulated")
"""Fields of a Placing that are no options: parts of other options, or set by a command."""
_PLACING_OPTIONS = [f.name for f in fields(Placing) if f.name not in _NO_OPTIONS]
PLANNED = (*_PLACING_OPTIONS, "profile", "cluster", "threads", "seed")
"""Options that a plan is made of; a run folder's are the defaults where it is the TARGET."""

OF_ITS_START: Mapping[str, str] = {
    "seed": "every draw that is still to come depends on it",
    "name": "the folder says which run goes on",
    "runs": "the folder says which run goes on",
    "overwrite": "a resume goes on in the folder as it is",
}
"""Options that a run has from its start, and why a resume has no others."""

_BEFORE: Mapping[str, Any] = {"stream": "off", "search": "off", "loads": "equal"}
"""What was so before there was an option, where that is not its default."""

_PYTHON_NAMES: Mapping[str, str] = {
    "set": 'settings=["train_policy.lr=1e-5"]',
    "watch": "dataflow watch, beside it",
}
"""Flags of commands that are no options, and what takes their place in Python."""


def require_resume_options(changes: Iterable[str]) -> None:
    """Raise RunError for the first of these names that a resume from Python cannot change, or that
    is no option.
    """
    option_names = [f.name for f in fields(RunOptions)]
    for name in changes:
        if name in OF_ITS_START:
            why = OF_ITS_START[name]
            raise RunError(f"resume: {name} does not change in a resume: {why}. Fix: leave it out.")
        if name not in option_names:
            fix = _nearest_argument(name, option_names)
            raise RunError(f"resume: {name!r} is no option. Fix: {fix}.")


def _nearest_argument(name: str, option_names: Sequence[str]) -> str:
    """What to write in Python instead of a name that is no option."""
    if name in _PYTHON_NAMES:
        return _PYTHON_NAMES[name]
    near = nearest(name, option_names)
    return f"{near}=" if near else f"one of {', '.join(option_names)}"


def is_on_ray(options: RunOptions) -> bool:
    """Whether the run is on a Ray cluster. Raises PlanError for another launcher's name."""
    name, _, where = (options.cluster or "").partition(":")
    if name != "ray" or "/" in name:
        return False
    if where not in ("", "local"):
        problem = f"--cluster: expected ray or ray:local, found {options.cluster!r}"
        raise PlanError(f"options: {problem}. Fix: RAY_ADDRESS={where} and --cluster ray.")
    return True


def on_this_host(options: RunOptions) -> RunOptions:
    """Leave out other hosts and layouts: for what runs in this process, wherever the run was."""
    pin: dict[str, str] = {}
    for node, pins in options.pin.items():
        workers = [worker.partition("@")[0] for worker in pins.split(",")]
        pin[node] = ",".join(workers)
    return replace(options, cluster=None, pin=pin, relayout={})


def make_placing(options: RunOptions) -> Placing:
    """Make what the planner gets of the options. Raises PlanError for an impossible value."""
    _refuse_absurd(options)
    pin, hosts = _split_pins(options.pin)
    most, least = _split_replicas(options.replicas)
    return Placing(
        workers=options.workers,
        kernel=options.kernel,
        pin=pin,
        together=options.together,
        replicas=most,
        least=least,
        chunks=options.chunks,
        spread=options.spread,
        tail=options.tail,
        loads=options.loads,
        ranks=options.ranks,
        tensor=options.tensor,
        context=options.context,
        shard=options.shard,
        recompute=options.recompute,
        offload=options.offload,
        microbatch=options.microbatch,
        slots=options.slots,
        compiled=options.compiled,
        search=options.search,
        objective=options.objective,
        stream=options.stream,
        part_tokens=options.part_tokens,
        live_tokens=options.live_tokens,
        turns=options.turns,
        hosts=hosts,
        weights=options.weights,
        inproc=options.inproc,
        samples=options.samples,
        simulated=False,
    )


def write_wishes(options: RunOptions, wishes: Placing) -> RunOptions:
    """Write the wishes of a search as the options that a user would ask for them by. Parts of the
    state of each rank's own are for all train nodes, or for none.
    """
    pin: dict[str, str] = {}
    for node, workers in wishes.pin.items():
        places = [
            f"{name}@{wishes.hosts[name]}" if name in wishes.hosts else name for name in workers
        ]
        pin[node] = ",".join(places)
    return replace(
        options,
        pin=pin,
        together=wishes.together,
        tensor=dict(wishes.tensor),
        microbatch=dict(wishes.microbatch),
        slots=dict(wishes.slots),
        turns=wishes.turns,
        shard=wishes.shard or bool(wishes.sharded),
        search="off",
    )


_LEAST = {
    "keep": 1,
    "samples_every": 1,
    "threads": 1,
    "heartbeat": 0.1,
    "seed": -(2**63),
    "lease": 1,
}
"""The least value of a numeric option; 0 for all others."""


def _refuse_absurd(options: RunOptions) -> None:
    """Raise PlanError for a number below the least of its option, infinite or not a number."""
    for option in fields(options):
        number = getattr(options, option.name)
        least = _LEAST.get(option.name, 0)
        # nan compares as false with every bound, so that it is refused, too.
        if isinstance(number, int | float) and not least <= number < math.inf:
            flag = f"--{option.name.replace('_', '-')}"
            problem = f"expected {least} or more, found {number}"
            raise PlanError(f"options: {flag}: {problem}. Fix: {flag} {least or 1}.")


_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def _split_replicas(
    replicas: Mapping[str, int | str],
) -> tuple[dict[str, int], dict[str, int]]:
    """Split into the most replicas of each node, and the least of those with a range. Raises
    PlanError for what is neither a number nor a range.
    """
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for node, count in replicas.items():
        bounds = _RANGE.fullmatch(count) if isinstance(count, str) else None
        if bounds is not None:
            least[node], most[node] = int(bounds.group(1)), int(bounds.group(2))
        elif isinstance(count, int):
            most[node] = count
        elif count.isdecimal():
            most[node] = int(count)
        else:
            problem = f"{node}: expected a number or a range such as 2..8, found {count!r}"
            raise PlanError(f"replicas: {problem}. Fix: {node}=1..8.")
    return most, least


def _split_pins(
    pins: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Split into the Workers of each node, and the host (after an @) of each Worker that has one.
    Raises PlanError for a Worker on two hosts.
    """
    workers_by_node: dict[str, tuple[str, ...]] = {}
    host_by_worker: dict[str, str] = {}
    for node, pin in pins.items():
        places = [place.strip().partition("@") for place in pin.split(",")]
        workers_by_node[node] = tuple(worker for worker, _, _ in places)
        for worker, at, host in places:
            if at and host_by_worker.setdefault(worker, host) != host:
                problem = f"{worker} is on {host_by_worker[worker]} and on {host}"
                raise PlanError(f"pin: {problem}. Fix: {worker}@{host} everywhere.")
    return workers_by_node, host_by_worker


def encode_options(options: RunOptions, *, path: Sequence[str] = ()) -> str:
    """Write the options for a run folder. path: further folders that the run imports from."""
    document: dict[str, Any] = {}
    for name, setting in asdict(options).items():
        document[name] = setting
        if isinstance(setting, Path):
            document[name] = str(setting)
    if options.cluster not in (None, HERE) and not is_on_ray(options):
        document["cluster"] = os.path.abspath(options.cluster)
    return json.dumps(document | {"path": list(path)}, indent=1)


def keep_choice(options: RunOptions, plans: Iterable[Plan]) -> RunOptions:
    """The options as a run folder keeps them: with what the price has chosen of streamed Steps, so
    that a resume has the same parts, whatever the price says there. Of phases with different
    choices they stay as they are.
    """
    choices: set[tuple[str, int]] = set()
    for plan in plans:
        choices.update((source.stream, source.part_tokens) for source in plan.sources)
    if len(choices) != 1:
        return options
    stream, tokens = choices.pop()
    if options.stream == "auto":
        options = replace(options, stream=stream)
    return replace(options, part_tokens=tokens or options.part_tokens)


def decode_options(
    text: str, changes: Mapping[str, Any], where: str = "options", folder: Path = Path()
) -> tuple[RunOptions, tuple[str, ...]]:
    """Read what `encode_options` wrote, with changes (None: unchanged), and the import path.
    Options that an older run did not write have their defaults, or what was so before there was the
    option. where: names the text. folder: of the run, which has files that options name. Raises
    RunError.
    """
    recorded_options, path = _read_document(text, where)
    recorded_options = {**_BEFORE, **recorded_options}
    option_names = {f.name for f in fields(RunOptions)}
    for name in (*recorded_options, *changes):
        if name not in option_names:
            fix = nearest(name, option_names) or "see dataflow run --help"
            raise RunError(f"{where}: {name!r} is no option. Fix: {fix}.")
    try:
        options = msgspec.convert(recorded_options, RunOptions, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        fix = "the value that `dataflow run --help` names"
        raise RunError(f"{where}: {error}. Fix: {fix}.") from error
    if options.profile is not None:
        options = replace(options, profile=folder / options.profile)
    options = replace(options, **{n: each for n, each in changes.items() if each is not None})
    return options, path


def _read_document(text: str, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options as written, and the import path. Raises RunError for any other text."""
    fix = "restore the file, or start another run"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: expected JSON, found {error}. Fix: {fix}.") from error
    path = document.pop("path", []) if isinstance(document, dict) else None
    if not isinstance(path, list) or not all(isinstance(entry, str) for entry in path):
        problem = f"expected an object of options, and in it a list of folders, found {text[:40]!r}"
        raise RunError(f"{where}: {problem}. Fix: {fix}.")
    return document, tuple(path)


def _to_path(kind: type, text: Any) -> Any:
    """msgspec's hook for types that it does not know: a Path is written as its text."""
    if kind is not Path or not isinstance(text, str):
        raise TypeError(f"expected a path, found {text!r}")
    return Path(text)
