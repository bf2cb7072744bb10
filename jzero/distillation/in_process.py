"""Teachers that are models on the training mesh, with the policy's sharding.

    kind=model       the model at teacher.path, with the adapter at teacher.adapter, frozen and in
                     model.dtype
    kind=policy      the policy's weights before the step's update
    kind=reference   the weights of the reference policy

A teacher runs training's score program, like the reference policy, at the temperature of the
rollouts. By default it reads the rows of the update. With teacher.prompt it reads rows that are
packed in the same way from the teacher's prompts. It has no gradient and no optimizer.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from jax.sharding import Mesh

from jzero.config import AdapterConfig, ModelConfig, RolloutConfig, TrainConfig, teachers
from jzero.distillation.prompts import TeacherPrompts
from jzero.model import adapters, qwen
from jzero.tokens import Tokens
from jzero.training.learner import Learner, fetch_rows, policy_learner, scored_fields
from jzero.training.packing import PackedBatch, TrainingSequence, pack
from jzero.training.step import Minibatch
from jzero.training.teacher import TeacherScores
from jzero.training.trainer import RowShapes, Trainer, row_shapes
from jzero.types import Rollout, State

Item = TypeVar("Item")

# (the policy's State, the reference policy or None) -> parameters of a full model
Weights = Callable[[State, qwen.Params | None], qwen.Params]


class TeacherArrays(NamedTuple):
    """The arrays of teacher=model on the training mesh, in model.dtype."""

    model: qwen.QwenConfig
    # A full model, or the frozen base of the adapter. None: the frozen base of the policy.
    base: qwen.Params | None
    adapter: qwen.Params | None = None
    scale: float = 1.0  # of the adapter

    def join(self, base: qwen.Params) -> qwen.Params:
        """Returns the parameters of the teacher on a base."""
        if self.adapter is None:
            return base
        return adapters.join(base, self.adapter, self.scale)


@dataclass(frozen=True)
class ModelTeacher:
    """A teacher on the training mesh."""

    trainer: Trainer
    learner: Learner  # its program `score` computes the log-probs
    weights: Weights
    prompts: TeacherPrompts | None = None  # None: the teacher reads the policy's prompts
    own_rows: RowShapes | None = None  # shapes of the rows with the teacher's prompts

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence[Minibatch],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Returns the log-probs of the sampled tokens of all packed sequences."""
        # All scores are computed with the weights before the step's first optimizer step.
        params = self.weights(state, reference)
        scores = TeacherScores(
            logps=[np.zeros(len(sequence.tokens), np.float32) for sequence in sequences],
            is_scored=np.zeros(len(sequences), bool),
        )
        for minibatch in minibatches:
            if self.prompts is None:
                self._score_update_rows(params, minibatch, scores)
            else:
                self._score_prompted_rows(params, minibatch, sequences, scores)
        return scores

    def _score_update_rows(
        self,
        params: qwen.Params,
        minibatch: Minibatch,
        scores: TeacherScores,
    ) -> None:
        # The update's rows are already on the mesh.
        rows = self.learner.score(params, minibatch.batches, minibatch.counts, self.trainer.layouts)
        minibatch.copy_rows(rows, scores.logps)
        scores.is_scored[minibatch.chosen] = True

    def _score_prompted_rows(
        self,
        params: qwen.Params,
        minibatch: Minibatch,
        sequences: Sequence[Rollout],
        scores: TeacherScores,
    ) -> None:
        """Packs the sequences of a minibatch with the teacher's prompts, and scores them."""
        assert self.prompts is not None, "the teacher has no prompts of its own"
        assert self.own_rows is not None, "a teacher with prompts has rows of its own"
        indices: list[int] = []
        texts: list[TrainingSequence] = []
        for index in minibatch.chosen:
            prompted = self.prompts.sequence_of(sequences[index])
            if prompted is not None:
                indices.append(index)
                texts.append(scored_sequence(*prompted))
        if not indices:
            return

        # Sequences of one problem have the same prompt and can share it in a row.
        groups = group_by([sequences[index].problem.id for index in indices], texts)
        packed = pack(groups, *self.own_rows)
        batches, counts = self.learner.put([only_scored(part) for part in packed])
        rows = self.learner.score(params, batches, counts, self.own_rows.layouts)
        logps = [np.zeros(len(text.tokens), np.float32) for text in texts]
        fetch_rows(packed, rows, logps)
        # The teacher's sequence has another prompt, followed by the same tokens.
        for index, text, values in zip(indices, texts, logps, strict=True):
            prompt_length = sequences[index].prompt_length
            scores.logps[index][prompt_length:] = values[text.prompt_length :]
        scores.is_scored[indices] = True


def only_scored(packed: PackedBatch) -> PackedBatch:
    """Returns packed rows with only the fields that a score reads."""
    [batch] = scored_fields([packed.batch])
    return replace(packed, batch=batch)


def group_by(keys: Sequence[str], items: Sequence[Item]) -> list[list[Item]]:
    """Groups neighboring items with the same key."""
    pairs = zip(keys, items, strict=True)
    return [
        [item for _, item in group] for _, group in itertools.groupby(pairs, operator.itemgetter(0))
    ]


def scored_sequence(tokens: np.ndarray, prompt_length: int) -> TrainingSequence:
    """Returns a sequence for packing and scoring, with weights and sampler log-probs of 0."""
    zeros = np.zeros(len(tokens), np.float32)
    return TrainingSequence(Tokens(tokens), prompt_length, weights=zeros)


# -- what the planner needs of a teacher as well ---------------------------------------------------


@dataclass(frozen=True)
class TeacherSettings:
    """The teacher of a run, and the settings of the policy that it depends on."""

    choice: teachers.Model | teachers.Policy | teachers.Reference | teachers.Server
    policy: ModelConfig
    rollout: RolloutConfig
    train: TrainConfig
    is_base_frozen: bool  # the policy trains an adapter, and no step changes the adapter's base

    @property
    def max_prompt_tokens(self) -> int:
        """The maximum number of tokens of the teacher's prompt."""
        if not self.choice.prompt:
            return self.rollout.max_prompt_tokens
        return self.choice.max_prompt_tokens or 2 * self.rollout.max_prompt_tokens

    @property
    def shares_base(self) -> bool:
        """Whether the teacher is an adapter on the frozen base of the policy."""
        if not isinstance(self.choice, teachers.Model) or not self.choice.adapter:
            return False
        return self.is_base_frozen and self.choice.path in ("", self.policy.path)


def teacher_learner(model: qwen.QwenConfig, trainer: Trainer) -> Learner:
    """Returns a learner to run the score program of a teacher with architecture `model`."""
    # The teacher is not trained, so the learner needs no adapter: the compute settings have the
    # policy's.
    policy = trainer.policy
    compute = replace(policy.compute, adapter=AdapterConfig())
    return policy_learner(model, compute, policy.settings, trainer.objective, policy.mesh)


def own_row_shapes(settings: TeacherSettings, mesh: Mesh) -> RowShapes | None:
    """Returns the shapes of rows with the teacher's prompts, or None without teacher.prompt."""
    if not settings.choice.prompt:
        return None
    return row_shapes(settings.train, settings.rollout, mesh, settings.max_prompt_tokens)
