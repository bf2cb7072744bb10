"""Trains the head for drafts (rollout.draft=mtp) along with the policy.

The loss of the head is its cross-entropy on the sampled tokens, times the weights that the tokens
have in the policy loss. Hidden states, embedding and output matrix are constants of this loss, so
its gradient reaches the head alone, and the policy's gradient is the same as without it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jzero.model import mtp, qwen
from jzero.model.arithmetic import Arithmetic
from jzero.model.layers import Attend
from jzero.model.logprobs import in_chunks
from jzero.training.heads import Stats
from jzero.types import Batch, RowLayout


def head_loss(
    model: qwen.QwenConfig,
    params: qwen.Params,
    hidden: Float[Array, "B T E"],
    batch: Batch[jax.Array],
    layout: RowLayout,
    attend: Attend,
    *,
    temperature: float,
    chunk: int,
    dtype: DTypeLike,
    remat: str,
    arithmetic: Arithmetic,
) -> tuple[Float[Array, ""], Stats]:
    """Returns the loss of the head on one microbatch, and the sums for `head_metrics`.

    params: of the whole model. Only the head's have a gradient.
    hidden: of the model after the final norm.
    attend: attention of the rows, see `packed_rows.PackedRows`.
    temperature: at which the tokens were sampled.
    chunk: tokens whose logits exist at a time.
    """
    # The barrier keeps XLA from compiling the model differently because its output has another use.
    hidden = lax.optimization_barrier(lax.stop_gradient(hidden))
    constants = {name: params[name] for name in ("embed", "lm_head") if name in params}
    params = lax.stop_gradient(constants) | {mtp.NAME: params[mtp.NAME]}

    def run(params: qwen.Params, hidden: jax.Array) -> jax.Array:
        states, _ = mtp.forward(
            model,
            params,
            hidden,
            batch.targets,
            batch.positions,
            attend,
            dtype=dtype,
            arithmetic=arithmetic,
        )
        return states

    states = qwen.REMAT[remat](run)(params, hidden)

    def score(
        states: Float[Array, "B width E"], tokens: Int[Array, "B width"]
    ) -> tuple[Float[Array, "B width"], Float[Array, "B width"]]:
        logits = qwen.head(model, params, states, dtype, arithmetic=arithmetic)
        logps, _ = arithmetic.logps(logits, tokens, temperature)
        return logps, (logits.argmax(axis=-1) == tokens).astype(jnp.float32)

    tokens, weights = tokens_to_predict(batch, layout)
    logps, is_correct = in_chunks(score, (states[:, layout.prefix :], tokens), chunk)
    is_counted = weights != 0
    # `where` instead of a product, as in the policy loss.
    loss = jnp.where(is_counted, -weights * logps, 0).sum()
    stats = {
        "draft_head_tokens": is_counted.sum().astype(jnp.float32),
        "draft_head_correct": jnp.where(is_counted, is_correct, 0).sum(),
        "draft_head_nll": jnp.where(is_counted, -logps, 0).sum(),
    }
    return loss, lax.stop_gradient(stats)


def tokens_to_predict(
    batch: Batch[jax.Array], layout: RowLayout
) -> tuple[Int[Array, "B body"], Float[Array, "B body"]]:
    """Returns what the head predicts at the inputs after the prefix, and the weights in its loss.

    That is the target of the next input of the same sequence. The weight is 0 where there is none,
    and unless the policy loss trains both this target and the one before: the head continues
    sampled tokens, and what it learns does not depend on the layout.
    """
    body = slice(layout.prefix, None)
    # A loss may lower the probability of tokens, but the head has to predict them.
    weights = jnp.abs(batch.weights[:, body])
    segments = batch.segments[:, body]
    is_last_of_slot = jnp.arange(segments.shape[1]) % layout.slot == layout.slot - 1
    continues: Bool[Array, "B body"] = (
        (weights > 0) & (segments == following(segments)) & ~is_last_of_slot
    )
    return following(batch.targets[:, body]), jnp.where(continues, following(weights), 0)


def following(x: jax.Array) -> jax.Array:
    """Returns the values of the next column in every column."""
    return jnp.roll(x, -1, axis=1)


def head_metrics(stats: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the metrics of the head from the stats of optimizer steps, on the host."""
    sums = [step for step in stats if "draft_head_tokens" in step]
    tokens = sum(float(step["draft_head_tokens"]) for step in sums)
    if not tokens:
        return {}
    return {
        "mtp/accuracy": sum(float(step["draft_head_correct"]) for step in sums) / tokens,
        "mtp/nll": sum(float(step["draft_head_nll"]) for step in sums) / tokens,
    }
