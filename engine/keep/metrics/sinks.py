"""Where the metrics of a run go.

Owns: metrics.jsonl, which is the truth, and views of it (TensorBoard, Weights & Biases), whose
libraries are imported as they open. Does not own: the numbers (step_metrics.py), reading the lines
back (metric_lines.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol
from uuid import uuid4

from dataflow.errors import RunError, StorageError
from dataflow.storage import replace_text, replacing, storage_error, temporary_path, writing
from engine.keep.append_log import AppendLog, whole_until
from engine.keep.metrics.metric_lines import require_rows
from engine.keep.metrics.step_metrics import json_line
from engine.keep.run_folder import RunFolder
from engine.protocol.events import FailingSilently, StepEnded

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where metrics go: `open` once, also where an earlier run of the folder ended; `write` for
    ascending Steps; `close`, which may come twice, or after a failure.
    """

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None: ...
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class WarnedSink(Sink, Protocol):
    """One that also shows what looks wrong in the Steps up to this one; rule: its stable name."""

    def warn(self, step: int, rule: str, text: str) -> None: ...


class JsonLines:
    """`metrics.jsonl`: a strict JSON object a Step, flushed, so that a kill loses no finished Step.
    A torn last line (a kill, a full disk) is cut off when the file is opened.
    """

    def __init__(self) -> None:
        self._file: AppendLog | None = None
        self.last = -1
        """The last Step that is there; -1 without any."""
        self._noted: set[str] = set()

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Raises DataError where a line of the file is no metrics row."""
        with writing("the metrics", run.metrics):
            temporary_path(run.metrics).unlink(missing_ok=True)  # what a kill left of `amend`
            self._file = AppendLog(run.metrics)
            self._cut_after(None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RunError where this or a later Step is there, StorageError for a full disk."""
        file = self._require_open()
        if step <= self.last:
            problem = f"expected a Step after {self.last}, found {step}"
            fix = f"truncate_after({step - 1}) when a run goes back to a checkpoint"
            raise RunError(f"{file.path}: {problem}. Fix: {fix}.")
        line = json_line(step, metrics, self._noted)
        with writing(f"the metrics of step {step}", file.path, len(line)):
            file.append(line)
        self.last = step

    def amend(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add metrics to the last Step's line, whole or not at all; returns all of its metrics."""
        file = self._require_open()
        with file.reader() as lines:
            *before, line = lines.readlines()
        merged = {**json.loads(line), **metrics}
        del merged["step"]
        numbers = {name: math.nan if number is None else number for name, number in merged.items()}
        text = b"".join([*before, json_line(step, numbers, self._noted)])
        with replacing(f"the metrics of step {step}", file.path, len(text)) as whole:
            whole.write(text)
        file.close()  # it is the file that was replaced: nobody finds it any more
        self._file = None
        with writing(f"the metrics of step {step}", file.path):
            self._file = AppendLog(file.path)
        return numbers

    def sync(self) -> None:
        """Sync to the disk. Raises StorageError where that fails."""
        file = self._require_open()
        with writing(f"the metrics up to step {self.last}", file.path):
            file.sync()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later Steps, which a run that resumes at `step` makes again."""
        with writing(f"the metrics up to step {step}", self._require_open().path):
            self._cut_after(step)

    def close(self) -> None:
        """Sync to the disk, and close."""
        if self._file is not None:
            file, self._file = self._file, None
            with writing("the metrics", file.path), file:
                file.sync()

    def _require_open(self) -> AppendLog:
        assert self._file is not None, "the sink is not open"
        return self._file

    def _cut_after(self, step: int | None) -> None:
        """Drop a torn last line, and the lines of Steps after this one; None: of no Step."""
        file = self._require_open()
        with file.reader() as lines:
            size, self.last = whole_until(require_rows(lines, file.path), step)
        file.cut(size)


class View:
    """A view of metrics.jsonl. A failed write is logged once, and the view is left out."""

    takes = (StepEnded, FailingSilently)

    def __init__(self, name: str, sink: WarnedSink) -> None:
        self._name, self._sink = name, sink
        self._run: RunFolder | None = None
        self._over = False

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Raises RunError where its library is not installed."""
        self._run = run
        self._try(lambda: self._sink.open(run, config))

    def take(self, event: StepEnded | FailingSilently) -> None:
        """Write each Step's metrics, and warnings, unless it has failed."""
        match event:
            case StepEnded():
                self._try(lambda: self._sink.write(event.step, event.metrics))
            case FailingSilently():
                self._try(lambda: self._sink.warn(event.step, event.rule, event.text))

    def close(self) -> None:
        """Close the sink, unless it has failed."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        if self._over:
            return
        try:
            action()
        except (StorageError, OSError) as error:
            self._over = True
            if isinstance(error, OSError):
                assert self._run is not None
                error = storage_error(f"the view {self._name}", self._run.path / self._name, error)
            _log.warning("%s The run goes on without it; metrics.jsonl has all of it.", error)


class TensorBoard:
    """Scalars under `tensorboard/` in the run folder, by tensorboard's own writer (no torch).
    After a resume TensorBoard drops what was written before for Steps that come again.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._event: Any = None
        self._summary: Any = None
        self._first = False

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Raises RunError where tensorboard is not installed."""
        self._event = _import_optional("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _import_optional("tensorboard.compat.proto.summary_pb2", "tensorboard")
        writer = _import_optional("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(run.path / "tensorboard"), flush_secs=10)
        self._first = True
        shown = json.dumps(dict(config), indent=2, sort_keys=True, default=str)
        self._add(0, [self._text("config", shown)])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars of the Step; on disk within 10 s, or at close."""
        assert self._writer is not None, "the sink is not open"
        if self._first:  # a session start tells TensorBoard to forget this Step and all later ones
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            start = self._event.Event(wall_time=time.time(), step=step, session_log=log)
            self._writer.add_event(start)
            self._first = False
        make_value, names = self._summary.Summary.Value, sorted(metrics.keys() - {"step"})
        self._add(step, [make_value(tag=name, simple_value=metrics[name]) for name in names])

    def warn(self, step: int, rule: str, text: str) -> None:
        """Write a warning to TensorBoard's text view."""
        self._add(step, [self._text(f"warning/{rule}", text)])

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def _text(self, tag: str, text: str) -> Any:
        """A value for TensorBoard's text view, shown as preformatted."""
        tensors = _import_optional("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        types = _import_optional("tensorboard.compat.proto.types_pb2", "tensorboard")
        shown = "\n".join("    " + line for line in text.splitlines())
        tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=[shown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.Summary.Value(
            tag=tag, tensor=tensor, metadata=self._summary.SummaryMetadata(plugin_data=plugin)
        )


class Wandb:
    """Weights & Biases. A resumed run keeps its wandb run, whose id is in `wandb_id.txt`. The x
    axis is the Step, as wandb's own counter cannot go back. settings: for `wandb.init`.
    """

    def __init__(self, project: str = "dataflow-rl", **settings: Any) -> None:
        self._project = project
        self._settings = settings
        self._run: Any = None

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Raises RunError where wandb is not installed."""
        wandb = _import_optional("wandb", "wandb")
        id_file = run.path / "wandb_id.txt"
        if not id_file.exists():
            replace_text("the id of the run at wandb", id_file, uuid4().hex[:12])
        self._run = wandb.init(
            project=self._project,
            name=run.name,
            id=id_file.read_text(encoding="ascii").strip(),
            resume="allow",
            dir=str(run.path),
            config=dict(config),
            **self._settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._run is not None, "the sink is not open"
        self._run.log({**metrics, "step": step})

    def warn(self, step: int, rule: str, text: str) -> None:
        """An alert, which wandb may send to the user."""
        assert self._run is not None, "the sink is not open"
        self._run.alert(title=rule, text=f"step {step}: {text}")

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _import_optional(module: str, extra: str) -> ModuleType:
    """Import an optional library; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        problem, fix = f"the package {extra} is not installed", f'"dataflow-rl[{extra}]"'
        raise RunError(f"metrics sink {extra}: {problem}. Fix: pip install {fix}.") from error
