"""Commands and Workers as forks of a process that has imported, in the place of interpreters.

Owns: `ForkedPopen`, a `subprocess.Popen` that asks a fork server where it can; which commands that
are; the server of this process. Does not own: the server's side (fork_server.py).

    forked                                       an interpreter of its own
    a Worker, a template, a reward's process     all other commands that this process starts
    a rank of a rerun, what `start_python`       those with interpreter flags, or with another value
    starts                                       of a variable that is read as Python starts
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from dataflow.import_order import interpreter

MODULE = "tests.kit.fork_server"
IMPORTED = (
    "torch",
    "torch.distributed.tensor",
    "torch.optim",
    "torch.profiler",
    "torch.utils.serialization.config",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "engine.api",
    "engine.cli",
    "engine.cli.diff",
    "engine.cli.resume",
    "engine.cli.run",
    "engine.run.worker_process.template_process",
    "engine.run.worker_process.worker_channel",
    "engine.run.worker_process.worker_process",
    "engine.run.worker_process.worker_ranks",
    "engine.predict.profile.kernel_timing",
    "engine.replay.other_ranks",
    "engine.run.worker.newest_rows",
    "engine.run.worker.worker",
    "graphs.grpo",
    "operators.advantage_formulas",
    "operators.kernels.data",
    "operators.kernels.scoring_child",
    "operators.kernels.scoring_keeper",
    "operators.kernels.torch.forward",
    "operators.kernels.torch.generate",
    "operators.kernels.torch.reduce",
    "operators.kernels.torch.train",
)
"""What commands, Workers and ranks need, and takes long to import."""
SERVER = "TEST_FORK_SERVER"
"""In the environment of a process that another program starts: which server it asks for one of its
own (`at_this_server`).
"""
ALSO = "TEST_FORK_IMPORTS"
UNDER = "TEST_FORK_IMPORTS_UNDER"
"""In the environment of whoever starts a server: a module that this imports first; the variables
that it has meanwhile, as JSON.
"""
MOST_REQUEST = 1 << 17
"""Bytes of a request."""
MOST_DESCRIPTORS = 32
"""Of a request."""
_MOST_ANSWER = 64
_ROOM = "x" * (1 << 15)
"""As long as the words and the variables that a forked process can show."""
_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = sys.executable
_KEEPER = "operators.kernels.scoring_keeper"
_OURS = (
    "engine.run.worker_process.worker_process",
    "engine.run.worker_process.template_process",
    "engine.replay.other_ranks",
    "engine.predict.profile.child",
    _KEEPER,
)
_START, _TITLE = interpreter("", "")[3], 4
"""How a command of `interpreter` begins, and which of its words says what is started."""
_READ_LATER = frozenset(
    ["PYTHONPATH", "PYTHONBREAKPOINT", "PYTHONSTARTUP", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"]
)
_READ_AT_START = (
    "ATEN_", "CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_",
    "TRANSFORMERS_", "VLLM_",
)  # fmt: skip
"""Ray's are not among them: no server imports Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A command: the words after the interpreter's name. parent: the word that stands for its
    parent's process id, as whoever asks knows it. targets: the number that each descriptor of the
    message is to have. blocked, ignored: signals. session: whether it leads one of its own. alone:
    whether it has no fork server, since it waits for the end of all its children. served: not 0 for
    a server, which listens at the one descriptor, in the place of a command: the process it serves.
    """

    words: Sequence[str] = ()
    parent: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    targets: Sequence[int] = ()
    blocked: Sequence[int] = ()
    ignored: Sequence[int] = ()
    session: bool = False
    alone: bool = False
    served: int = 0

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def new_address() -> str:
    return f"dataflow-forks-{os.getpid()}-{os.urandom(8).hex()}"


def listener(address: str) -> socket.socket:
    """A socket in Linux's abstract space of names, where requests arrive."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{address}")
    listening.listen(64)
    return listening


class _ForkClient:
    """Where this process asks for forks; the server is started with the first one."""

    def __init__(self) -> None:
        self.installed = False
        self.off = 0
        self._address = ""
        self._lock = threading.Lock()
        self._start_environment: Mapping[str, str] = {}

    def serve_from(self, address: str) -> None:
        """Ask there from now on, in a process that was just forked."""
        self.installed = True
        self._address = address
        self._lock = threading.Lock()
        self._start_environment = _read_at_start(os.environ)

    def forget(self) -> None:
        """After a fork that no server made: what a server forks is no child of this process."""
        self.installed = False

    def forks(self, words: Sequence[str], environment: Mapping[str, str] | None) -> bool:
        """Whether it would fork this command, in this environment; None: in any."""
        if not self.installed or self.off or words[0] != _PYTHON or len(words) < 2:
            return False
        kind = words[2] if words[1] == "-P" else words[1]
        if kind.startswith("-") and kind not in ("-c", "-m"):
            return False
        if environment is None:
            return True
        asked, had = (_not_set_by_server(e) for e in (environment, self._expected()))
        return asked == had

    def _expected(self) -> Mapping[str, str]:
        """What its server read at its start."""
        if self._address:
            return self._start_environment
        if SERVER in os.environ:
            expected: Mapping[str, str] = json.loads(os.environ[SERVER])["environment"]
            return expected
        return _read_at_start(os.environ)

    def connect(self) -> socket.socket:
        return _connected(self.address())

    def address(self) -> str:
        """Where its server listens, which is started if there is none."""
        with self._lock:
            if not self._address:
                self._start_environment = self._expected()
                self._address = _asked_server() if SERVER in os.environ else _started_server()
            return self._address

    def environment(self) -> dict[str, str]:
        """See `at_this_server`."""
        if not self.installed:
            return {}
        server = {"address": self.address(), "environment": dict(self._start_environment)}
        return {SERVER: json.dumps(server)}


_client = _ForkClient()
serve_from = _client.serve_from
at_this_server = _client.environment
"""Variables for a program that starts Python: what it starts asks this process's server for one of
its own, and forks there what the product starts. It has to call `install`.
"""


def forks(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this process would fork these words, for an interpreter, in this environment."""
    return _client.forks([_PYTHON, *words], environment)


def _is_of_product(words: Sequence[str]) -> bool:
    """Whether the product starts this, and imports much in it."""
    ours = len(words) > _TITLE and words[1:3] == ["-P", "-c"] and words[3].startswith(_START)
    return ours and words[_TITLE] in _OURS


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment what a fork cannot change any more."""
    names = (name for name in environment if name.startswith(_READ_AT_START))
    return {name: environment[name] for name in names if name not in _READ_LATER}


def _not_set_by_server(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment what a fork cannot change, and what its server did not import under."""
    under = json.loads(os.environ.get(UNDER, "{}"))
    read = _read_at_start(environment)
    return {name: value for name, value in read.items() if under.get(name) != value}


def _connected(address: str) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(f"\0{address}")
    return asking


def _asked_server() -> str:
    """Ask the server of another process for one that serves this one, and say where it listens."""
    address = new_address()
    request = ForkRequest(served=os.getpid())
    with (
        listener(address) as listening,
        _connected(json.loads(os.environ[SERVER])["address"]) as asking,
    ):
        socket.send_fds(asking, [request.encoded()], [listening.fileno()])
        _forked_pid(asking)
    return address


def _answer(asking: socket.socket) -> int:
    """What a server says next: a process id or an error number below 0, then an exit code."""
    answer = asking.recv(_MOST_ANSWER)
    if not answer:
        raise OSError("the fork server has ended")
    return int(json.loads(answer))


def _forked_pid(asking: socket.socket) -> int:
    """Of the process that was asked for. Raises the server's OSError if it could not fork."""
    pid = _answer(asking)
    if pid < 0:
        asking.close()
        raise OSError(-pid, os.strerror(-pid))
    return pid


def _started_server() -> str:
    """Start this process's own, and say where it listens."""
    address = new_address()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ROOM_FOR_VARIABLES": _ROOM}
    environment.pop("PYTHONPATH", None)  # each fork has its own
    with listener(address) as listening:
        words = ["-m", MODULE, str(listening.fileno()), str(os.getpid()), _ROOM]
        _RealPopen(
            [sys.executable, *words],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=_ROOT,
            env=environment,
        ).returncode = 0  # nobody waits for it: it ends after this process
    return address


_RealPopen = subprocess.Popen


class ForkedPopen(_RealPopen):  # type: ignore[type-arg]
    """A `subprocess.Popen` whose process is forked where that changes nothing but the time.

    It replaces what subprocess calls for a child's start and end: private names of CPython 3.11's.
    """

    _any = False
    """Whether it forks all commands, not only those of the product that import much."""
    _in_any_environment = False
    """Whether it forks although what is read as Python starts may differ from the server's."""
    _asking: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        (
            _, pass_fds, cwd, env, _, _, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            _, gid, gids, uid, umask, start_new_session, process_group,
        ) = others  # fmt: skip
        words = [os.fspath(word) for word in args] if not isinstance(args, str) else [args]
        environment = dict(os.environ if env is None else env)
        plain = not (shell or preexec_fn or executable) and (gid, gids, uid) == (None, None, None)
        of_product = _is_of_product(words)
        may_fork = (of_product or self._any) and plain and umask < 0 and process_group < 0
        compared = None if self._in_any_environment else environment
        if not may_fork or not _client.forks(words, compared):
            super()._execute_child(args, executable, preexec_fn, *others)  # type: ignore[misc]
            return
        streams = [
            p2cread if p2cread >= 0 else 0,
            c2pwrite if c2pwrite >= 0 else 1,
            errwrite if errwrite >= 0 else 2,
        ]
        passed = sorted(pass_fds)
        request = ForkRequest(
            words=words[1:],
            environment=environment,
            folder=os.path.abspath(cwd or os.getcwd()),
            targets=[0, 1, 2, *passed],
            blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            ignored=[n for n in _STOPS if signal.getsignal(n) is signal.SIG_IGN],
            session=start_new_session,
            parent=str(os.getpid()) if of_product else "",
            alone=of_product and words[_TITLE] == _KEEPER,
        )
        self._asking = asking = _client.connect()
        socket.send_fds(asking, [request.encoded()], [*streams, *passed])
        self.pid = _forked_pid(asking)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )

    def _internal_poll(self, *others: Any, **how: Any) -> int | None:
        if self._asking is None:
            return super()._internal_poll(*others, **how)  # type: ignore[misc,no-any-return]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        asking = self._asking
        if asking is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        # One thread waits, as with a real child; to others it is then a matter of their time.
        if not self._waitpid_lock.acquire(timeout=-1 if timeout is None else timeout):  # type: ignore[attr-defined]
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        try:
            if self.returncode is None:
                self._await_answer(timeout)
                self.returncode = _answer(asking)
                # A real wait leaves no zombie behind.
                asking.shutdown(socket.SHUT_WR)
                asking.recv(1)
                asking.close()
        finally:
            self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _await_answer(self, timeout: float | None) -> None:
        ready = select.poll()
        ready.register(self._asking, select.POLLIN)  # type: ignore[arg-type]
        if not ready.poll(None if timeout is None else max(0.0, timeout) * 1e3):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)


class ForkedPython(ForkedPopen):
    """Of `start_python`: forked whatever it does."""

    _any = True


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def install() -> None:
    """Let this process fork what it starts from now on, until it is itself a fork. TEST_FORKS=0 in
    the environment: it starts interpreters, as without this.
    """
    if os.environ.get("TEST_FORKS") == "0":
        return
    _client.installed = True
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.register_at_fork(after_in_child=_client.forget)


def forking() -> ForkServerContext:
    """A context of multiprocessing whose processes are forked from one that has imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


@contextlib.contextmanager
def own_interpreters() -> Iterator[None]:
    """While this is open, this process starts interpreters: for tests of just that."""
    _client.off += 1
    try:
        yield
    finally:
        _client.off -= 1
