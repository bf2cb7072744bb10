"""What runs share: the model they start from, and their workdir, with what they write and go on from after a kill."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jzero import config
from jzero.config import to_json
from jzero.distributed import collectives, processes
from jzero.errors import UserError
from jzero.run import checkpoint, metrics
from jzero.run.base_model import BaseModel, export_model
from jzero.run.clock import Clock, compilations
from jzero.run.environment import peak_rss_bytes, versions
from jzero.run.workdir import check_workdir
from jzero.types import State


def check_run(config: config.Config, workdir: Path) -> None:
    """Raises ValueError where the run cannot write to, or is not the one of, the workdir. Writes nothing."""
    there = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"workdir {workdir}: {there} is not a directory that can be written to")
    if (workdir / "config.json").exists():
        check_workdir(workdir, to_json(config))


class RunSession:
    """From the start of a process to its end; `host` is what checkpoints hold beside the state, plain JSON values."""

    def __init__(
        self, config: config.Config, workdir: Path, base: BaseModel, clock: Clock, last: int
    ):
        self.config, self.workdir, self.base, self.clock, self.last = (
            config,
            workdir,
            base,
            clock,
            last,
        )
        self.started = time.time()
        self.carried: Callable[[], dict[str, Any]] = dict  # what else a checkpoint holds as host
        check_workdir(
            workdir, to_json(config)
        )  # the first thing written: what is refused leaves nothing
        processes.write_once(workdir / "versions.json", json.dumps(versions(), indent=1))
        collectives.check_shared(workdir / "versions.json")
        self.saved = checkpoint.Checkpoints(workdir, config.train.keep_checkpoints)
        self.latest = self.saved.latest()
        self.writer = metrics.MetricsWriter(
            workdir if processes.is_first_process() else None,
            self.latest,
            config.train.wandb_project,
        )
        self.compiled = compilations()
        self.host: dict[str, Any] = {"step": 0, "eval": {}}

    def restore(self, like: State) -> State:
        """The state of the latest checkpoint, there is one."""
        assert self.latest is not None
        state, self.host = self.saved.restore(self.latest, like)
        self.started -= self.host["seconds"]
        for phase, seconds in self.host["seconds_by_phase"].items():
            self.clock.totals[phase] += seconds
        processes.print_once(f"resumed {self.workdir} at step {self.latest}")
        return state

    def save(self, state: State, wait: bool = True) -> None:
        with self.clock("checkpoint"):
            self.host |= self.carried()
            self.saved.save(self.host["step"], state, self.host | self.spent(), wait=wait)

    def spent(self) -> dict[str, Any]:
        """Time of this run so far, earlier processes included."""
        return {"seconds": time.time() - self.started, "seconds_by_phase": dict(self.clock.totals)}

    def steps(self, name: str) -> Iterator[int]:
        """Those that are left, behind a progress bar."""
        self.first = self.host["step"] + 1
        bar = {"desc": name, "mininterval": 1, "disable": not processes.is_first_process()}
        for step in tqdm(
            range(self.first, self.last + 1), initial=self.first - 1, total=self.last, **bar
        ):
            self.clock.pop()
            self.compiled()
            self.begin = time.perf_counter()
            yield step

    def measured(self, step: int) -> dict[str, float]:
        """Seconds by phase and compilations since the step began."""
        values = (
            self.clock.pop() | {"time/step": time.perf_counter() - self.begin} | self.compiled()
        )
        if step > self.first + 1 and values["compile/seconds"] > 1:
            processes.print_once(
                f"step {step}: {values['compile/programs']:.0f} programs compiled: shapes are still new"
            )
        return values

    def evaluated(self, name: str, values: dict[str, float]) -> dict[str, float]:
        self.host["eval"][name] = values
        processes.print_once(
            f"eval {name}: " + "  ".join(f"{k} {v:.3f}" for k, v in values.items())
        )
        return values

    def label(self, step: int) -> str | None:
        """The name of the evaluation that is due after the step."""
        every = self.config.eval.every
        return (
            "after"
            if step == self.last
            else f"step_{step}"
            if every and step % every == 0
            else None
        )

    def end(self, step: int, values: dict[str, float], state: State) -> None:
        """What follows a step that led to `state`."""
        train, self.host["step"] = self.config.train, step
        self.writer.write(step, values)
        processes.print_once(metrics.step_line(step, self.last, values))
        if train.export_every and step % train.export_every == 0:  # before its checkpoint
            self.export(state)
        if step == self.last or step % train.checkpoint_every == 0:
            self.save(state, wait=False)

    def export(self, state: State) -> str:
        with self.clock("export"):
            directory, dtype = self.workdir / f"export-{self.host['step']}", self.config.model.dtype
            return export_model(directory, self.base, self.config.rollout, state.params, dtype)

    def close(self) -> None:
        self.saved.close()
        self.writer.close()

    def finish(self, state: State | None) -> dict[str, Any]:
        """The last checkpoint and, where every step was made, the export; returns what summary.json holds."""
        exported = None
        if state is not None:
            self.save(state)
            exported = self.export(state) if self.host["step"] >= self.last else None
        names = ("before", "after_warm_start", "after")
        pick = lambda metric: {name: self.host["eval"].get(name, {}).get(metric) for name in names}
        summary = {
            "config": json.loads(to_json(self.config)),
            "steps": self.host["step"],
            **self.spent(),
            "peak_rss_bytes": peak_rss_bytes(),
            "eval": {self.config.task.name: pick("eval/accuracy")},
            "eval_greedy": {self.config.task.name: pick("eval_greedy/accuracy")},
            "eval_all": self.host["eval"],
            "export": exported,
            "versions": versions(),
        }
        processes.write_once(self.workdir / "summary.json", json.dumps(summary, indent=1))
        return summary
