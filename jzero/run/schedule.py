"""Which evaluation, export and checkpoint is due after a step."""

from dataclasses import dataclass

from jzero.config import Config


@dataclass(frozen=True)
class Schedule:
    """The steps of a run, and how often it evaluates, exports and saves. 0 means never."""

    last_step: int  # steps are counted from 1
    evaluate_every: int
    export_every: int
    checkpoint_every: int

    @classmethod
    def from_config(cls, config: Config, last_step: int) -> "Schedule":
        return cls(
            last_step=last_step,
            evaluate_every=config.eval.every,
            export_every=config.train.export_every,
            checkpoint_every=config.train.checkpoint_every,
        )

    def evaluation_after(self, step: int) -> str | None:
        """Returns the name of the evaluation that is due after `step`, or None.

        The evaluation after the last step is always due and is called "after".
        """
        if step == self.last_step:
            return "after"
        return f"step_{step}" if _is_multiple(step, self.evaluate_every) else None

    def export_is_due(self, step: int) -> bool:
        """Says whether the model is exported after `step`, besides the export of a finished run."""
        return _is_multiple(step, self.export_every)

    def checkpoint_is_due(self, step: int) -> bool:
        return step == self.last_step or _is_multiple(step, self.checkpoint_every)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
