"""The record of a run: what a checkpoint holds besides the training state, and summary.json."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from jzero import json_values
from jzero.errors import shown
from jzero.files import JsonObject
from jzero.run.environment import peak_rss_bytes, versions

MetricsT = TypeVar("MetricsT", bound=Mapping[str, float])

# The evaluations that every finished RL run has, besides those of single steps.
STAGES = ("before", "after_warm_start", "after")
STEP = re.compile(r"step_([0-9]{1,16})")  # the name of an evaluation of a single step
PLACE = "the record of the run:"  # begins the errors
MAX_STEP = 2**53
MAX_SECONDS = 1e12
# The evaluations of a run so far, for pages that follow it; summary.json has them at the end.
EVALUATIONS_FILE = "evaluations.json"


@dataclass
class RunRecord:
    """The progress of a run, the results of its evaluations, and the time it has spent.

    The times include earlier processes of the same run.
    """

    step: int = 0  # the last step included in the state
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> metrics
    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    # The unfinished rollouts of every process, as base64, if rollouts are asynchronous.
    streams: list[str] = field(default_factory=list)
    # {"name", "sha256"} of the frozen base, if the state is an adapter (`training.frozen_base`).
    base: JsonObject = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        values = asdict(self)
        return values | {"eval": values.pop("evaluations")}

    @classmethod
    def from_json(cls, values: JsonObject) -> "RunRecord":
        """Returns the record that `to_json` wrote. Raises ValueError if it is damaged."""
        for name in ("step", "eval", "seconds", "seconds_by_phase"):
            if name not in values:
                raise ValueError(f"the record of the run has no {name}")
        phases = json_values.as_object(values["seconds_by_phase"], f"{PLACE} seconds_by_phase")
        # Records of earlier versions lack the later entries.
        streams = json_values.as_list(values.get("streams", []), f"{PLACE} streams")
        return cls(
            step=json_values.bounded_int(values["step"], 0, MAX_STEP, f"{PLACE} step"),
            evaluations=evaluations_of(values),
            seconds=json_values.bounded_number(
                values["seconds"], 0, MAX_SECONDS, f"{PLACE} seconds"
            ),
            seconds_by_phase={
                name: json_values.bounded_number(seconds, 0, MAX_SECONDS, f"{PLACE} {shown(name)}")
                for name, seconds in phases.items()
            },
            streams=[json_values.as_text(stream, f"{PLACE} streams") for stream in streams],
            base=base_of(values),
        )

    def continue_to(self, last_step: int) -> None:
        """Prepares the record for further steps, up to `last_step`.

        The evaluation "after" the last step of a finished run becomes that of its step.
        """
        if "after" in self.evaluations and self.step < last_step:
            self.evaluations[f"step_{self.step}"] = self.evaluations.pop("after")


def base_of(values: JsonObject) -> JsonObject:
    """Returns the frozen base that a record names. Raises ValueError if the record is damaged."""
    base = values.get("base", {})
    if not isinstance(base, dict):
        raise ValueError(f"the record of the run has base={shown(base)}")
    return base


def evaluations_of(values: JsonObject) -> dict[str, dict[str, float]]:
    """Returns the results of a run's evaluations. Raises ValueError if the record is damaged."""
    evaluations = values.get("eval")
    if not isinstance(evaluations, dict):
        raise ValueError(f"the record of the run has eval={shown(evaluations)}")
    for name, metrics in evaluations.items():
        if not isinstance(metrics, dict):
            raise ValueError(f"the record of the run has {shown(name)}={shown(metrics)}")
        for metric, value in metrics.items():
            json_values.as_number(value, f"{PLACE} {shown(metric)}")
    return in_order(evaluations)


def summarize(settings: JsonObject, task: str, record: RunRecord, export: str | None) -> JsonObject:
    """Returns the content of summary.json.

    settings: the content of config.json. export: the exported model's directory, if any.
    """
    return {
        "config": settings,
        "steps": record.step,
        "seconds": record.seconds,
        "seconds_by_phase": record.seconds_by_phase,
        "peak_rss_bytes": peak_rss_bytes(),
        "eval": {task: _by_stage(record, "eval/accuracy")},
        "eval_greedy": {task: _by_stage(record, "eval_greedy/accuracy")},
        "eval_all": record.evaluations,
        "export": export,
        "versions": versions(),
    }


def step_of(evaluation: str, last_step: int) -> int | None:
    """Returns the step after which an evaluation was made; None before the first step.

    evaluation: its name, such as "before", "step_10", or "after" for the one after `last_step`.
    """
    if evaluation == "after":
        return last_step
    step = STEP.fullmatch(evaluation)
    return int(step[1]) if step else None


def in_order(evaluations: Mapping[str, MetricsT]) -> dict[str, MetricsT]:
    """Returns the evaluations in the order of their steps: before, step_10, after.

    Records of earlier versions have the last evaluation at the place of the first run's last one.
    """

    def place(name: str) -> float:
        step = step_of(name, MAX_STEP)
        if step is not None:
            return step
        return {"before": -2.0, "after_warm_start": -1.0}.get(name, math.inf)

    return dict(sorted(evaluations.items(), key=lambda item: place(item[0])))


def _by_stage(record: RunRecord, metric: str) -> dict[str, float | None]:
    """Returns the metric at every stage; None where the run has no such evaluation."""
    return {stage: record.evaluations.get(stage, {}).get(metric) for stage in STAGES}
