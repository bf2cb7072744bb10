"""With rollout.routing_replay the trainer sends every token to the experts of the sampler."""

import jax
import numpy as np
import pytest
from test_kept_tokens import rollouts_of, without
from tiny import tiny_settings

from jzero import config
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.errors import UserError
from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.sharding.mesh import train_mesh
from jzero.training.step import UpdateResult, update_on_rollouts
from jzero.training.trainer import abstract_batches, make_trainer
from jzero.types import Rollout

pytestmark = pytest.mark.usefixtures("quick_runs")

LAYERS, EXPERTS = 2, 4
# A token goes to one expert, and its weight is divided by itself: so the router only chooses.
MOE = config.tiny_arch(
    model_type="qwen3_moe",
    hidden_size=32,
    num_hidden_layers=LAYERS,
    head_dim=8,
    num_experts=EXPERTS,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    norm_topk_prob=True,
)


def moe_settings(mesh: dict[str, int] | None = None, **rollout: object) -> config.Config:
    """Returns settings of episodes of two turns, all of which are trained on."""
    return tiny_settings(
        model={"arch": MOE},
        rollout={
            "num_prompts": 2,
            "group_size": 4,
            "max_turns": 2,
            "kv_dtype": "float32",
            "routing_replay": True,
            **rollout,
        },
        algorithm={"correction": "token_truncate", "entropy_coef": 1e-3},
        train={"packs_per_row": 1, "epochs": 2, "microbatch_tokens": 512},
        mesh=mesh or {},
    )


def updated(
    settings: config.Config, rollouts: list[Rollout], has_other_router: bool = False
) -> UpdateResult:
    """Returns what a step makes of the rollouts, with the sampler's model or with new routers."""
    base = read_base_model(settings.model)
    sizes = settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor
    mesh = train_mesh(*sizes, jax.devices()[: int(np.prod(sizes))])
    trainer = make_trainer(settings, base.model, None, mesh)
    params = trainer.policy.init_params(0)
    if has_other_router:
        others: qwen.Params = trainer.policy.init_params(1)
        layers = params["layers"] | {"router": others["layers"]["router"]}
        params = params | {"layers": layers}
    result = update_on_rollouts(trainer, trainer.policy.start(params), rollouts, step=1)

    def shapes(batches: object) -> object:
        return jax.tree.map(lambda x: (x.shape, x.dtype), batches)

    assert shapes(tuple(result.batches)) == shapes(abstract_batches(trainer))
    return result


def test_replayed_experts_reproduce_the_log_probs() -> None:
    """The trainer's router is another one, and would send most tokens elsewhere."""
    settings = moe_settings({"data": 1, "fsdp": 1, "tensor": 1})
    rollouts, not_trained = rollouts_of(settings)

    same = updated(settings, rollouts)
    replayed = updated(settings, rollouts, has_other_router=True)
    free = updated(
        settings, [without(rollout, "routes") for rollout in rollouts], has_other_router=True
    )

    assert same.metrics["policy/mismatch_max"] < 1e-4
    assert replayed.metrics["policy/mismatch_max"] < 1e-4
    assert free.metrics["policy/mismatch_max"] > 1e-2
    assert any(len(rollout.turns) > 1 for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.tokens["routes"].shape == (len(rollout.tokens), LAYERS)
        assert (rollout.tokens["routes"][0] == -1).all()
        assert rollout.tokens["routes"][1:].min() >= 0
        assert rollout.tokens["routes"].max() < EXPERTS
    assert all(rollout.tokens.get("routes") is None for rollout in not_trained)
    [restored, *_] = rollouts_from_bytes([rollouts_to_bytes(rollouts)])
    np.testing.assert_array_equal(restored.tokens["routes"], rollouts[0].tokens["routes"])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, id="tensor"),
        pytest.param({"data": 4, "fsdp": 1, "tensor": 1}, id="data"),
    ],
)
def test_routes_are_replayed_on_every_mesh(sizes: dict[str, int]) -> None:
    rollouts, _ = rollouts_of(moe_settings({"data": 1, "fsdp": 1, "tensor": 1}))

    replayed = updated(moe_settings(sizes), rollouts, has_other_router=True)

    assert replayed.metrics["policy/mismatch_max"] < 1e-4


def test_a_preempted_sequence_remembers_all_its_routes() -> None:
    """Two sequences have pages at a time; the others begin again with a prefill."""
    settings = moe_settings(
        {"data": 1, "fsdp": 1, "tensor": 1}, num_pages=8, page_size=8, max_new_tokens=12
    )

    rollouts, _ = rollouts_of(settings)

    for rollout in rollouts:
        assert rollout.tokens["routes"].shape == (len(rollout.tokens), LAYERS)
        assert rollout.tokens["routes"][1:].min() >= 0
    assert updated(settings, rollouts, has_other_router=True).metrics["policy/mismatch_max"] < 1e-4


def test_a_dense_model_has_no_routes_to_replay() -> None:
    settings = tiny_settings(rollout={"routing_replay": True})
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])

    with pytest.raises(UserError, match="routing_replay=True: model_type=qwen2 has no experts"):
        make_trainer(settings, base.model, None, mesh)
