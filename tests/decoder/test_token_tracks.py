"""A token track of the user's own: the code of docs/extend.md, from the decode step to the update.

Episodes have several turns, lose their pages and return, are cut at stop strings, are carried over
to another step, and go through the bytes that hosts and checkpoints exchange.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import reference
from test_kept_tokens import updated
from tiny import sampler_and_publish, stream_of, tiny_settings

from jzero import config
from jzero.algorithms import ADVANTAGES, Algorithm
from jzero.decoder.engine import Samples
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.fields import fields_of, parts_of
from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler
from jzero.sharding.mesh import train_mesh
from jzero.tasks import guess
from jzero.tokens import TRACKS
from jzero.training.trainer import make_trainer
from jzero.types import Rollout
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_compilation", "track")

PAGE = (Path(__file__).resolve().parents[2] / "docs/extend.md").read_text(encoding="utf-8")
FILES = ("my_tracks.py",)
GROUP = 4


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports the files of the page that add the track and its use, for one test."""
    for name in FILES:
        block = re.search(rf"<!-- file: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
        assert block is not None, f"{name} is not on the page"
        (tmp_path / name).write_text(block[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = ADVANTAGES, TRACKS
    before = [dict(table) for table in tables]
    parts = parts_of(fields_of(Algorithm)["advantage"])
    parts_before = list(parts)
    importlib.import_module("my_tracks")
    yield
    for name in FILES:
        del sys.modules[name.removesuffix(".py")]
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    parts[:] = parts_before


def settings_of_track(**rollout: object) -> config.Config:
    """Returns settings of episodes of three turns that share few pages, in few slots."""
    return tiny_settings(
        rollout={
            "num_prompts": 2,
            "group_size": GROUP,
            "max_turns": 3,
            "max_new_tokens": 12,
            "num_slots": 6,
            "num_pages": 14,
            "kv_dtype": "float32",
            "stop": ("7",),
            **rollout,
        },
        algorithm={"advantage": "sign_by_entropy", "entropy_coef": 1e-3},
        train={"packs_per_row": 1, "epochs": 2, "microbatch_tokens": 512},
    )


class Played(NamedTuple):
    """A sampler with random weights, and the model of the weights."""

    sampler: Sampler
    weights: qwen.Params
    model: qwen.QwenConfig
    params: qwen.Params


def play(settings: config.Config, pool: Pool) -> Played:
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, publish = sampler_and_publish(settings, base, mesh, pool)
    params = make_trainer(settings, base.model, None, mesh).policy.init_params(0)
    return Played(sampler, publish(params), base.model, params)


def assert_entropies(played: Played, rollouts: list[Rollout]) -> None:
    """Asserts that the track of sampled tokens has the entropies of the whole forward pass."""
    _, entropies = reference.naive(played.params, rollouts, 1.0, played.model)
    for rollout, want in zip(rollouts, entropies, strict=True):
        tokens = rollout.tokens
        assert tokens.sampled.any()
        assert tokens["entropies"].dtype == np.float32
        assert (tokens["entropies"][~tokens.sampled] == 0).all()
        np.testing.assert_allclose(
            tokens["entropies"][tokens.sampled], want[tokens.sampled], atol=1e-5
        )


@pytest.mark.parametrize("in_chunks", [False, True], ids=["prefill", "chunks"])
def test_a_track_arrives_in_the_update(in_chunks: bool) -> None:
    settings = settings_of_track()
    with Pool(1) as pool:
        played = play(settings, pool)
        if in_chunks:
            played.sampler.engine.chunk_tokens = settings.rollout.page_size
        problems = played.sampler.encode_problems(guess.train_problems(settings.task, 0, 1, 2))

        def sample(samples: Samples) -> list[Rollout]:
            rollouts, counters = played.sampler.sample_rollouts(
                played.weights,
                problems,
                group_size=GROUP,
                temperature=1.0,
                key=(0, 0),
                version=0,
                samples=samples,
            )
            assert counters.prefills > len(problems)  # an episode has lost its slot, and returned
            return played.sampler.gather_rollouts(rollouts, GROUP)

        rollouts = sample(Samples())
        not_trained = sample(Samples(is_trained=False))
    result = updated(settings, rollouts)

    assert max(len(rollout.turns) for rollout in rollouts) == 3
    assert_entropies(played, rollouts)
    # Samples that are not trained on are the same tokens, without the track.
    assert [r.tokens.ids.tolist() for r in not_trained] == [r.tokens.ids.tolist() for r in rollouts]
    assert all(rollout.tokens.get("entropies") is None for rollout in not_trained)

    restored = rollouts_from_bytes(
        [rollouts_to_bytes(rollouts[:3]), rollouts_to_bytes(rollouts[3:])]
    )
    for one, other in zip(restored, rollouts, strict=True):
        for name, values in other.tokens.to_dict().items():
            np.testing.assert_array_equal(one.tokens[name], values)

    # Every sampled token is packed once, with its log-prob and its entropy.
    packed = set()
    for batch in result.batches:
        is_sampled = np.asarray(batch.sampler_logps) != 0
        entropies = np.asarray(batch.tracks["entropies"])
        assert (entropies[~is_sampled] == 0).all()
        packed |= set(
            zip(
                np.asarray(batch.sampler_logps)[is_sampled].tolist(),
                entropies[is_sampled].tolist(),
                strict=True,
            )
        )
    recorded = set()
    for rollout in rollouts:
        tokens = rollout.tokens
        recorded |= set(
            zip(
                tokens.logps[tokens.sampled].tolist(),
                tokens["entropies"][tokens.sampled].tolist(),
                strict=True,
            )
        )
    assert packed == recorded


def test_a_track_survives_a_checkpoint_between_two_steps() -> None:
    """An asynchronous step leaves unfinished episodes to the next one, in another process."""
    settings = settings_of_track(placement="together(max_staleness=1)", num_slots=3)
    with Pool(1) as pool:
        played = play(settings, pool)
        first = stream_of(played.sampler, settings)
        rollouts, _ = first.collect(played.weights, 0)
        resumed = stream_of(played.sampler, settings)
        resumed.restore(first.state())
        carried = [s for group in resumed.groups for s in group.sequences if s.num_new]
        later, _ = resumed.collect(played.weights, 1)

    assert carried
    assert any(len(set(rollout.tokens.versions.tolist())) == 3 for rollout in later)
    assert_entropies(played, rollouts)
    assert_entropies(played, later)
