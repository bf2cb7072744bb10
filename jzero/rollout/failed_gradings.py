"""What happens where gradings fail: a line on the terminal, or the end of the run.

A grading fails if the grader or a reward function raises, times out, ends its worker or returns no
number. A response on which code of the user's failed has no score: its row is kept and says so, and
nothing is trained on it. A response on which jzero's own grader failed scores 0, because it is the
response that makes such a grader fail.
"""

from collections import Counter
from collections.abc import Sequence

from jzero.distributed import processes
from jzero.errors import UserError
from jzero.types import Grade, Rollout, grade_of

# If a larger share of gradings fails, the terminal shows a line.
FAILED_GRADINGS_ALARM = 1e-3
FAILURES = ("error", "timeout", "killed")  # how the reason of a failed grading begins


def failed_grade(rollout: Rollout) -> Grade | None:
    """Returns the first grade of the rollout's turns that failed, None if none did."""
    for turn in rollout.turns:
        grade = grade_of(turn)
        if grade.failed or grade.reason.startswith(FAILURES):
            return grade
    return None


def check_gradings(where: str, rollouts: Sequence[Rollout], max_failed_share: float) -> None:
    """Prints a line if many gradings failed, and raises UserError if too many did.

    `where` says which gradings these are, such as "step 3". A run whose reward function is broken
    would learn nothing, so it stops beyond `task.max_failed_share`.
    """
    failures = [grade for grade in map(failed_grade, rollouts) if grade is not None]
    if len(failures) <= FAILED_GRADINGS_ALARM * len(rollouts):
        return
    reason, count = Counter(grade.reason for grade in failures).most_common(1)[0]
    summary = (
        f"{where}: {len(failures)} of {len(rollouts)} gradings failed, "
        f"{count} of them with: {reason}"
    )
    if len(failures) > max_failed_share * len(rollouts):
        raise UserError(
            f"{summary}. Mend the grader or the reward function, or raise task.max_failed_share"
        )
    without_score = sum(grade.failed for grade in failures)
    outcomes = []
    if without_score:
        outcomes.append(f"{without_score} have no score and are not trained on")
    if without_score < len(failures):
        outcomes.append(f"{len(failures) - without_score} score 0")
    processes.print_once(f"{summary}. Of these {', '.join(outcomes)}")
