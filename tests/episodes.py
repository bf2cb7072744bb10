"""A tiny model that plays the game of jzero/tasks/guess.py, for tests of whole episodes."""

from functools import cache
from typing import NamedTuple

import jax
import reference

from jzero import config
from jzero.distributed.interrupt import never_stop
from jzero.distributed.mesh import train_mesh
from jzero.grading.pool import Pool
from jzero.model import qwen
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.sampler import Sampler, make_sampler
from jzero.run.base_model import read_base_model
from jzero.training import learner
from jzero.training.warm_start import warm_start


def tiny_settings(**sections: dict[str, object]) -> config.Config:
    """Returns settings of a run on the game: tiny_settings(train={"steps": 2}) changes a field."""
    architecture = config.ArchitectureConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
    )
    defaults: dict[str, dict[str, object]] = {
        "model": {"arch": architecture},
        "task": {"name": "guess", "template": "plain", "value_max": 7},
        "rollout": {
            "max_prompt_tokens": 8,
            "max_new_tokens": 2,
            "max_turns": 3,
            "max_reply_tokens": 12,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 4,
            "temperature": 1.0,
        },
        "warm_start": {"steps": 30, "batch_size": 8, "lr": 2e-2, "tries": 3.0},
        "optimizer": {"lr": 1e-3},
        "train": {"microbatch_tokens": 512, "packs_per_row": 1, "checkpoint_every": 2},
        # As many samples as a group has, so that evaluations run the programs of training.
        "eval": {"problems": 7, "samples": 4, "greedy": False},
    }
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return reference.settings(**merged)


def make_untrained_sampler(settings: config.Config, pool: Pool | None = None) -> Sampler:
    """Returns a sampler on one device. Nothing is compiled before it samples."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, _ = make_sampler(settings, read_base_model(settings.model), mesh, pool or Pool(0))
    return sampler


class Player(NamedTuple):
    """A model that has just learned what an episode looks like."""

    tokenizer: PreTrainedTokenizerFast
    sampler: Sampler  # its pool has no workers
    params: qwen.Params


@cache
def trained_player() -> Player:
    """Returns a player after the warm start, which guesses in the right format but not well."""
    settings = tiny_settings()
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, publish = make_sampler(settings, base, mesh, Pool(0))
    policy = learner.policy_learner(base.model, settings, mesh)
    params = warm_start(policy, settings, base.tokenizer, policy.init_params(0), never_stop)
    return Player(base.tokenizer, sampler, publish(params))
