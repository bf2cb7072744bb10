"""The checks of `model.exact`: sampler and trainer must agree to the last bit.

The first optimizer step of an RL step computes log-probabilities under the sampler's weights. Its
update returns the log-probabilities, and `check_exact` compares all of them with the sampler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.algorithms import Algorithm
from jzero.config import ModelConfig, RolloutConfig
from jzero.errors import UserError
from jzero.hosts.platform import platform_of
from jzero.model.architecture import QwenConfig
from jzero.model.families import FAMILIES, family_of
from jzero.sharding.mesh import context_shards
from jzero.training.packing import PackedBatch
from jzero.types import Rollout


class InexactError(RuntimeError):
    """The trainer's log-probability of a token differs from the sampler's."""


@dataclass(frozen=True)
class Difference:
    """A token with different log-probabilities in sampler and trainer."""

    sequence: int  # index among the sequences of the RL step
    token: int  # index in the sequence, including its prompt
    sampled: np.float32
    trained: np.float32


def with_exact_ratio(
    algorithm: Algorithm,
    compute: ModelConfig,
    rollout: RolloutConfig,
) -> Algorithm:
    """Returns the trainer's algorithm: in exact mode the sampler's log-probs serve as pi_old.

    With rollout.placement.max_staleness the algorithm is unchanged, because rollouts can be older
    than the policy.
    """
    if not compute.exact or rollout.max_staleness:
        return algorithm
    # The sampler's log-probs equal the trainer's, so pi_old needs no forward pass, and every
    # correction between sampler and trainer would be 1.
    return replace(algorithm, old_policy="sampler", correction=None)


# Since this JAX version, XLA:CPU rounds gated delta nets differently in the update and in the
# sampler.
NO_EXACT_DELTA_NETS = (0, 12)


def check_can_be_exact(compute: ModelConfig, model: QwenConfig, mesh: Mesh) -> None:
    """Raises UserError if model.exact cannot hold for `model` or on the devices of `mesh`."""
    if not compute.exact:
        return
    if not family_of(model.model_type).is_exact:
        families = ", ".join(name for name, family in FAMILIES.items() if family.is_exact)
        raise UserError(
            f"model_type={model.model_type}: the layers of this family are not exact; choose a "
            f"model of {families}, or set model.exact=false"
        )
    if model.delta_net is not None and jax.__version_info__[:2] >= NO_EXACT_DELTA_NETS:
        raise UserError(
            f"model_type={model.model_type}: gated delta nets are not exact with JAX "
            f"{jax.__version__}; install JAX 0.10 (constraints.txt), or set model.exact=false"
        )
    if mesh.shape["fsdp"] > 1:
        raise UserError(
            f"mesh.fsdp={mesh.shape['fsdp']}: with model.exact every device has whole weights; set "
            "mesh.fsdp=1 mesh.data=-1, or model.exact=false"
        )
    if context_shards(mesh) > 1:
        raise UserError(
            f"mesh.context={context_shards(mesh)}: with model.exact every device has whole rows; "
            "set mesh.context=1, or model.exact=false"
        )
    if mesh.shape["tensor"] > 2:
        raise UserError(
            f"mesh.tensor={mesh.shape['tensor']}: the order of a sum over more than two devices is "
            "not fixed; with model.exact set mesh.tensor to 1 or 2"
        )
    if platform_of(mesh) == "tpu" and compute.dtype != "bfloat16":
        raise UserError(
            f"model.dtype={compute.dtype}: the products of model.exact on a TPU take "
            "bfloat16; set model.dtype=bfloat16, or model.exact=false"
        )


def check_exact(
    packed: Sequence[PackedBatch],
    rows: Sequence[np.ndarray],
    chosen: Sequence[int],
    sequences: Sequence[Rollout],
    step: int,
) -> int:
    """Compares the trainer's log-probabilities with the sampler's; returns the number of tokens.

    Args:
        packed: the packed batches of the first optimizer step of RL step `step`, one for each
            layout.
        rows: the trainer's log-probabilities f32[M, B, T] of each packed batch.
        chosen: the index of each packed sequence in `sequences`.
        sequences: all sequences of the RL step. Only tokens that were sampled by the policy before
            the step (version step - 1) are compared.

    Raises:
        InexactError: a log-probability differs in any bit; the message reports the first one.
    """
    trained = [np.zeros(len(sequences[index].tokens), np.float32) for index in chosen]
    for part, logps in zip(packed, rows, strict=True):
        part.from_rows(logps, trained)

    num_compared = 0
    differences: list[Difference] = []
    for index, logps in zip(chosen, trained, strict=True):
        # Tokens of older policies were sampled with other weights and cannot match.
        sequence = sequences[index]
        is_compared = sequence.tokens.sampled & (sequence.tokens.versions == step - 1)
        num_compared += int(is_compared.sum())
        sampled = sequence.tokens.logps.astype(np.float32)
        # Compare bit patterns, so that NaN equals NaN and -0 differs from 0.
        is_different = is_compared & (sampled.view(np.int32) != logps.view(np.int32))
        differences += [
            Difference(index, int(token), sampled[token], logps[token])
            for token in np.flatnonzero(is_different)
        ]
    if differences:
        raise InexactError(describe(differences, num_compared, sequences, step))
    return num_compared


def describe(
    differences: Sequence[Difference],
    num_compared: int,
    sequences: Sequence[Rollout],
    step: int,
) -> str:
    """Returns an error message with the first difference and the number of differences."""
    first = min(differences, key=place_of)
    sequence = sequences[first.sequence]
    largest = max(abs(float(item.sampled) - float(item.trained)) for item in differences)
    return (
        f"model.exact: step {step}, sequence {first.sequence} (sample {sequence.sample_index} of "
        f"problem {sequence.problem.id}), token {first.token}: the sampler's log-probability is "
        f"{first.sampled!s}, the trainer's {first.trained!s}; {len(differences)} of "
        f"{num_compared} differ, by at most {largest:.2g}. Set model.exact=false to train with "
        "them, or see docs/models.md"
    )


def place_of(difference: Difference) -> tuple[int, int]:
    return difference.sequence, difference.token
