"""GRPO on one page: problems -> sample -> grade -> credit -> gradient -> step -> publish.

    python -m jzero.loops.grpo_loop --config configs/countdown.py:tiny

This file is for reading and for copying. It trains what `python -m jzero.main` trains with the same
recipe, to the same rewards, on a CPU, on GPUs or on a TPU slice, and writes no files.
`jzero/loops/rl.py` has the same loop with checkpoints, evaluation, asynchronous rollouts, critics,
reference policies and the other algorithms. docs/own_loop.md has three loops made from this one.

P problems of a step have G answers each, N = P * G rollouts. GRPO (arXiv:2402.03300 eq. 3, here
without its KL term) maximizes

    1/N sum_i 1/|o_i| sum_t min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i)

    rho_it = pi(o_it) / pi_old(o_it)      A_i = (r_i - mean of its group) / std of its group

Problems, rollouts, rewards, advantages and token weights are on the host, as NumPy arrays. The
State (parameters and moments, fp32), the decoder's weights and packed rows are on the devices. The
model computes in config.model.dtype; log-probabilities and gradients are fp32.
"""

import sys

from jzero import recipe_files

if __name__ == "__main__":
    recipe_files.check_arguments(sys.argv[1:])  # a mistake ends here, before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np

from jzero import algorithms, cli
from jzero.config import Config
from jzero.errors import UserError
from jzero.setup import Run, build, first_state, resolve, training_problems
from jzero.training.optimizer import learning_rate
from jzero.training.packing import TrainingSequence
from jzero.types import Batch, Rollout, grade_of
from jzero.workers.pool import Pool

CLIP = 0.2  # eps of the loss
STD_EPS = 1e-6  # keeps the division by the standard deviation finite


def grpo(config: Config) -> list[float]:
    """Trains `config.train.steps` steps, and returns the mean reward of each."""
    check(config)
    resolved = resolve(config)
    with Pool(resolved.config.task.grade_workers) as pool:
        # The base model, the decoder on its mesh, the shapes of packed rows, and `publish`.
        run = build(resolved, pool)
        config, learner = run.config, run.trainer.policy
        state = first_state(run)
        rewards = []
        for step in range(1, config.train.steps + 1):
            # -- Problems: a function of (seed, step), so nothing has to be saved to repeat a step.
            problems = training_problems(config).draw(step)

            # -- Publish: the trainer's fp32 weights, cast and laid out for the decoder. A step
            # samples with the weights that it then updates (version: updates so far): pi_old.
            # The decoder's weights are freed at the end of the block: the update needs the memory.
            with run.sampling(learner.weights(state), version=step - 1) as sampler:
                # -- Sample and grade. The noise of a token is a function of `key`, the problem, the
                # answer's number in its group, and the token's position. A process pool grades
                # finished answers while others are decoded. Answers are returned in whole groups,
                # in order. An answer that is cut at rollout.max_new_tokens is graded and trained
                # like the others.
                rollouts = sampler.rollouts(problems, key=(config.train.seed, step))
            # Of several hosts each has sampled its share of the problems. From here on all hosts
            # have all rollouts and do the same, and the jitted programs run on all devices.

            # -- Credit: how much better an answer is than the others to the same problem.
            rewards_PG = rewards_of(rollouts).reshape(-1, config.rollout.group_size)
            advantages_PG = group_advantages(rewards_PG)

            # -- Gradient and step: one jitted program, which donates the old state. It clips the
            # gradient at optimizer.clip_norm, and makes a step of AdamW.
            batches, counts = pack_rows(run, rollouts, advantages_PG)
            lr = learning_rate(config.optimizer, step - 1, config.train.steps)
            layouts = run.trainer.layouts
            state, stats = learner.update(state, batches, counts, layouts, lr, loss=grpo_loss)

            rewards.append(float(rewards_PG.mean()))
            stats = jax.device_get(stats)
            entropy = stats["entropy"] / max(stats["tokens"], 1)
            print(
                f"step {step}/{config.train.steps}: reward {rewards[-1]:.3f}, "
                f"entropy {entropy:.3f}, gradient norm {stats['grad_norm']:.3f}",
                flush=True,
            )
        return rewards


def rewards_of(rollouts: list[Rollout]) -> np.ndarray:
    """Returns f64[N], the score of each answer. Raises UserError if a reward function failed.

    A score is the weighted sum of task.reward.functions: `module:function` adds one of your own.
    """
    grades = [grade_of(rollout) for rollout in rollouts]
    if failed := sum(grade.failed for grade in grades):
        raise UserError(f"{failed} answers have no reward: fix the reward function that failed")
    return np.array([grade.score for grade in grades])


def group_advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """Returns f64[P, G]: (r - mean) / (std + eps), with mean and std over each group of G.

    The standard deviation has G - 1 in its denominator. A group of equal rewards has the advantage
    0, exactly: the deviations from the mean of equal numbers may be rounding errors.
    """
    centered_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    centered_PG[(rewards_PG == rewards_PG[:, :1]).all(axis=1)] = 0.0
    variance_P = (centered_PG**2).sum(axis=1) / (rewards_PG.shape[1] - 1)
    return centered_PG / (np.sqrt(variance_P) + STD_EPS)[:, None]


def pack_rows(
    run: Run, rollouts: list[Rollout], advantages_PG: np.ndarray
) -> tuple[tuple[Batch[jax.Array], ...], jax.Array]:
    """Returns packed rows of all rollouts on the mesh, and the number of microbatches.

    Each token that the policy sampled, the end of the answer included, has the weight
    1 / (N |o_i|), and no other token has a gradient. So a token of a long answer counts less: the
    length bias of GRPO (arXiv:2503.20783), without which |o_i| would be a constant. Weights are
    normalized here, over all rollouts, and the jitted program only sums: rows, microbatches and
    devices cannot change the objective. Answers whose advantage is 0 have no gradient: they count
    in N, and have no place in a row. Without any row, only the optimizer's moments make the step.
    """
    group_size = advantages_PG.shape[1]
    groups: list[list[TrainingSequence]] = []
    advantages: list[np.ndarray] = []
    for group, group_of_advantages in enumerate(advantages_PG):
        members = []
        for sample, advantage in enumerate(group_of_advantages):
            if advantage:
                rollout = rollouts[group * group_size + sample]
                sampled = rollout.tokens.sampled  # bool[T], the answer's tokens
                weights = (sampled * (1.0 / (len(rollouts) * sampled.sum()))).astype(np.float32)
                members.append(TrainingSequence(rollout.tokens, rollout.prompt_length, weights))
                advantages.append((sampled * advantage).astype(np.float32))
        if members:
            groups.append(members)
    # All fields are [M, B, T]: M microbatches of B rows of T tokens.
    packed = run.trainer.pack(groups)
    return run.trainer.policy.put([part.with_field("advantages", advantages) for part in packed])


def grpo_loss(
    outputs: tuple[jax.Array, ...],
    batch: Batch[jax.Array],
    sequence_sum: object,
    is_on_policy: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weighted loss of every target, f32[B, T], and diagnostics of the same shape.

    `outputs` are the log-probability of every target under the policy at rollout.temperature, and
    the entropy, which is only printed. Advantages and weights are constants. The sum over a
    sequence (`sequence_sum`) and `is_on_policy` are for other losses. A penalty for the KL
    divergence from a reference policy would be one more term: batch.weights * (-gain + beta * kl),
    where kl reads batch.ref_logps, which `pack_rows` would set like the advantages, from
    `learner.score` for the parameters of the reference policy (docs/own_loop.md has such a call).
    """
    logps, entropy = outputs[:2]
    # pi_old is the policy before this update, a constant. With one optimizer step for each batch of
    # rollouts the ratio is 1, and its gradient is that of log pi. For rollouts of older weights,
    # batch.sampler_logps has the log-probabilities under the weights that sampled them.
    old_logps = jax.lax.stop_gradient(logps)
    ratio = jnp.exp(logps - old_logps)
    clipped_ratio = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * batch.advantages, clipped_ratio * batch.advantages)
    return batch.weights * -gain, {"entropy": entropy}


def check(config: Config) -> None:
    """Raises UserError for a recipe with parts that are not on this page."""
    is_here = {
        "algorithm=grpo": config.algorithm == algorithms.grpo(),
        "rollout.max_turns=1": config.rollout.max_turns == 1,
        "rollout.placement=together": config.rollout.max_staleness == 0,
        "train.minibatches=1": config.train.minibatches == 1,
        "train.epochs=1": config.train.epochs == 1,
        "sft=none": config.sft is None,
    }
    if missing := [name for name, holds in is_here.items() if not holds]:
        raise UserError(f"set {', '.join(missing)}, or use python -m jzero.main")


if __name__ == "__main__":
    with cli.user_errors():
        grpo(recipe_files.settings_of(cli.start_jax(sys.argv[1:])))
