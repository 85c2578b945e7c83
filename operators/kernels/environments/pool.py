"""Environments in processes: one for each episode under way, or shared ones.

    waits for                                            unblocked by
    answers, room to send, output, ends of processes     the processes, their keepers; a deadline

Owns: which episode runs where, calls and their time, what an episode's fault does to its process.
Does not own: a template and its keeper (template_process.py), one process (episode_process.py),
environments in the kernel's own process (in_process.py).

    the kernel's process --> keeper --> template --> a process for each episode under way

A keeper ends everything below it when the kernel's process ends, however that does. Episodes are
spread over the templates in turn. A process whose episode has finished is used again.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dataflow.errors import KernelError
from dataflow.prompt_types import Message
from operators.environments import Environment
from operators.kernels.environments.answers import CallKind, faulty_reply, make_fault, read_answer
from operators.kernels.environments.child.frames import BadFrame
from operators.kernels.environments.deadlines import Deadlines
from operators.kernels.environments.episode_process import EpisodeProcess
from operators.kernels.environments.open_files import allow_episodes
from operators.kernels.environments.printed_lines import format_stack
from operators.kernels.environments.replies import EnvironmentFault, EnvironmentReply
from operators.kernels.environments.requests import (
    drop_request,
    finish_request,
    reset_request,
    step_request,
)
from operators.kernels.environments.targets import describe_template
from operators.kernels.environments.template_process import TemplateProcess
from operators.kernels.environments.wake_up import WakeUp

_IDLE = 256
"""Most processes that wait for a next episode."""
_GOODBYE_SECONDS = 2.0
"""Time for environments to close when the pool does."""
_STACK_SECONDS = 1.0
"""Time for a late process to print where it stands."""
_DROP_SECONDS = 3.0
"""Time for a shared process to give an episode up; one that does not is stuck as a whole."""


@dataclass(eq=False, kw_only=True)
class _EnvironmentCall:
    """A call under way. is_late: its time is up, and the process is asked where it stands."""

    number: int
    episode: int
    kind: CallKind
    process: EpisodeProcess
    is_late: bool = False


class ProcessPool:
    """See EnvironmentPool. reset_timeout, step_timeout: seconds for a call; the second is also that
    of finish and close.
    """

    def __init__(
        self, environment: Environment, *, name: str, reset_timeout: float, step_timeout: float
    ) -> None:
        """Start all templates at once. Raises KernelError if the environment cannot be sent there
        or loaded, or no process can be started.
        """
        self._name = name
        self._limits = {"reset": reset_timeout, "step": step_timeout, "finish": step_timeout}
        self._is_shared = environment.isolation == "shared"
        setting = describe_template(name, environment)
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._is_woken = False
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._hear_wake)
        self._deadlines = Deadlines()
        self._replies: list[EnvironmentReply] = []
        self._processes: dict[int, EpisodeProcess] = {}
        """Of the episodes under way."""
        self._calls: dict[int, _EnvironmentCall] = {}
        self._calling: dict[int, _EnvironmentCall] = {}
        """The same, by episode."""
        self._number = 0
        self._slot = 0
        self._turn = 0
        self._templates: list[TemplateProcess] = []
        for _ in range(environment.processes):
            template = TemplateProcess(name, setting, self._selector, self._deadlines)
            self._templates.append(template)
        self._idle: dict[TemplateProcess, list[EpisodeProcess]] = {}
        self._sharing: dict[TemplateProcess, EpisodeProcess] = {}
        for template in self._templates:
            self._idle[template] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._load()
            undo.pop_all()

    def reset(self, episode: int, seed: int, row: Mapping[str, Any]) -> None:
        """See EnvironmentPool. Raises DataError for a column that cannot be sent."""
        template = self._next_template()
        request = reset_request(self._name, template.columns, seed, row)
        process = self._choose_process(template)
        self._processes[episode] = process
        process.episodes.add(episode)
        self._ask(episode, "reset", request)

    def step(self, episode: int, message: Message) -> None:
        """See EnvironmentPool."""
        self._ask(episode, "step", step_request(message))

    def finish(self, episode: int, reason: str) -> None:
        """See EnvironmentPool."""
        self._ask(episode, "finish", finish_request(reason))

    def abandon(self, episode: int, reason: str | None = None) -> None:
        """See EnvironmentPool."""
        process = self._processes.get(episode)
        if process is not None:
            self._forget_call(episode)
            self._leave(episode)
            self._give_up(process, episode, reason)
        replies = [reply for reply in self._replies if reply.episode != episode]
        self._replies = replies

    def wait(self, seconds: float | None) -> list[EnvironmentReply]:
        """See EnvironmentPool. With no call under way, None returns at once."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            until_end = end - time.monotonic()
            if seconds is None and not self._calls:
                until_end = 0.0
            self._turn_once(0.0 if self._replies else until_end)
            if self._replies or self._is_woken or until_end <= 0.0:
                replies = self._replies
                self._replies = []
                self._is_woken = False
                return replies

    def wake(self) -> None:
        """See EnvironmentPool."""
        self._wake_up.wake()

    def fileno(self) -> int:
        """See SelectablePool."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def seconds_left(self) -> float:
        """See SelectablePool."""
        return 0.0 if self._replies else self._deadlines.seconds_left()

    def _hear_wake(self, events: int) -> None:
        self._is_woken = self._wake_up.clear()

    def close(self) -> None:
        """See EnvironmentPool."""
        if self._selector.get_map() is None:
            return
        self._hang_up()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < deadline and self._process_count():
            self._turn_once(deadline - time.monotonic())
        for template in self._templates:
            template.hang_up()
        for template in self._templates:
            template.kill()
        self._replies.clear()
        self._selector.close()
        self._wake_up.close()

    def pids(self) -> list[int]:
        """The processes of the pool that run now: keepers, templates, those of episodes."""
        pids: list[int] = []
        for template in self._templates:
            pids += template.pids()
        return pids

    def _process_count(self) -> int:
        return sum(template.process_count for template in self._templates)

    def _hang_up(self) -> None:
        """Let all processes go."""
        processes = {*self._processes.values(), *self._sharing.values()}
        for idle in self._idle.values():
            processes.update(idle)
        for episode in list(self._calling):
            self._forget_call(episode)
        for process in processes:
            process.retire(_GOODBYE_SECONDS)

    def _load(self) -> None:
        try:
            for template in self._templates:
                template.start()
        except OSError as error:
            raise KernelError(
                f"environment {self._name!r}: expected its process to start, found: {error}. Fix:"
                " allow more processes and open files (ulimit -u, ulimit -n)."
            ) from error
        while not all(template.is_settled for template in self._templates):
            self._turn_once(math.inf)
        for template in self._templates:
            if template.fault is not None:
                raise KernelError(
                    f"environment {self._name!r}: its process could not load it:"
                    f" {template.fault.text}. Fix: what it imports has to be importable by the"
                    f" interpreter of its processes.\n{template.fault.detail}"
                )

    def _turn_once(self, seconds: float) -> None:
        """Wait at most so long, then hear of everything that has happened."""
        seconds = max(0.0, min(seconds, self._deadlines.seconds_left()))
        timeout = None if seconds == math.inf else seconds
        for key, events in self._selector.select(timeout):
            key.data(events)
        self._deadlines.run()

    def _next_template(self) -> TemplateProcess:
        template = self._templates[self._turn % len(self._templates)]
        self._turn += 1
        return template

    def _choose_process(self, template: TemplateProcess) -> EpisodeProcess:
        """One that waits for an episode, or else a new one."""
        idle = self._idle[template]
        while idle:
            process = idle.pop()
            if process.fault is None:
                return process
        sharing = self._sharing.get(template)
        if sharing is not None and sharing.fault is None:
            return sharing
        self._slot += 1
        allow_episodes(self._process_count() + 1)
        process = EpisodeProcess(self._slot, template, self, self._deadlines)
        if self._is_shared:
            self._sharing[template] = process
        template.fork(process)
        return process

    def _ask(self, episode: int, kind: CallKind, request: dict[str, Any]) -> None:
        process = self._processes[episode]
        if process.fault is not None:  # it ended between two calls
            self._leave(episode)
            self._add_fault(episode, kind, process.fault)
            return
        self._number += 1
        call = _EnvironmentCall(number=self._number, episode=episode, kind=kind, process=process)
        self._calls[call.number] = call
        self._calling[episode] = call
        if process.pid:
            self._limit(call)
        request["episode"] = episode
        process.ask(call.number, json.dumps(request).encode())

    def _limit(self, call: _EnvironmentCall) -> None:
        self._deadlines.set(call, self._limits[call.kind], lambda: self._be_late(call))

    def _forget_call(self, episode: int) -> None:
        call = self._calling.pop(episode, None)
        if call is not None:
            del self._calls[call.number]
            self._deadlines.clear(call)

    def _leave(self, episode: int) -> EpisodeProcess:
        """The episode is over; returns the process that it ran in."""
        process = self._processes.pop(episode)
        process.episodes.discard(episode)
        return process

    def _give_up(self, process: EpisodeProcess, episode: int, reason: str | None) -> None:
        """Let the environment of an episode end, whatever it does just now: nobody waits."""
        if not self._is_shared:
            farewell = _pack_drop(episode, reason) if reason is not None else b""
            process.retire(self._limits["step"], farewell)
        elif process.fault is None:
            self._number += 1
            process.ask(self._number, _pack_drop(episode, reason))

    def hear_fork(self, process: EpisodeProcess) -> None:
        """See ProcessListener. The time of its first call begins."""
        for episode in process.episodes:
            if episode in self._calling:
                self._limit(self._calling[episode])

    def hear_answer(self, process: EpisodeProcess, number: int, payload: bytes) -> None:
        """See ProcessListener."""
        call = self._calls.get(number)
        if call is None and self._is_shared:
            return  # of an episode that was given up
        if call is None or call.process is not process:
            raise BadFrame(f"an answer to call {number} came, which is none of its own")
        if call.is_late:
            self._time_out(call, payload)
            return
        if process.printed is not None:
            process.printed.end_call()
        reply = read_answer(payload, call.episode, call.kind)
        self._forget_call(call.episode)
        self._replies.append(reply)
        if reply.fault is not None:
            self._leave(call.episode)
            self._give_up(process, call.episode, "error")
        elif call.kind == "finish":
            self._leave(call.episode)
            self._use_again(process)

    def _use_again(self, process: EpisodeProcess) -> None:
        if self._is_shared:
            return
        idle_count = sum(map(len, self._idle.values()))
        if idle_count < _IDLE:
            for template, idle in self._idle.items():
                if process.template is template:
                    idle.append(process)
        else:
            process.retire(self._limits["step"])

    def hear_fault(self, process: EpisodeProcess) -> None:
        """See ProcessListener. Its episodes have this fault, those in no call with their next."""
        assert process.fault is not None
        for episode in list(process.episodes):
            call = self._calling.get(episode)
            if call is None:
                continue
            if call.is_late:
                self._time_out(call, b"")
                continue
            self._forget_call(episode)
            self._leave(episode)
            self._add_fault(episode, call.kind, process.fault)

    def _add_fault(self, episode: int, kind: CallKind, fault: EnvironmentFault) -> None:
        """A reply that may be there before anything is waited for: `seconds_left` says so."""
        self._replies.append(faulty_reply(episode, kind, fault))
        self._deadlines.set(self, 0.0, lambda: None)

    def _be_late(self, call: _EnvironmentCall) -> None:
        """The time of a call is up: before its end its process is asked where it stands."""
        call.is_late = True
        process = call.process
        if self._is_shared:
            process.ask(call.number, _pack_drop(call.episode, "error"))
            self._deadlines.set(call, _DROP_SECONDS, process.kill)
            return
        if process.printed is not None:
            process.printed.capture_stack()
        process.template.order("stack", process)
        self._deadlines.set(call, _STACK_SECONDS, lambda: self._time_out(call, b""))

    def _time_out(self, call: _EnvironmentCall, payload: bytes) -> None:
        """payload: what a shared process answered to being told to give the episode up."""
        process = call.process
        self._forget_call(call.episode)
        self._leave(call.episode)
        detail = _read_stack(payload)
        if not self._is_shared and process.printed is not None:
            detail = process.printed.stack()
        if not detail and process.printed is not None:
            detail = process.printed.last()
        limit = self._limits[call.kind]
        text = f"timed out: its {call.kind} took longer than {limit:g} s"
        fault = make_fault("timeout", text, detail)
        self._replies.append(faulty_reply(call.episode, call.kind, fault, limit))
        if not self._is_shared:
            process.kill()


def _pack_drop(episode: int, reason: str | None) -> bytes:
    return json.dumps(drop_request(reason) | {"episode": episode}).encode()


def _read_stack(payload: bytes) -> str:
    """The stack in the answer of a shared process; empty if it has none."""
    try:
        answer = msgspec.json.decode(payload, type=dict[str, list[str]])
    except msgspec.DecodeError:
        return ""
    lines = "".join(answer.get("stack", ())).splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    frames.reverse()
    return format_stack(frames)
