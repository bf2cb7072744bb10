"""The record of a run: what a checkpoint holds beside the training state, as JSON."""

from dataclasses import asdict, dataclass, field

from jzero.errors import shown
from jzero.files import JsonObject

# The types of the entries that every record has.
KINDS = {"step": int, "eval": dict, "seconds": int | float, "seconds_by_phase": dict}


@dataclass
class RunRecord:
    """How far a run is, what its evaluations found, and the time it has spent.

    The times include those of earlier processes of the same run.
    """

    step: int = 0  # the last step that is in the state
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> metrics
    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    # The unfinished rollouts of every process, as base64, where rollouts are asynchronous.
    streams: list[str] = field(default_factory=list)
    # {"name", "sha256"} of the frozen base, where the state is an adapter (`run.frozen_base`).
    base: JsonObject = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        values = asdict(self)
        return values | {"eval": values.pop("evaluations")}

    @classmethod
    def from_json(cls, values: JsonObject) -> "RunRecord":
        """Returns the record that `to_json` wrote. Raises ValueError if it is damaged."""
        for name, kind in KINDS.items():
            if not isinstance(values.get(name), kind):
                raise ValueError(f"the record of the run has {name}={shown(values.get(name))}")
        return cls(
            step=values["step"],
            evaluations=evaluations_of(values),
            seconds=values["seconds"],
            seconds_by_phase=values["seconds_by_phase"],
            streams=values.get("streams", []),
            base=base_of(values),
        )


def base_of(values: JsonObject) -> JsonObject:
    """Returns what a record says of the frozen base. Raises ValueError if the record is damaged."""
    base = values.get("base", {})
    if not isinstance(base, dict):
        raise ValueError(f"the record of the run has base={shown(base)}")
    return base


def evaluations_of(values: JsonObject) -> dict[str, dict[str, float]]:
    """Returns what the evaluations of a run found. Raises ValueError if the record is damaged."""
    evaluations = values.get("eval")
    if not isinstance(evaluations, dict):
        raise ValueError(f"the record of the run has eval={shown(evaluations)}")
    for name, metrics in evaluations.items():
        if not isinstance(metrics, dict):
            raise ValueError(f"the record of the run has {shown(name)}={shown(metrics)}")
    return evaluations
