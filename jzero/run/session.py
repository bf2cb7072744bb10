"""Manages a run in its workdir, from the start of a process to its end.

Both train loops, RL and SFT, use a session in the same way:

    with closing(RunSession(config, workdir, base, clock, last_step)) as session:
        if session.resume_step is None:
            state = ...
        else:
            state = session.restore(abstract_state)
        progress = session.progress("RL")
        for step in progress:
            ...
            values |= progress.step_metrics()
            session.end_step(step, values, state)
        return session.finish(state)
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from jzero import terminal
from jzero.clock import Clock, compilation_counter
from jzero.config import Config, EveryCheckpoint, TrainConfig, flatten, to_json
from jzero.errors import UserError
from jzero.files import JsonObject, read_jsonl, write_atomic
from jzero.hosts import collectives, processes
from jzero.hosts.interrupt import Interrupted, StopCheck, never_stop
from jzero.model import adapters
from jzero.model.base_model import BaseModel
from jzero.model.hub import commit_of
from jzero.planning.announcement import hours_by_clock, typical_seconds
from jzero.planning.disk import exports_models
from jzero.run.budget import TimeBudget
from jzero.run.callbacks import Callbacks
from jzero.run.checkpoint import Checkpoints
from jzero.run.closing import closing_lines, evaluation_lines
from jzero.run.doctor import Doctor, Finding, stop_names
from jzero.run.environment import versions
from jzero.run.export_model import export_adapter, export_model
from jzero.run.history import history_of
from jzero.run.hub_ledger import Push
from jzero.run.hub_pushes import HubPushes, branch_of_step, push_line
from jzero.run.lock import lock_directory
from jzero.run.memory import MemoryWatch, return_memory_of_compilations
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.model_card import CardOptions, make_card
from jzero.run.progress import Progress
from jzero.run.record import EVALUATIONS_FILE, RunRecord, step_of, summarize
from jzero.run.resume import go_back
from jzero.run.samples import sample_lines
from jzero.run.step_table import StepTable, expected_columns
from jzero.run.workdir import check_history, claim_workdir
from jzero.service.weights import reader
from jzero.tasks.math_problems import OPEN
from jzero.training.frozen_base import InitialWeights
from jzero.types import State

CLOCK_STEP = 3  # of a process: its first two steps compile, the third one shows its speed
STEPS_BETWEEN_SAMPLES = 20  # between two sampled answers on the terminal
PUSH_POLL_SECONDS = 1.0  # a finished run that waits for its pushes checks for signals this often


@dataclass(frozen=True)
class Schedule:
    """The steps of a run, and how often it evaluates, exports and saves. 0 means never."""

    last_step: int  # steps are counted from 1
    evaluate_every: int
    export_every: int
    checkpoint_every: int  # -1: not even at the start and at the end
    checkpoint_steps: float = 0.0  # of train.checkpoint_epochs passes over the data

    @classmethod
    def for_run(
        cls,
        train: TrainConfig,
        evaluate_every: int,
        last_step: int,
        steps_of_pass: float | None = None,
    ) -> "Schedule":
        """`steps_of_pass` is the number of steps of a pass over the data, None if it never ends."""
        if train.checkpoint_epochs and steps_of_pass is None:
            raise UserError(
                f"train.checkpoint_epochs={train.checkpoint_epochs:g}: this task generates "
                "problems without end; set train.checkpoint_every instead"
            )
        return cls(
            last_step=last_step,
            evaluate_every=evaluate_every,
            export_every=train.export_every,
            checkpoint_every=train.checkpoint_every,
            checkpoint_steps=train.checkpoint_epochs * (steps_of_pass or 0.0),
        )

    def evaluation_after(self, step: int) -> str | None:
        """Returns the name of the evaluation that is due after `step`, or None.

        The evaluation after the last step is always due and is called "after".
        """
        if step == self.last_step:
            return "after"
        return f"step_{step}" if _is_multiple(step, self.evaluate_every) else None

    def export_is_due(self, step: int) -> bool:
        """Returns whether the model is exported after `step`, besides the export at the end."""
        return _is_multiple(step, self.export_every)

    def checkpoint_is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step`, which is 0 before the first step."""
        if step in (0, self.last_step):
            return self.checkpoint_every >= 0
        return self._ends_passes(step) or _is_multiple(step, self.checkpoint_every)

    def _ends_passes(self, step: int) -> bool:
        """Returns whether `step` completes another train.checkpoint_epochs passes."""
        if not self.checkpoint_steps:
            return False

        def num_due_by(last: int) -> int:
            return math.floor(last / self.checkpoint_steps + 1e-9)

        return num_due_by(step) > num_due_by(step - 1)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class RunSession:
    """Owns the files of a run (checkpoints and metrics) until `close`, and the record of the run.

    `record` is stored in every checkpoint in addition to the state. `schedule` decides which
    actions are due after a step, and `Progress` measures the time of a step.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        base: BaseModel,
        clock: Clock,
        last_step: int,
        stream_states: Callable[[], list[str]] = list,
        budget: TimeBudget | None = None,
        planned_bytes: float | None = None,
        steps_of_pass: float | None = None,
    ) -> None:
        """Claims `workdir` and opens its files.

        `stream_states` returns the unfinished rollouts of every process, as text. Every process
        calls it whenever a checkpoint is saved. `budget` started when the process began to work on
        the run. `planned_bytes` is the planner's estimate for a device. `steps_of_pass` is the
        number of steps of a pass over the data, None if it never ends.
        """
        self.config = config
        self.workdir = workdir
        self.base = base
        self.weights = InitialWeights(config.model, base, workdir, config.is_warm_started)
        self.clock = clock
        self.schedule = Schedule.for_run(config.train, config.eval.every, last_step, steps_of_pass)
        self._callbacks = Callbacks(config.train.callbacks, workdir)
        self._announced_checkpoint = -1  # the step of the last event "checkpoint"
        self.record = RunRecord()
        self._stream_states = stream_states
        self._started = time.time()
        self.budget = budget or TimeBudget(config.train.minutes)
        # Phase -> seconds already reported to the budget.
        self._reported_seconds: dict[str, float] = {}
        self._memory = MemoryWatch(planned_bytes)
        self._num_steps = 0  # of this process
        self._step_seconds: list[float] = []  # of its first steps, without compilation
        compilation_counter()  # from here on, the terminal shows that a program is compiled
        return_memory_of_compilations()
        # What the terminal shows after the row of a step.
        self._table = StepTable(last_step, expected_columns(config.algorithm))
        self._has_answers = config.task.name != OPEN
        self._progress: Progress | None = None
        self._evaluation_lines: list[str] = []
        self._next_sample = 0  # the first step after which a sampled answer is shown
        self.doctor = Doctor(flatten(json.loads(to_json(config))))
        self._stop_on = stop_names(config.train.stop_on)
        self._samples: Sequence[JsonObject] = ()  # the rows of samples.jsonl of the last step

        # A second process on the same host would write into the same files. Only the first
        # process of a run locks, because the others share the workdir with it.
        with ExitStack() as cleanup:
            if processes.is_first_process():
                cleanup.enter_context(lock_directory(workdir, f"--workdir {workdir}"))

            # These checks come before the first write: a rejected run must not change files of an
            # existing run.
            check_history(workdir, config.train.checkpoint_every)
            go_back(workdir, config.train)
            claim_workdir(workdir, to_json(config))
            self._cleanup = cleanup.pop_all()
        processes.write_once(workdir / "versions.json", json.dumps(self._versions(), indent=1))
        collectives.check_shared(workdir / "versions.json")

        self.checkpoints = Checkpoints(
            workdir, config.train.keep_checkpoints, has_moments=config.train.save == "full"
        )
        self.resume_step = self.checkpoints.latest()  # None for a new run
        self.pushes: HubPushes | None = None  # only on the first process
        if config.hub.push is not None and processes.is_first_process():
            self.pushes = HubPushes(config.hub.push, workdir, self.resume_step)
            self._cleanup.callback(self.pushes.close)
        self.writer = MetricsWriter(
            workdir if processes.is_first_process() else None,
            self.resume_step,
            config.train,
        )
        if processes.is_first_process():
            # A resumed run does not repeat its remarks. The writer has dropped later steps.
            for row in read_jsonl(workdir / "metrics.jsonl"):
                self.doctor.check(row["step"], row)

    def close(self) -> None:
        """Waits for a running save, and closes the files."""
        with self._cleanup, contextlib.closing(self.writer), contextlib.closing(self.checkpoints):
            pass

    def _versions(self) -> dict[str, str]:
        """Returns the versions of the run's software, and the commit of a hub model."""
        commit = commit_of(self.base.directory)
        return versions() | ({"model": f"{self.config.model.path}#{commit}"} if commit else {})

    # -- State -------------------------------------------------------------------------------------

    def restore(self, state_like: State) -> State:
        """Reads the state and the record of the checkpoint `resume_step`.

        `state_like` has the shapes, types and shardings of the state's leaves.
        """
        assert self.resume_step is not None, "there is no checkpoint to restore"
        if not self.checkpoints.has_moments(self.resume_step):
            processes.print_once(
                f"checkpoint {self.resume_step} was saved without Adam's moments (train.save): "
                "they start at 0 again"
            )
        state, record = self.checkpoints.restore(self.resume_step, state_like)
        try:
            self.record = RunRecord.from_json(record)
        except ValueError as error:
            raise self.checkpoints.damaged(self.resume_step, error) from None
        self.record.continue_to(self.schedule.last_step)
        # The clocks continue from the times of the earlier processes.
        self._started -= self.record.seconds
        for phase, seconds in self.record.seconds_by_phase.items():
            self.clock.totals[phase] += seconds
        # The budget counts only the time of this process.
        self._reported_seconds = dict(self.clock.totals)
        processes.print_once(f"resumed {self.workdir} at step {self.resume_step}")
        return state

    def save(self, state: State, *, wait: bool = True) -> None:
        """Saves a checkpoint of `state` and the record under the record's step."""
        with self.clock("checkpoint"):
            self.record.streams = self._stream_states()
            self._update_times()
            self.checkpoints.save(self.record.step, state, self.record.to_json(), wait=wait)
        # The checkpoint of the last step is saved again when the run finishes.
        if self.record.step != self._announced_checkpoint:
            self._announced_checkpoint = self.record.step
            path = str(self.workdir / "checkpoints" / str(self.record.step))
            self._callbacks.call("checkpoint", self.record.step, {"path": path})
        self._report_time("checkpoint", "checkpoint")

    def export(self, state: State) -> str:
        """Exports the policy to `export-<step>`; returns the directory.

        An adapter is exported as an adapter, unless train.export_merged or hub.push asks for a
        complete model.
        """
        model = self.config.model
        stages = history_of(self.config, self.record.step, self.base.directory)
        if not exports_models(model, self.config.train, self.config.hub):
            with self.clock("export"):
                return export_adapter(
                    self.workdir / f"export-{self.record.step}",
                    self.base,
                    model.adapter,
                    state.params,
                    self.weights.name,
                    model.dtype,
                    stages,
                )
        read_original = None
        if model.is_base_quantized:
            # An export has the original weights, from before quantization.
            directory = self.weights.directory
            read_original = reader(directory, self.base.model, model.dtype)
        with self.clock("export"):
            return export_model(
                self.workdir / f"export-{self.record.step}",
                self.base,
                self.config.rollout,
                adapters.full_params(state.base, state.params, model.adapter.scale),
                model.dtype,
                stages,
                read_original,
            )

    # -- Steps -------------------------------------------------------------------------------------

    def progress(self, label: str) -> Progress:
        """Returns an iterator over the remaining steps, with a progress bar called `label`."""
        first_step = self.record.step + 1
        self._progress = Progress(label, first_step, self.schedule.last_step, self.clock)
        return self._progress

    def record_evaluation(self, name: str, values: dict[str, float]) -> None:
        """Stores the metrics of an evaluation for the summary, and prints its main results.

        The results of an evaluation after a step are printed below the step's row.
        """
        before = self.record.evaluations.get("before", {}) if name != "before" else {}
        self.record.evaluations[name] = values
        text = json.dumps(self.record.evaluations, indent=1)
        processes.write_once(self.workdir / EVALUATIONS_FILE, text)
        step = step_of(name, self.schedule.last_step) or 0
        self._callbacks.call("evaluation", step, values)
        self._report_time("eval", "evaluation")
        self._evaluation_lines = evaluation_lines(
            name, values, before, has_answers=self._has_answers
        )
        # Before the first step there is no row to wait for.
        if self._progress is None:
            self._print_evaluation()

    def _print_evaluation(self) -> None:
        for line in self._evaluation_lines:
            processes.print_once(line, "bold")
        self._evaluation_lines = []

    def write_samples(self, step: int, rows: Sequence[JsonObject]) -> None:
        """Writes the logged rollouts of a step, whose metrics follow."""
        self.writer.write_samples(step, rows)
        self._samples = rows

    def _print_step(self, step: int, values: dict[str, float]) -> None:
        """Prints the row of a step, its evaluation and, now and then, a sampled answer."""
        seconds_left = self._progress.seconds_left() if self._progress is not None else None
        *header, row = self._table.rows(step, values, seconds_left)
        for line in header:
            processes.print_once(line, "dim")
        processes.print_once(row)
        self._print_evaluation()
        if self._samples and step >= self._next_sample:
            self._next_sample = step + STEPS_BETWEEN_SAMPLES
            for line in sample_lines(step, self._samples[0]):
                processes.print_once(line, "dim")

    def end_step(self, step: int, values: dict[str, float], state: State) -> None:
        """Writes the metrics of `step`, then exports and saves `state` if either is due.

        Raises UserError, after saving a checkpoint, if device memory keeps growing from step to
        step, or at a remark of train.stop_on.
        """
        self.record.step = step
        self.budget.add("step", values["time/step"])
        values = values | self._memory.step_metrics()
        self.writer.write(step, values)
        self._print_step(step, values)
        self._callbacks.call("step", step, values)
        is_last = step == self.schedule.last_step
        findings = self.doctor.check(step, values, lambda: self._samples, is_last=is_last)
        for finding in findings:
            processes.print_once(terminal.wrapped(str(finding), indent=""))
        self._num_steps += 1
        if self._num_steps <= CLOCK_STEP:
            self._step_seconds.append(values["time/step"] - values.get("compile/seconds", 0.0))
        if self._num_steps == CLOCK_STEP and not is_last:
            hours = self._total_seconds(typical_seconds(self._step_seconds)) / 3600
            processes.print_once(hours_by_clock(hours, self.config.train.price, step))
        # The export comes first: after a kill between the two, the resumed run repeats the step and
        # skips the existing export. In the other order the export would never be made.
        if self.schedule.export_is_due(step):
            self.export(state)
        push = self.config.hub.push
        if push is not None and self._push_is_due(step):
            branch = branch_of_step(push, step)
            self._push(state, branch, is_temporary=not self.schedule.export_is_due(step))
        if self.schedule.checkpoint_is_due(step):
            self.save(state, wait=False)
        self._stop_if_memory_grows(state)
        self._stop_at_remark(findings, state)

    def _total_seconds(self, step_seconds: float) -> float:
        """Returns the seconds of the whole run, if all further steps take `step_seconds`."""
        steps = range(self.record.step + 1, self.schedule.last_step + 1)
        evaluations = sum(self.schedule.evaluation_after(step) is not None for step in steps)
        seconds = time.time() - self._started + len(steps) * step_seconds
        if self.record.evaluations:
            mean_seconds = self.clock.totals["eval"] / len(self.record.evaluations)
            seconds += evaluations * mean_seconds
        return seconds

    def _push_is_due(self, step: int) -> bool:
        """Returns whether the model after `step` goes to the hub."""
        # `finish` pushes the model of the last step.
        is_asked_for = isinstance(self.config.hub.push, EveryCheckpoint)
        if not is_asked_for or step == self.schedule.last_step:
            return False
        return self.schedule.checkpoint_is_due(step)

    def _push(self, state: State, branch: str, *, is_temporary: bool) -> None:
        """Exports the policy with a model card, and queues its push to a branch of the hub.

        Every process calls this function. A step that was pushed before a kill is not pushed again.
        """
        directory = self.workdir / f"export-{self.record.step}"
        push = Push(self.record.step, branch, directory, is_temporary)
        is_done = self.pushes is not None and self.pushes.is_done(push)
        # The first process decides for all, because they export together.
        if collectives.gather_json(is_done)[0]:
            return
        self.export(state)
        if self.pushes is not None:
            self._write_card(directory)
            self.pushes.add(push)

    def _write_card(self, directory: Path) -> None:
        entries = self.config.hub.card
        options = CardOptions(
            workdir=self.workdir,
            dtype=self.config.model.dtype,
            license=entries.license,
            tags=entries.tags,
            language=entries.language,
        )
        record = self.record
        card = make_card(self.config, record.step, record.evaluations, self.base, options)
        write_atomic(directory / "README.md", str(card))

    def _finish_pushes(self, check_stop: StopCheck) -> JsonObject | None:
        """Waits for the pushes of a finished run; returns their summary.

        Every process calls this function. The wait ends early on a signal, or after
        hub.push.minutes.
        """
        settings = self.config.hub.push
        if settings is None:
            return None
        deadline = time.monotonic() + 60 * settings.minutes
        try:
            while True:
                # Only the first process has pushes. All processes stay in the loop until it is
                # done.
                is_over = False
                if self.pushes is not None:
                    is_over = self.pushes.wait(PUSH_POLL_SECONDS) or time.monotonic() > deadline
                if collectives.gather_json(is_over)[0]:
                    break
                check_stop()
        except Interrupted as reason:
            processes.print_once(f"{reason}: the run stops waiting for the hub")
        if self.pushes is None:
            return None
        summary = self.pushes.summary()
        processes.print_once(push_line(summary))
        return summary

    def _stop_if_memory_grows(self, state: State) -> None:
        # All hosts stop if the memory of any host grows.
        reasons = [reason for reason in collectives.gather_json(self._memory.growth) if reason]
        if reasons:
            self.save(state)
            raise UserError(
                f"step {self.record.step}: {reasons[0]}. A checkpoint is saved, and the same "
                "command continues from it: look for code that keeps arrays of every step"
            )

    def _stop_at_remark(self, findings: Sequence[Finding], state: State) -> None:
        """Raises UserError, after saving a checkpoint, if train.stop_on names one of `findings`."""
        if not self._stop_on:
            return
        reasons = [str(finding) for finding in findings if finding.name in self._stop_on]
        # Times differ between hosts, so the first host decides for all.
        if reasons := collectives.gather_json(reasons)[0]:
            self.save(state)
            raise UserError(
                f"{reasons[0]} The run ends here, as train.stop_on={self.config.train.stop_on} "
                "asks for; a checkpoint is saved"
            )

    def raise_if_time_is_over(self) -> None:
        """Raises Interrupted on all hosts if train.minutes leaves no room for another step."""
        # A finished run needs no time for another step.
        next_step = self.record.step + 1
        if next_step > self.schedule.last_step:
            return
        has_evaluation = self.schedule.evaluation_after(next_step) is not None
        self.budget.raise_if_over(has_evaluation)

    def finish(self, state: State | None, check_stop: StopCheck = never_stop) -> JsonObject:
        """Saves a checkpoint, exports a run that finished all steps, and writes summary.json.

        `state` is None if the run was stopped before it had a state. Returns the summary. A
        finished run waits for its pushes to the hub, unless `check_stop` raises. Every process
        calls this function.
        """
        export, pushes = None, None
        # A run that was stopped before it had a state has nothing to save.
        if state is not None:
            is_complete = self.record.step >= self.schedule.last_step
            # An interrupted run always saves; a complete one only if its schedule has a final
            # checkpoint.
            if not is_complete or self.schedule.checkpoint_is_due(self.record.step):
                self.save(state)
            if is_complete:
                export = self.export(state)
                if (settings := self.config.hub.push) is not None:
                    self._push(state, settings.revision, is_temporary=False)
                pushes = self._finish_pushes(check_stop)
        self._update_times()
        summary = summarize(
            json.loads(to_json(self.config)), self.config.task.name, self.record, export
        )
        summary["remarks"] = [finding.to_json() for finding in self.doctor.findings]
        if pushes is not None:
            summary["hub"] = pushes
        processes.write_once(self.workdir / "summary.json", json.dumps(summary, indent=1))
        self._callbacks.call("end", self.record.step, summary)
        self.writer.finish(summary)
        for line in closing_lines(
            self.config.name,
            self.workdir,
            self.record,
            self.schedule.last_step,
            has_answers=self._has_answers,
        ):
            processes.print_once(line)
        return summary

    def _report_time(self, phase: str, part: str) -> None:
        """Reports the duration of the last evaluation or checkpoint to the budget."""
        total = self.clock.totals[phase]
        self.budget.add(part, total - self._reported_seconds.get(phase, 0.0))
        self._reported_seconds[phase] = total

    def _update_times(self) -> None:
        self.record.seconds = time.time() - self._started
        self.record.seconds_by_phase = dict(self.clock.totals)
