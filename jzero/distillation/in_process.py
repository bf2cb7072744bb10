"""Teachers that are models on the training mesh, split over it as the policy is.

    kind=model       the model at teacher.path, with the adapter at teacher.adapter, frozen and in
                     the type of the computation
    kind=policy      the policy's own weights before the step's update
    kind=reference   the weights of the reference policy

A teacher runs the score program of training, like the reference policy, at the temperature of the
rollouts. Without a prompt of its own it reads the rows that the update trains on; with one, rows
that are packed in the same way from its own prompts. It has no gradient and no optimizer.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero.config import AdapterConfig, Config
from jzero.distillation.prompts import TeacherPrompts
from jzero.distributed import collectives
from jzero.distributed.mesh import adapter_shardings
from jzero.model import adapters, huggingface, peft, qwen
from jzero.training.learner import Learner, policy_learner, scored_fields
from jzero.training.packing import PackedBatch, TrainingSequence, pack
from jzero.training.step import Minibatch
from jzero.training.teacher import TeacherScores
from jzero.training.trainer import RowShapes, Trainer, row_shapes
from jzero.types import Rollout, State

Item = TypeVar("Item")

# (the policy's State, the reference policy or None) -> parameters of a whole model
Weights = Callable[[State, qwen.Params | None], qwen.Params]


@dataclass(frozen=True)
class ModelTeacher:
    """A teacher on the training mesh."""

    trainer: Trainer
    learner: Learner  # its program `score` computes the log-probs
    weights: Weights
    prompts: TeacherPrompts | None = None  # None: it reads the policy's prompts
    own_rows: RowShapes | None = None  # of the rows with its own prompts

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence[Minibatch],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Returns the log-probs of the sampled tokens of all packed sequences."""
        params = self.weights(state, reference)
        scores = TeacherScores(
            logps=[np.zeros(len(sequence.tokens), np.float32) for sequence in sequences],
            is_scored=np.zeros(len(sequences), bool),
        )
        for minibatch in minibatches:
            if self.prompts is None:
                self._score_rows_of_the_update(params, minibatch, scores)
            else:
                self._score_own_rows(params, minibatch, sequences, scores)
        return scores

    def _score_rows_of_the_update(
        self, params: qwen.Params, minibatch: Minibatch, scores: TeacherScores
    ) -> None:
        """Scores the rows that lie on the mesh already."""
        rows = self.learner.score(params, minibatch.batches, minibatch.counts, self.trainer.layouts)
        chosen = [scores.logps[index] for index in minibatch.chosen]
        for packed, values in zip(minibatch.packed, rows, strict=True):
            packed.from_rows(collectives.fetch_global(values), chosen)
        scores.is_scored[minibatch.chosen] = True

    def _score_own_rows(
        self,
        params: qwen.Params,
        minibatch: Minibatch,
        sequences: Sequence[Rollout],
        scores: TeacherScores,
    ) -> None:
        """Packs the sequences of a minibatch behind the teacher's prompts, and scores them."""
        assert self.prompts is not None, "the teacher has no prompts of its own"
        assert self.own_rows is not None, "a teacher with prompts has rows of its own"
        asked: list[int] = []
        texts: list[TrainingSequence] = []
        for index in minibatch.chosen:
            found = self.prompts.sequence_of(sequences[index])
            if found is not None:
                asked.append(index)
                texts.append(scored_sequence(*found))
        if not asked:
            return

        groups = group_by([sequences[index].problem.id for index in asked], texts)
        packed = pack(groups, *self.own_rows)
        batches, counts = self.learner.put([only_scored(part) for part in packed])
        rows = self.learner.score(params, batches, counts, self.own_rows.layouts)
        logps = [np.zeros(len(text.tokens), np.float32) for text in texts]
        for part, values in zip(packed, rows, strict=True):
            part.from_rows(collectives.fetch_global(values), logps)
        # What the teacher has read has another prompt, and the same tokens behind it.
        for index, text, values in zip(asked, texts, logps, strict=True):
            prompt_length = sequences[index].prompt_length
            scores.logps[index][prompt_length:] = values[text.prompt_length :]
        scores.is_scored[asked] = True


def only_scored(packed: PackedBatch) -> PackedBatch:
    """Returns packed rows with only the fields that a score reads."""
    [batch] = scored_fields([packed.batch])
    return replace(packed, batch=batch)


def group_by(keys: Sequence[str], items: Sequence[Item]) -> list[list[Item]]:
    """Returns the items in groups: neighbors with the same key share one."""
    pairs = zip(keys, items, strict=True)
    return [
        [item for _, item in group] for _, group in itertools.groupby(pairs, operator.itemgetter(0))
    ]


def scored_sequence(tokens: np.ndarray, prompt_length: int) -> TrainingSequence:
    """Returns a sequence for packing that is only scored: it has neither weights nor log-probs."""
    zeros = np.zeros(len(tokens), np.float32)
    return TrainingSequence(tokens, prompt_length, weights=zeros, logps=zeros)


# -- what the planner needs of a teacher as well ---------------------------------------------------


def teacher_learner(model: qwen.QwenConfig, config: Config, mesh: Mesh) -> Learner:
    """Returns the learner whose score program a teacher of shape `model` runs.

    The adapter of the policy is not the teacher's: what a learner trains is not used here.
    """
    plain = replace(config, model=replace(config.model, adapter=AdapterConfig()))
    return policy_learner(model, plain, mesh)


def max_prompt_tokens(config: Config) -> int:
    """Returns the most tokens of a prompt of the teacher's own."""
    return config.teacher.max_prompt_tokens or 2 * config.rollout.max_prompt_tokens


def own_row_shapes(config: Config, mesh: Mesh) -> RowShapes | None:
    """Returns the shapes of rows with prompts of the teacher's own; None if it has none."""
    if not config.teacher.prompt:
        return None
    return row_shapes(config, mesh, max_prompt_tokens(config))


# -- the weights of kind=model ---------------------------------------------------------------------


def load_teacher(directory: Path, learner: Learner) -> qwen.Params:
    """Returns the model in `directory`, in the type of the computation, split as the policy is."""
    return huggingface.load(
        directory, learner.model, learner.model_shardings, learner.compute.dtype
    )


def load_adapter(path: str, learner: Learner) -> tuple[qwen.Params, AdapterConfig]:
    """Returns the adapter at `path`, split as an adapter of the policy is, and its settings.

    Raises UserError if it is none of the learner's model.
    """
    directory = peft.resolve(path)
    settings = peft.read_settings(directory, learner.model)
    shardings = adapter_shardings(learner.model, settings, learner.mesh)
    return peft.load(directory, learner.model, settings, shardings), settings


def abstract_teacher(learner: Learner) -> qwen.Params:
    """Returns the shapes, types and shardings of what `load_teacher` returns."""

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=jnp.dtype(learner.compute.dtype), sharding=sharding)

    return jax.tree.map(place, qwen.abstract(learner.model), learner.model_shardings)


def abstract_adapted(base: qwen.Params, path: str, learner: Learner) -> qwen.Params:
    """Returns the shapes of the adapter at `path` on a base. Reads the adapter's settings."""
    settings = peft.read_settings(peft.resolve(path), learner.model)

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=sharding)

    shardings = adapter_shardings(learner.model, settings, learner.mesh)
    adapter = jax.tree.map(place, adapters.abstract(learner.model, settings), shardings)
    return adapters.join(base, adapter, settings.scale)
