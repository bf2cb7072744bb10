"""What a step of training asks a teacher, whatever the teacher is.

`jzero.distillation` has the teachers. A teacher scores the sampled tokens of sequences; here its
answers become advantages and metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jzero import algorithms
from jzero.algorithms import Algorithm
from jzero.model import qwen
from jzero.types import Rollout, State

if TYPE_CHECKING:
    from jzero.training.step import Minibatch


@dataclass(frozen=True)
class TeacherScores:
    """What a teacher says about the S sequences of an RL step."""

    # f32[T] for each sequence: log-probability of every sampled token; other places are not read.
    logps: list[np.ndarray]
    # bool[S] False where nothing was asked: the sequence is not packed, or what the teacher would
    # have to read is too long.
    is_scored: np.ndarray


class Teacher(Protocol):
    """Whatever can score sequences."""

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence["Minibatch"],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Scores the packed sequences of an RL step, before its first optimizer step.

        `state` is the policy's, and `reference` are the parameters of the reference policy, None if
        there is none. Every process calls this method.
        """
        ...


def credit_of_teacher(
    scores: TeacherScores,
    old_logps: Sequence[np.ndarray],
    sequences: Sequence[Rollout],
    algorithm: Algorithm,
) -> list[np.ndarray]:
    """Returns what the teacher adds to the advantages: f32[T] for each sequence.

    It is 0 where a token was not sampled, and in sequences that the teacher has not scored.
    `old_logps` are the old policy's log-probs, f32[T] for each sequence.
    """
    credit = []
    for number, sequence in enumerate(sequences):
        advantages = np.zeros(len(sequence.tokens), np.float32)
        if scores.is_scored[number]:
            sampled = sequence.sampled
            advantages[sampled] = algorithms.teacher_advantages(
                old_logps[number][sampled], scores.logps[number][sampled], algorithm
            )
        credit.append(advantages)
    return credit


def teacher_metrics(
    scores: TeacherScores,
    old_logps: Sequence[np.ndarray],
    sequences: Sequence[Rollout],
    packed: Sequence[int],
) -> dict[str, float]:
    """Returns the metrics of a teacher's scores.

    `packed` are the indices of the sequences that the teacher was to score. Means are over their
    sampled tokens, as far as the teacher has scored them; without such a token there are none.
    """
    scored = [index for index in packed if scores.is_scored[index]]
    metrics = {}
    if packed:
        metrics["distill/dropped"] = 1 - len(scored) / len(packed)
    if scored:
        teacher = np.concatenate([scores.logps[i][sequences[i].sampled] for i in scored])
        old = np.concatenate([old_logps[i][sequences[i].sampled] for i in scored])
        metrics["distill/kl"] = float(np.mean(old - teacher, dtype=np.float64))
        metrics["distill/teacher_nll"] = -float(np.mean(teacher, dtype=np.float64))
    return metrics
