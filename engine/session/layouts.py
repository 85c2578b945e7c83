"""The layouts of a run that switches while it goes on, each planned before the run begins.

    the attempt that ends          its checkpoint is written, its Workers are gone
    switch                         layouts.json, plan.json, plan.txt and changes.json are written
    the attempt that begins        from that checkpoint, as a resume with other options begins
    it cannot be opened            the layout is closed, and the run goes on with the one before

Owns: the plans, the present one, the records of a switch, what it took. Does not own: when a run
switches (engine/coordinator/relayout_policy.py), what an attempt is (attempts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dataflow.errors import DataflowError, PlanError
from engine.coordinator.relayout_policy import RelayoutPolicy
from engine.keep.checkpoint.layout_changes import layout_changes
from engine.keep.checkpoint.provenance import AcceptedChange, ProvenanceRecord
from engine.keep.checkpoint.store import CheckpointStore
from engine.keep.layouts_file import LAYOUTS, KeptSwitch, encode_layouts, read_layouts
from engine.keep.memory_file import read_memory
from engine.keep.metrics.metric_lines import recorded_rows
from engine.keep.run_folder import RunFolder
from engine.plan.explain import explain
from engine.plan.layout_table import LayoutTable
from engine.plan.memory_margins import RunMemory, describe_stand
from engine.plan.options import AUTO, RunOptions, keep_choice
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan
from engine.plan.relayout_option import read_relayout, require_generation
from engine.protocol.events import EventHeard, InstructionTold, Opened
from engine.protocol.messages import Relayout, StepClosed
from engine.session.planning import LAYOUTS_NOTE, ONE_LAYOUT_NOTE, note_layouts
from engine.session.run_beginning import Beginning, write_changes

_log = logging.getLogger(__name__)

MakePlan = Callable[[RunOptions, RunMemory], AnyPlan]
SearchTable = Callable[[RunOptions], LayoutTable | None]
WHERE = "plan of the run"
"""Where changes.json says that the layout changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout of the table, with the run's options as they are in it, and its plan."""

    options: RunOptions
    planned: AnyPlan


class RunLayouts:
    """All layouts of one run. policy: decides; of all attempts the same."""

    takes = (Opened, StepClosed)

    def __init__(
        self,
        table: LayoutTable,
        layouts: Sequence[PlannedLayout | None],
        make: MakePlan,
        present: int,
        switches: tuple[KeptSwitch, ...] = (),
    ) -> None:
        """layouts: None for one that is closed. make: plans. present: the number of the first.
        switches: those before.
        """
        self._layouts = list(layouts)
        self._make = make
        self._switches = switches
        self._folder: RunFolder | None = None
        self._written = table
        self.policy = RelayoutPolicy(table, present)
        self.policy.stands = _describe_stands(layouts)
        self.policy.switches = len(switches)
        self._closed_at: float | None = None
        """When the last Step was closed, by the loop's clock."""
        self._is_switching = False

    @property
    def present(self) -> PlannedLayout:
        """The layout that the run has now."""
        present = self._layouts[self.policy.layout]
        assert present is not None  # what is closed is never chosen
        return present

    @property
    def is_opening(self) -> bool:
        """Whether a layout that was switched to is not open yet."""
        return self._is_switching

    @property
    def plans(self) -> list[Plan]:
        """Of each phase in each layout."""
        plans: list[Plan] = []
        for layout in filter(None, self._layouts):
            plans += layout.planned.phases
        return plans

    def restore(self, folder: RunFolder, step: int) -> None:
        """Take up what the Steps up to this one had, as the metrics say."""
        for row in recorded_rows(folder.metrics):
            live, noted = row.get("relayout/live_tokens"), row["step"]
            if live is not None and noted is not None and noted <= step:
                self.policy.note_step(int(noted), live)

    def write(self, folder: RunFolder) -> None:
        """Write layouts.json."""
        self._folder, self._written = folder, self.policy.table
        text = encode_layouts(self.policy.table, self.policy.layout, self._switches)
        folder.write_text(LAYOUTS, text)

    def take(self, event: InstructionTold | EventHeard | Opened) -> None:
        """See `engine.protocol.events`. A switch takes from the end of the Step before it until
        everything is open again. At a Step's end layouts may have been closed.
        """
        if not isinstance(event, Opened):
            self._closed_at = event.at
            self._keep_closed()
        elif self._is_switching and self._closed_at is not None:
            self.policy.note_cost(event.at - self._closed_at)
            self._is_switching = False

    def _keep_closed(self) -> None:
        """Write which layouts memory that ran out has closed, and say so, once each."""
        table = self.policy.table
        if table == self._written or self._folder is None:
            return
        pairs = zip(self._written.layouts, table.layouts, strict=True)
        for number, (before, after) in enumerate(pairs):
            if before != after:
                where = f"beyond {after.most:.0f} live tokens"
                _log.warning("layout %d (%s) is closed %s: memory ran out", number, after, where)
        self.write(self._folder)

    def plan_present_anew(self, folder: RunFolder) -> None:
        """Plan the present layout with what memory that ran out has taught. If it does not fit with
        that it stays as it was planned: limits are lowered where its memory runs out, too.
        """
        memory = read_memory(folder.path)
        if not memory:
            return
        number, layout = self.policy.layout, self.present
        try:
            planned = self._make(layout.options, memory)
        except PlanError as error:
            _log.warning("layout %d stays as it was planned: %s", number, error)
            return
        planned = note_layouts(planned, self.policy.table)
        self._layouts[number] = replace(layout, planned=planned)

    def switch(self, relayout: Relayout, folder: RunFolder, begins: Beginning) -> Beginning:
        """Have another layout from the last checkpoint on; returns how the next attempt begins."""
        latest = CheckpointStore(folder.checkpoints, keep=self.present.options.keep).latest()
        assert latest is not None  # it was just written
        before = self.present.planned
        layout = self.policy.table.layouts[relayout.layout]
        _log.warning(
            "from step %d on: layout %d (%s), %s",
            *(latest.step + 1, relayout.layout, layout, _tell_why(relayout, self.policy.table)),
        )
        switch = KeptSwitch(
            step=latest.step,
            before=relayout.before,
            layout=relayout.layout,
            reason=relayout.reason,
            forced=relayout.forced,
        )
        self._switches = (*self._switches, switch)
        self.policy.note_switch(relayout.layout)
        self.plan_present_anew(folder)
        self._is_switching = True
        self.write(folder)
        planned = self.present.planned
        record = self._add_changes(begins.record, switch, before, planned)
        begins = replace(begins, record=record, checkpoint=latest, differences=(), notice="")
        write_changes(folder, begins)
        folder.write_text("plan.json", planned.to_json())
        folder.write_text("plan.txt", explain(planned))
        return begins

    def give_up(self, error: DataflowError) -> Relayout:
        """Close the layout that could not be opened; returns the switch to the one before. Raises
        the error where that could not be opened, either.
        """
        opening, latest = self._switches[-1], self.policy.table.layouts
        if latest[opening.before].closed:
            raise error
        why = str(error).partition("\n")[0]
        self.policy.close(opening.layout, why)
        return Relayout(
            step=opening.step,
            before=opening.layout,
            layout=opening.before,
            reason=why,
            forced=True,
        )

    def _add_changes(
        self, record: ProvenanceRecord, switch: KeptSwitch, before: AnyPlan, after: AnyPlan
    ) -> ProvenanceRecord:
        """What a resume with the other layout would record, and why."""
        layouts = self.policy.table.layouts
        old = f"{switch.before} ({layouts[switch.before]})"
        new = f"{switch.layout} ({layouts[switch.layout]}), {_tell_why(switch, self.policy.table)}"
        step = switch.step + 1
        changes = [AcceptedChange(step=step, where=WHERE, what="layout", old=old, new=new)]
        for each in layout_changes(before.to_json(), after.to_json()):
            changes.append(
                AcceptedChange(
                    step=step, where=each.where, what=each.what, old=each.old, new=each.new
                )
            )
        return replace(record, changes=(*record.changes, *changes))


def tell_layouts(planned_run: PlannedRun) -> None:
    """Say what a search has found, as a run with `--relayout auto` begins."""
    if planned_run.options.relayout != AUTO:
        return
    (plan,) = planned_run.present.planned.phases
    for note in plan.notes:
        if note.startswith((LAYOUTS_NOTE, ONE_LAYOUT_NOTE)):
            _log.warning("%s", note)


def _tell_why(relayout: Relayout | KeptSwitch, table: LayoutTable) -> str:
    """Why there was a switch: what was measured, or that another layout cannot be had."""
    if table.layouts[relayout.before].closed:
        return f"as layout {relayout.before} cannot be opened: {relayout.reason}"
    return f"as there were {relayout.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run before it begins, or goes on. options: its own. present: the layout to begin with.
    layouts: None for a run that has one.
    """

    options: RunOptions
    present: PlannedLayout
    layouts: RunLayouts | None = None

    @property
    def plans(self) -> list[Plan]:
        """Of each phase in each layout."""
        if self.layouts is None:
            return list(self.present.planned.phases)
        return self.layouts.plans


def plan_run(
    table: LayoutTable | None, options: RunOptions, make: MakePlan, search: SearchTable
) -> PlannedRun:
    """Plan a run, in each of its layouts. table: None for what `options.relayout` says. make:
    plans. search: makes the table of `--relayout auto`. Raises GraphError, PlanError.
    """
    table = table or _find_table(options, search)
    if table is None:
        return _plan_one(options, make, {})
    table, planned = _plan_all(table, options, make)
    layouts = RunLayouts(table, planned, make, table.first)
    return PlannedRun(options=options, present=layouts.present, layouts=layouts)


def plan_resumed(
    folder: RunFolder,
    options: RunOptions,
    make: MakePlan,
    search: SearchTable,
    *,
    asks_anew: bool,
) -> PlannedRun:
    """Plan what a run goes on with: the layouts of its folder, in that which it had last; where the
    resume asks for others, these, in the same if it is among them. A layout of its folder that
    cannot be planned is closed, unless it is the last. Raises RunError for a damaged record,
    GraphError, PlanError.
    """
    recorded, memory = read_layouts(folder.path), read_memory(folder.path)
    if recorded is None and not options.relayout:
        return _plan_one(options, make, memory)
    if recorded is None:
        return plan_run(None, options, make, search)
    table = recorded.table()
    if asks_anew:
        table = _find_table(options, search)
    if table is None:
        return _plan_one(options, make, memory)
    number = table.first
    texts = [layout.text for layout in table.layouts]
    last = recorded.layouts[recorded.present].text
    if last in texts:
        number = texts.index(last)
    table, planned = _plan_all(table, options, make, needed=None if asks_anew else number)
    layouts = RunLayouts(table, planned, make, number, recorded.switches)
    layouts.plan_present_anew(folder)
    return PlannedRun(options=options, present=layouts.present, layouts=layouts)


def _find_table(options: RunOptions, search: SearchTable) -> LayoutTable | None:
    """The table that the options say, or leave to a search; None without one."""
    return search(options) if options.relayout == AUTO else read_relayout(options)


def _plan_one(options: RunOptions, make: MakePlan, memory: RunMemory) -> PlannedRun:
    """Raises PlanError, which says so where it counts with what was measured."""
    try:
        planned = make(options, memory)
    except PlanError as error:
        if not memory:
            raise
        what = "bytes are counted as memory ran out (memory.json)"
        fix = "another layout, or without that file those of the formulas count"
        raise PlanError(f"{error}\n{what}. Fix: {fix}.") from error
    present = PlannedLayout(options=options, planned=planned)
    return PlannedRun(options=options, present=present)


def _plan_all(
    table: LayoutTable, options: RunOptions, make: MakePlan, needed: int | None = None
) -> tuple[LayoutTable, list[PlannedLayout | None]]:
    """Plan every layout. needed: the only one that has to be; the others are closed where they
    cannot be planned. None: all.
    """
    layouts: list[PlannedLayout | None] = []
    for number, layout in enumerate(table.layouts):
        # What the price has chosen of streamed Steps stays as the first layout has it.
        first = next(filter(None, layouts), None)
        if first is not None:
            options = keep_choice(options, first.planned.phases)
        changed = replace(options, **layout.changes, relayout={})
        try:
            planned = make(changed, {})
        except PlanError as error:
            if needed not in (None, number):
                _log.warning("layout %d (%s) cannot be planned: %s", number, layout, error)
                table = table.close(number, str(error).partition("\n")[0])
                layouts.append(None)
                continue
            if not layout.changes:
                raise
            raise PlanError(f"relayout: layout {number} ({layout}): {error}") from error
        if first is None:
            require_generation(planned)
        planned = note_layouts(planned, table)
        layouts.append(PlannedLayout(options=changed, planned=planned))
    return table, layouts


def _describe_stands(layouts: Sequence[PlannedLayout | None]) -> dict[str, list[str]]:
    """Of each node how it stands in each layout, in all phases that have it."""
    stands: dict[str, list[str]] = {}
    for number, layout in enumerate(layouts):
        for phase in layout.planned.phases if layout is not None else ():
            for node in phase.nodes:
                of_layouts = stands.setdefault(node.name, [""] * len(layouts))
                of_layouts[number] += describe_stand(phase, node)
    return stands
