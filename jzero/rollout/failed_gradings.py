"""Handles failed gradings: a line on the terminal, or the end of the run.

A grading fails if the grader or a reward function raises, times out, kills its worker or does not
return a number. A response on which user-defined code failed has no score: its row records the
failure and is excluded from training. A response on which jzero's built-in grader failed scores 0,
because the response itself causes such a failure.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from jzero.errors import UserError
from jzero.hosts import processes
from jzero.types import Grade, Rollout, grade_of

# Above this share of failed gradings, the terminal shows a line.
FAILED_GRADINGS_ALARM = 1e-3
FAILURES = ("error", "timeout", "killed")  # prefixes of the reasons of failed gradings


def failed_grade(rollout: Rollout) -> Grade | None:
    """Returns the first failed grade of the rollout's turns, or None."""
    for turn in rollout.turns:
        grade = grade_of(turn)
        if grade.failed or grade.reason.startswith(FAILURES):
            return grade
    return None


def check_gradings(
    where: str,
    rollouts: Sequence[Rollout],
    max_failed_share: float,
    spared: Collection[str] = (),
) -> None:
    """Prints a line if many gradings failed, and raises UserError if too many did.

    `where` names the gradings, such as "step 3". Failures of the functions in `spared` do not stop
    the run: in an evaluation the verdict of the grader stands without them.
    """
    failures = [grade for grade in map(failed_grade, rollouts) if grade is not None]
    if len(failures) <= FAILED_GRADINGS_ALARM * len(rollouts):
        return
    reason, count = Counter(grade.reason for grade in failures).most_common(1)[0]
    summary = (
        f"{where}: {len(failures)} of {len(rollouts)} gradings failed, "
        f"{count} of them with: {reason}"
    )
    # A run with a broken reward function would learn nothing, so it stops beyond
    # `task.max_failed_share`.
    decisive = sum(grade.failed_function not in spared for grade in failures)
    if decisive > max_failed_share * len(rollouts):
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
