"""Grades rollouts of samplers again: the trainer a random share of them, `jzero.replay` all.

The tokens of a rollout can be sampled again later, but a forged grade trains the policy at once. So
the trainer grades rollouts itself while the run goes on, chosen with a key that no sampler knows,
and refuses a result with another grade.

That needs a grader that is a function of the response. `obstacle` names the gradings that are not:
the answers of a model, and steps of an environment. User-defined reward functions count as
functions until the trainer's own gradings of one response differ.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jzero import terminal
from jzero.jobs.sealed import BadResultError
from jzero.rollout.failed_gradings import FAILURES
from jzero.rollout.sampler import Sampler
from jzero.rollout.turns import request_of_turn
from jzero.types import Grade, Problem, Rollout, grade_of
from jzero.workers.judge import JUDGE
from jzero.workers.pipe import TurnRequest

# Further gradings of a response before its sampler is blamed: functions that are not deterministic
# rarely agree with themselves so often.
CONFIRMATIONS = 15
MAX_FAILED = 4  # failed gradings of a result that are repeated besides the share
TOLERANCE = 1e-6  # relative: processors round the numbers of reward functions differently


class FailedThereError(BadResultError):
    """A grading that failed on the sampler and succeeds here, which a busy machine may explain."""


class _GradedTurn(NamedTuple):
    """A turn of a sampler's rollout, with the request to grade it."""

    rollout: int  # number in the result
    grade: Grade  # the sampler's
    request: TurnRequest


def obstacle(request: TurnRequest) -> str:
    """Returns why a turn cannot be graded again with the same grade, "" if it can."""
    if JUDGE in request.task.reward.functions:
        return "the reward judge is a model"
    if request.episode:
        return "an environment or its tools have a state"
    return ""


def obstacle_of(problem: Problem, sampler: Sampler) -> str:
    """Returns why the responses to a problem cannot be graded again, "" if they can."""
    max_turns = sampler.engine.settings.max_turns
    return obstacle(request_of_turn(problem, 0, "", (), sampler.task, max_turns))


def is_failure(grade: Grade) -> bool:
    """Returns whether a grading failed, as `failed_gradings.failed_grade` counts it."""
    return grade.failed or grade.reason.startswith(FAILURES)


def grade_difference(logged: Grade, again: Grade) -> str:
    """Returns how two grades of one response differ, "" if they do not. Seconds do not count."""
    for name in ("correct", "failed"):
        ours, theirs = getattr(again, name), getattr(logged, name)
        if ours != theirs:
            return f"{name} was {theirs}, and is {ours} now"
    if not is_close(logged.score, again.score):
        return f"the score was {logged.score:g}, and is {again.score:g} now"
    if logged.parts.keys() != again.parts.keys():
        return "the names of its rewards differ"
    for name, value in logged.parts.items():
        if not is_close(value, again.parts[name]):
            return f"the reward {name} was {value:g}, and is {again.parts[name]:g} now"
    return ""


def is_close(first: float, second: float) -> bool:
    """Returns whether two scores are equal up to rounding."""
    return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@dataclass
class Regrader:
    """Checks grades of samplers in the trainer."""

    sampler: Sampler
    share: float  # rollout.placement.regrade_share
    key: str  # that samplers do not know
    reported: set[str] = field(default_factory=set)  # why gradings are not checked
    has_functions: bool = True  # whether gradings repeat, as far as it has been seen

    def check(self, digest: str, rollouts: Sequence[Rollout]) -> None:
        """Grades some rollouts of a result again.

        digest: of the result.

        Raises:
            BadResultError: a grade differs.
            FailedThereError: a grading failed on the sampler, and succeeds here.
        """
        if not self.has_functions:
            return
        turns: list[_GradedTurn] = []
        for number in self._chosen(digest, rollouts):
            turns += self._turns(number, rollouts[number])
        again = self._grade([turn.request for turn in turns])
        for turn, grade in zip(turns, again, strict=True):
            self._compare(turn, grade)

    def _chosen(self, digest: str, rollouts: Sequence[Rollout]) -> list[int]:
        """Returns the numbers of the rollouts to grade: the same ones after a restart."""
        order: list[int] = []
        for number in range(len(rollouts)):
            text = f"{self.key}/{digest}/{number}"
            order.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        chosen = [number for number, place in enumerate(order) if place < self.share * 2**64]
        # Failed gradings drop rollouts from training, and end the run if there are many.
        failed = [
            number
            for number, rollout in enumerate(rollouts)
            if any(is_failure(grade_of(turn)) for turn in rollout.turns)
        ]
        if self.share:
            chosen += sorted(failed, key=order.__getitem__)[:MAX_FAILED]
        return sorted(set(chosen))

    def _turns(self, number: int, rollout: Rollout) -> list[_GradedTurn]:
        """Returns the turns of a rollout that can be graded again."""
        graded: list[_GradedTurn] = []
        texts = [(turn.text, turn.grade) for turn in rollout.turns]
        max_turns = self.sampler.engine.settings.max_turns
        for place, turn in enumerate(rollout.turns):
            request = request_of_turn(
                rollout.problem,
                rollout.sample_index,
                turn.text,
                texts[:place],
                self.sampler.task,
                max_turns,
            )
            if reason := obstacle(request):
                self._report(reason)
                return []
            graded.append(_GradedTurn(number, grade_of(turn), request))
        return graded

    def _compare(self, turn: _GradedTurn, grade: Grade) -> None:
        """Raises BadResultError if the trainer's grade of a turn differs from the sampler's."""
        # This machine may be too busy for the limits.
        if not self.has_functions or is_failure(grade):
            return
        difference = grade_difference(turn.grade, grade)
        if not difference:
            return
        for other in self._grade([turn.request] * CONFIRMATIONS):
            if is_failure(other):
                return
            if grade_difference(grade, other):
                self.has_functions = False
                self._report("a response has got different grades in the trainer")
                return
        message = f"rollout {turn.rollout}: graded again, {difference}"
        raise (FailedThereError if is_failure(turn.grade) else BadResultError)(message)

    def _grade(self, requests: Sequence[TurnRequest]) -> list[Grade]:
        """Returns the grades of turns. The counters of the pool are those of the samplers."""
        pool = self.sampler.pool
        counters = dict(pool.counters)
        mark = object()
        for number, request in enumerate(requests):
            pool.step((mark, number), request)
        grades: dict[int, Grade] = {}
        while len(grades) < len(requests):
            for key, grade in pool.poll(wait=True):
                # A stopped evaluation may have left responses in the pool.
                if isinstance(key, tuple) and key[0] is mark:
                    grades[key[1]] = grade
        pool.counters.update(counters)
        return [grades[number] for number in range(len(requests))]

    def _report(self, reason: str) -> None:
        """Prints once why grades are not checked."""
        if reason not in self.reported:
            self.reported.add(reason)
            terminal.say(
                f"rollout.placement.regrade_share={self.share:g}: grades of samplers are not "
                f"checked, because {reason}"
            )
