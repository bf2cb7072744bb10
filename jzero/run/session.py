"""A run in its workdir, from the start of a process to its end.

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

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from jzero.config import Config, to_json
from jzero.distributed import collectives, processes
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import adapters, huggingface
from jzero.run.base_model import BaseModel
from jzero.run.budget import TimeBudget
from jzero.run.checkpoint import Checkpoints
from jzero.run.clock import Clock
from jzero.run.environment import versions
from jzero.run.export_model import export_model
from jzero.run.frozen_base import base_directory
from jzero.run.history import history_of
from jzero.run.lock import lock_directory
from jzero.run.memory import MemoryWatch
from jzero.run.metrics import step_line
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.progress import Progress
from jzero.run.record import RunRecord
from jzero.run.resume import go_back
from jzero.run.schedule import Schedule
from jzero.run.summary import summarize
from jzero.run.workdir import check_history, claim_workdir
from jzero.types import State


class RunSession:
    """Owns the files of a run, checkpoints and metrics, until `close`, and the record of the run.

    `record` is what every checkpoint holds beside the state. What is due after a step is decided by
    `schedule`, and the time of a step is measured by `Progress`.
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
    ) -> None:
        """Claims `workdir` and opens its files.

        `stream_states` returns the unfinished rollouts of every process, as text. It is called by
        every process whenever a checkpoint is saved. `budget` has been running since the process
        began to work on the run. `planned_bytes` is what the planner counted for a device.
        """
        self.config = config
        self.workdir = workdir
        self.base = base
        self.clock = clock
        self.schedule = Schedule.from_config(config, last_step)
        self.record = RunRecord()
        self._stream_states = stream_states
        self._started = time.time()
        self.budget = budget or TimeBudget(config.train.minutes)
        self._noted: dict[str, float] = {}  # seconds of a phase that the budget knows of
        self._memory = MemoryWatch(config.memory, planned_bytes)

        # A second process on the same host would write into the same files. Only the first
        # process of a run locks, because the others share the workdir with it.
        with ExitStack() as cleanup:
            if processes.is_first_process():
                cleanup.enter_context(lock_directory(workdir, f"--workdir {workdir}"))

            # A run that is refused changes no file of the run that is there.
            check_history(workdir, config.train.checkpoint_every)
            go_back(workdir, config.train)
            claim_workdir(workdir, to_json(config))
            self._cleanup = cleanup.pop_all()
        processes.write_once(workdir / "versions.json", json.dumps(versions(), indent=1))
        collectives.check_shared(workdir / "versions.json")

        self.checkpoints = Checkpoints(workdir, config.train.keep_checkpoints)
        self.resume_step = self.checkpoints.latest()  # None: a run from its start
        self.writer = MetricsWriter(
            workdir if processes.is_first_process() else None,
            self.resume_step,
            config.train.wandb_project,
            config.train.wandb_entity,
            config.train.wandb_group,
            config.train.wandb_name,
        )

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and closes the files."""
        self.checkpoints.close()
        self.writer.close()
        self._cleanup.close()

    # -- State -------------------------------------------------------------------------------------

    def restore(self, state_like: State) -> State:
        """Reads the state and the record of the checkpoint `resume_step`.

        `state_like` has the shapes, types and shardings of the state's leaves.
        """
        assert self.resume_step is not None, "there is no checkpoint to restore"
        state, record = self.checkpoints.restore(self.resume_step, state_like)
        try:
            self.record = RunRecord.from_json(record)
        except ValueError as error:
            raise self.checkpoints.damaged(self.resume_step, error) from None
        self._started -= self.record.seconds
        for phase, seconds in self.record.seconds_by_phase.items():
            self.clock.totals[phase] += seconds
        self._noted = dict(self.clock.totals)
        processes.print_once(f"resumed {self.workdir} at step {self.resume_step}")
        return state

    def save(self, state: State, *, wait: bool = True) -> None:
        """Saves a checkpoint of `state` and the record under the record's step."""
        with self.clock("checkpoint"):
            self.record.streams = self._stream_states()
            self._update_times()
            self.checkpoints.save(self.record.step, state, self.record.to_json(), wait=wait)
        self._note_time("checkpoint", "checkpoint")

    def export(self, state: State) -> str:
        """Exports the policy to `export-<step>`; returns the directory."""
        model = self.config.model
        read_original = None
        if model.is_base_quantized:
            # Exports have the weights as they were before they were quantized.
            directory = base_directory(self.config, self.base, self.workdir)
            read_original = huggingface.reader(directory, self.base.model, model.dtype)
        with self.clock("export"):
            return export_model(
                self.workdir / f"export-{self.record.step}",
                self.base,
                self.config.rollout,
                adapters.whole(state.base, state.params, model.adapter.scale),
                model.dtype,
                history_of(self.config, self.record.step, self.base.directory),
                read_original,
            )

    # -- Steps -------------------------------------------------------------------------------------

    def progress(self, label: str) -> Progress:
        """Returns the steps that are left, to iterate over behind a progress bar called `label`."""
        return Progress(label, self.record.step + 1, self.schedule.last_step, self.clock)

    def record_evaluation(self, name: str, values: dict[str, float]) -> None:
        """Keeps the metrics of an evaluation for the summary, and prints them."""
        self.record.evaluations[name] = values
        self._note_time("eval", "evaluation")
        shown = "  ".join(f"{metric} {value:.3f}" for metric, value in values.items())
        processes.print_once(f"eval {name}: {shown}")

    def end_step(self, step: int, values: dict[str, float], state: State) -> None:
        """Writes the metrics of `step`, then exports and saves `state` if either is due.

        Raises UserError, after a checkpoint, if the memory of the devices grows step by step.
        """
        self.record.step = step
        self.budget.add("step", values["time/step"])
        values = values | self._memory.step_metrics()
        self.writer.write(step, values)
        processes.print_once(step_line(step, self.schedule.last_step, values))
        # The export comes first: a kill between the two repeats the step and skips the export that
        # is there. In the other order it would be missing forever.
        if self.schedule.export_is_due(step):
            self.export(state)
        if self.schedule.checkpoint_is_due(step):
            self.save(state, wait=False)
        self._stop_if_memory_grows(state)

    def _stop_if_memory_grows(self, state: State) -> None:
        reasons = [reason for reason in collectives.gather_json(self._memory.growth) if reason]
        if reasons:
            self.save(state)
            raise UserError(
                f"step {self.record.step}: {reasons[0]}. A checkpoint is saved, and the same "
                "command goes on from it; memory.max_growth=0 lets the arrays grow"
            )

    def raise_if_time_is_over(self) -> None:
        """Raises Interrupted on all hosts if train.minutes has no room for another step."""
        next_step = self.record.step + 1
        if next_step > self.schedule.last_step:
            return
        has_evaluation = self.schedule.evaluation_after(next_step) is not None
        self.budget.raise_if_over(has_evaluation)

    def finish(self, state: State | None) -> JsonObject:
        """Saves the last checkpoint, exports a run that made all steps, and writes summary.json.

        `state` is None if the run was stopped before it had a state. Returns the summary.
        """
        export = None
        if state is not None:
            self.save(state)
            if self.record.step >= self.schedule.last_step:
                export = self.export(state)
        self._update_times()
        summary = summarize(self.config, self.record, export)
        processes.write_once(self.workdir / "summary.json", json.dumps(summary, indent=1))
        return summary

    def _note_time(self, phase: str, part: str) -> None:
        """Tells the budget how long the last evaluation or checkpoint took."""
        total = self.clock.totals[phase]
        self.budget.add(part, total - self._noted.get(phase, 0.0))
        self._noted[phase] = total

    def _update_times(self) -> None:
        self.record.seconds = time.time() - self._started
        self.record.seconds_by_phase = dict(self.clock.totals)
