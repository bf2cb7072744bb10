"""The heads of a learner: how many logits exist at the same time."""

import re

import jax
import jax.numpy as jnp
import pytest
import reference

from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.sharding.mesh import train_mesh
from jzero.training.heads import policy_head, rl_objective

ROWS, TOKENS, CHUNK = 8, 32, 16


# Data parallelism alone runs under shard_map: a program has the rows of one device.
@pytest.mark.parametrize(("data", "fsdp", "token_shards"), [(1, 1, 1), (8, 1, 1), (2, 4, 2)])
def test_a_device_has_the_logits_of_one_chunk_whatever_the_mesh(
    data: int, fsdp: int, token_shards: int
) -> None:
    settings = reference.settings(model={"logit_chunk": CHUNK})
    model = read_base_model(settings.model).model
    mesh = train_mesh(data, fsdp, 1, jax.devices()[: data * fsdp])
    head = policy_head(
        model, settings.model, rl_objective(settings.algorithm, settings.rollout), mesh
    )
    params = jax.eval_shape(lambda: qwen.init(model, jax.random.key(0)))
    hidden = jax.ShapeDtypeStruct((ROWS, TOKENS, model.hidden_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

    program = jax.make_jaxpr(head.outputs)(params, hidden, targets, None)

    logits = re.findall(rf"f32\[{ROWS},(\d+),{model.vocab_size}\]", str(program))
    most_tokens = max(ROWS * int(width) for width in logits)
    assert most_tokens == CHUNK * token_shards
