"""The interface between a training step and a distillation teacher.

`jzero.distillation` has the teachers. A teacher scores the sampled tokens of sequences. This module
converts the scores to advantages and metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jzero import algorithms
from jzero.algorithms import Distillation
from jzero.model import qwen
from jzero.types import Rollout, State

if TYPE_CHECKING:
    from jzero.training.step import Minibatch


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's scores of the S sequences of an RL step."""

    # f32[T] for each sequence: log-probability of every sampled token; other places are not read.
    logps: list[np.ndarray]
    # bool[S] False for sequences that are not scored: they are not packed, or the teacher's prompt
    # is too long.
    is_scored: np.ndarray


class Teacher(Protocol):
    """Scores sequences for distillation."""

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence["Minibatch"],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Scores the packed sequences of an RL step, before its first optimizer step.

        `state` is the policy's State. `reference` has the parameters of the reference policy, or is
        None without a reference. Every process must call this method.
        """
        ...


def credit_of_teacher(
    scores: TeacherScores,
    old_logps: Sequence[np.ndarray],
    sequences: Sequence[Rollout],
    part: Distillation,
) -> list[np.ndarray]:
    """Returns the teacher's additions to the advantages: f32[T] for each sequence.

    They are 0 for tokens that were not sampled and for sequences that the teacher did not score.
    `old_logps` has the log-probs under the old policy, f32[T] for each sequence.
    """
    credit = []
    for number, sequence in enumerate(sequences):
        advantages = np.zeros(len(sequence.tokens), np.float32)
        if scores.is_scored[number]:
            sampled = sequence.tokens.sampled
            advantages[sampled] = algorithms.teacher_advantages(
                old_logps[number][sampled], scores.logps[number][sampled], part
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

    `packed` has the indices of the sequences for the teacher to score. Means are over the sampled
    tokens of the sequences that the teacher scored. Without such tokens the means are missing.
    """
    scored = [index for index in packed if scores.is_scored[index]]
    metrics = {}
    if packed:
        metrics["distill/dropped"] = 1 - len(scored) / len(packed)
    if scored:
        teacher = np.concatenate([scores.logps[i][sequences[i].tokens.sampled] for i in scored])
        old = np.concatenate([old_logps[i][sequences[i].tokens.sampled] for i in scored])
        # The estimator k1 of KL(policy || teacher): the policy sampled the tokens.
        metrics["distill/kl"] = float(np.mean(old - teacher, dtype=np.float64))
        metrics["distill/teacher_nll"] = -float(np.mean(teacher, dtype=np.float64))
    return metrics
