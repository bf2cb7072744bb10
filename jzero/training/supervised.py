"""Optimizer steps on examples instead of rollouts, for supervised fine-tuning and the warm start.

Packing, the update program and the optimizer are the same as in RL. The loss is RL's loss with only
the cross-entropy term.
"""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jzero.algorithms import supervised
from jzero.config import ModelConfig, OptimizerConfig, TrainConfig
from jzero.config.drafts import Draft
from jzero.hosts import collectives
from jzero.model import qwen
from jzero.numerics.sizes import power_of_two
from jzero.tokens import Tokens
from jzero.training.examples import Example
from jzero.training.heads import Objective, Stats, draft_weight
from jzero.training.learner import policy_learner
from jzero.training.packing import PackedBatch, TrainingSequence, best_fit, pack
from jzero.training.trainer import microbatch_rows
from jzero.types import RowLayout, State


class SupervisedTrainer:
    """Trains one model on packed rows of `row_tokens` tokens by supervised learning."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        mesh: Mesh,
        compute: ModelConfig,
        optimizer: OptimizerConfig,
        train: TrainConfig,
        row_tokens: int,
        most_rows: int,
        draft: Draft | None = None,
    ) -> None:
        """most_rows: rows that an optimizer step may have; a microbatch has no more.

        draft: rollout.draft, whose head is trained along.
        """
        objective = Objective(supervised(), draft_weight=draft_weight(draft))
        self.learner = policy_learner(model, compute, optimizer, objective, mesh, train.seed)
        # Examples share no prompt, so a row is one slot without a prefix.
        self.layout = RowLayout(prefix=0, slots=1, slot=row_tokens)
        self.rows = microbatch_rows(train, mesh, self.layout, most_rows)

    def pack(self, examples: Sequence[Example]) -> PackedBatch:
        """Packs examples. At least one example must have a trained token.

        Every trained token has the same weight, so the loss is the mean over all trained tokens.
        """
        weight = np.float32(1.0 / sum(example.num_trained for example in examples))
        sequences = []
        for example in examples:
            weights = np.array(example.trained, np.float32) * weight
            sequence = TrainingSequence(
                tokens=Tokens(example.tokens),
                prompt_length=example.trained.index(True),
                weights=weights,
            )
            sequences.append(sequence)

        # The last token of a sequence is only a target.
        lengths = [len(sequence.tokens) - 1 for sequence in sequences]
        num_rows = len(best_fit(lengths, self.layout.slot))
        needed = -(-num_rows // self.rows)
        # The number of microbatches is a part of the compiled shape. It is rounded up to a power of
        # two, so that few programs are compiled.
        microbatches = power_of_two(needed)
        [packed] = pack([sequences], [self.layout], [self.rows], [microbatches])
        return packed

    def step(self, state: State, packed: PackedBatch, lr: float) -> tuple[State, Stats]:
        """Makes one optimizer step on the negative log-likelihood. `state` is donated."""
        batches, counts = self.learner.put([packed])
        return self.learner.update(state, batches, counts, [self.layout], lr)

    def loss(self, params: qwen.Params, packed: PackedBatch) -> float:
        """Returns the mean negative log-likelihood of the trained tokens.

        `params` has the parameters of the full model.
        """
        batches, counts = self.learner.put([packed])
        [logps] = self.learner.score(params, batches, counts, [self.layout])
        # Every weight is 1 / (trained tokens), so the sum is a mean.
        return -float(np.vdot(packed.batch.weights, collectives.fetch_global(logps)))
