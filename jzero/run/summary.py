"""summary.json: what a run found and what it cost, in one file."""

import json

from jzero.config import Config, to_json
from jzero.files import JsonObject
from jzero.run.environment import peak_rss_bytes, versions
from jzero.run.record import RunRecord

# The evaluations that every finished RL run has, beside those of single steps.
STAGES = ("before", "after_warm_start", "after")


def summarize(config: Config, record: RunRecord, export: str | None) -> JsonObject:
    """Returns the content of summary.json. `export` is the exported model's directory, if any."""
    return {
        "config": json.loads(to_json(config)),
        "steps": record.step,
        "seconds": record.seconds,
        "seconds_by_phase": record.seconds_by_phase,
        "peak_rss_bytes": peak_rss_bytes(),
        "eval": {config.task.name: _by_stage(record, "eval/accuracy")},
        "eval_greedy": {config.task.name: _by_stage(record, "eval_greedy/accuracy")},
        "eval_all": record.evaluations,
        "export": export,
        "versions": versions(),
    }


def _by_stage(record: RunRecord, metric: str) -> dict[str, float | None]:
    """Returns the metric at every stage; None where the run has no such evaluation."""
    return {stage: record.evaluations.get(stage, {}).get(metric) for stage in STAGES}
