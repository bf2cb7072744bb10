"""What a step is made of: rollouts to items, shapes of a run, metrics, interruption, the reference, the export."""

import json
import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
import slow
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jzero import train
from jzero.batch import Item, pack
from jzero.model import hf
from jzero.sharding import train_mesh
from jzero.types import Grade, Layout

ROLLOUTS = slow.random_rollouts(1, 4, 4)
GROUPS = [ROLLOUTS[i : i + 4] for i in range(0, 16, 4)]


@pytest.mark.parametrize("truncated", ["grade", "zero", "mask"])
@pytest.mark.parametrize("weight", ["sequence_mean", "token_mean", "constant"])
def test_items(weight, truncated):
    config = slow.settings(algorithm={"weight": weight, "truncated": truncated})
    advantages = np.arange(16, dtype=np.float32).reshape(4, 4)
    items = [item for group in train.items(GROUPS, advantages, config) for item in group]
    want = slow.token_weights(ROLLOUTS, config.algorithm, config.rollout.max_new)
    for i, (item, rollout) in enumerate(zip(items, ROLLOUTS, strict=True)):
        assert item.tokens is rollout.tokens and item.prompt == rollout.prompt_length
        assert (item.advantages == i).all()
        np.testing.assert_allclose(item.sampled * item.weight, want[i], rtol=1e-12)


def test_score_of_truncated_rollouts():
    cut = replace(ROLLOUTS[0], finish="length", grade=Grade(0.7, False, ""))
    whole = replace(cut, finish="stop")
    for truncated, score in (("grade", 0.7), ("mask", 0.7), ("zero", 0.0)):
        algorithm = slow.settings(algorithm={"truncated": truncated}).algorithm
        assert train.score_of(cut, algorithm) == score and train.score_of(whole, algorithm) == 0.7
    with pytest.raises(AssertionError, match="was not graded"):
        train.score_of(replace(whole, grade=None), algorithm)


def test_rollout_metrics():
    values = train.rollout_metrics(ROLLOUTS, 4)
    scores, lengths = [r.grade.score for r in ROLLOUTS], [len(r.tokens) - r.prompt_length for r in ROLLOUTS]
    assert values["reward/mean"] == pytest.approx(sum(scores) / 16)
    assert values["reward/accuracy"] == sum(r.grade.correct for r in ROLLOUTS) / 16
    same = [len({r.grade.score for r in group}) == 1 for group in GROUPS]
    assert values["reward/zero_variance_groups"] == sum(same) / 4 >= 0.25
    assert values["rollout/length"] == sum(lengths) / 16 and values["rollout/length_max"] == max(lengths)
    assert values["rollout/truncated"] == sum(r.finish == "length" for r in ROLLOUTS) / 16
    assert values["rollout/tokens"] == sum(lengths)


def test_update_metrics_are_means_over_tokens_of_all_optimizer_steps():
    one = {"tokens": 10.0, "entropy": 20.0, "clip_fraction": 1.0, "mismatch": 0.5, "loss": 0.3, "grad_norm": 2.0}
    two = {"tokens": 30.0, "entropy": 30.0, "clip_fraction": 5.0, "mismatch": 9.0, "loss": 0.1, "grad_norm": 4.0}
    values = train.update_metrics([one, two])
    assert values["policy/entropy"] == 50 / 40 and values["policy/clip_fraction"] == 6 / 40
    assert values["policy/mismatch"] == 0.05  # before any update
    assert values["optimizer/loss"] == pytest.approx(0.2) and values["optimizer/grad_norm"] == 3.0
    assert "policy/kl" not in values
    assert train.update_metrics([one | {"kl": 4.0}])["policy/kl"] == 0.4
    nothing = dict.fromkeys(one, 0.0)
    assert all(np.isfinite(x) for x in train.update_metrics([nothing]).values())


# -- shapes of a run ---------------------------------------------------------------------------------------------------


def test_microbatch_rows():
    layout, mesh = Layout(6, 2, 12), train_mesh(2, 2, 2)
    rows = lambda tokens: train.microbatch_rows(slow.settings(train={"tokens": tokens}), mesh, layout)
    assert [rows(120), rows(239), rows(240), rows(1000)] == [4, 4, 8, 32]
    with pytest.raises(ValueError, match=r"train.tokens=119 .* set it to at least 120, or lower train.row_slots"):
        rows(119)


@given(
    group=st.integers(2, 9),
    row_slots=st.integers(0, 9),
    buckets=st.integers(1, 3),
    minibatches=st.sampled_from([1, 2]),
    tokens=st.integers(1000, 4000),
    seed=st.integers(0, 99),
)
@hypothesis_settings(deadline=None, max_examples=40)
def test_a_run_never_needs_more_microbatches_than_it_compiled(group, row_slots, buckets, minibatches, tokens, seed):
    """More would be another shape, and another compilation in the middle of a run."""
    config = slow.settings(
        rollout={"group": group},
        train={"row_slots": row_slots, "buckets": buckets, "minibatches": minibatches, "tokens": tokens},
    )
    run = train.build(config, None)
    rng = np.random.default_rng(seed)
    floats = np.zeros(18, np.float32)

    def item():
        length = 6 + int(rng.choice([12, rng.integers(1, 13)]))
        return Item(np.ones(length, np.int32), np.arange(length) >= 6, 6, floats[:length], floats[:length], 1.0)

    groups = [[item() for _ in range(group)] for _ in range(4 // minibatches)]
    for packed, most in zip(pack(groups, run.layouts, run.rows, run.microbatches), run.microbatches, strict=True):
        assert packed.batch.tokens.shape[0] == max(1, most)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh": {"tensor": 4, "data": 1, "fsdp": -1}}, "mesh.tensor=4 does not divide the model's 2 key-value heads"),
        ({"mesh": {"data": 3, "fsdp": 1}}, "mesh data=3 fsdp=1 tensor=1 does not fill the 8 devices"),
        ({"train": {"tokens": 7}}, "train.tokens=7 holds less than one row"),
        ({"rollout": {"pages": 1, "page": 4}}, "rollout.pages=1 is too small"),
        ({"model": {"path": "/no/such/directory"}}, "no such directory"),
        ({"model": {"tokenizer": "/no/such/directory"}}, "no tokenizer in model.tokenizer=/no/such/directory"),
    ],
)
def test_build_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        train.build(slow.settings(**changes), None)


def test_check_refuses_and_writes_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    cases = [
        ({"task": {"name": "countup"}}, "new", "task.name='countup' is not one of countdown"),
        ({"task": {"template": "r2"}}, "new", "task.template='r2' is not one of r1, "),
        ({}, "file", "file is not a directory"),
        ({}, "file/new", "file is not a directory"),
    ]
    if os.geteuid():  # root may write anywhere
        cases.append(({}, "sealed/new", "sealed is not a directory that can be written to"))
    for changes, workdir, message in cases:
        with pytest.raises(ValueError, match=message):
            train.check(slow.settings(**changes), tmp_path / workdir)
    train.check(slow.settings(), tmp_path / "a/b/c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sealed"]


# -- surroundings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_check_and_a_second_one_at_once(number, capsys):
    before = signal.getsignal(number)
    with train.interruptible() as interrupted:
        interrupted()
        os.kill(os.getpid(), number)
        with pytest.raises(train.Interrupted, match=number.name):
            interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            signal.pause()
    assert signal.getsignal(number) is before
    assert capsys.readouterr().err == f"{number.name}: saving a checkpoint; again to stop at once\n"


def test_reference_is_the_first_policy_whenever_it_was_killed(tmp_path):
    run = train.build(slow.settings(mesh={"data": 2, "fsdp": 2, "tensor": 2}), None)
    params = slow.placed(run.policy, slow.random_params(run.policy.model))
    first = train.reference(run, tmp_path, params, fresh=True)
    jax.tree.map(np.testing.assert_array_equal, first, params)
    later = jax.tree.map(lambda x: x + 1, params)
    for fresh in (False, True):  # resumed later, and resumed at step 0 once more
        jax.tree.map(np.testing.assert_array_equal, train.reference(run, tmp_path, later, fresh), params)
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(), first, run.policy.shardings)


def test_export_is_whole_or_made_again(tmp_path):
    run = train.build(slow.settings(train={"tokens": 240}), None)
    run.hf_config = {"max_position_embeddings": 32768, "bos_token_id": 3, "eos_token_id": 99}
    params = slow.random_params(run.policy.model)
    target = tmp_path / "export-3"
    assert train.export_policy(run, params, target) == str(target)
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    written = json.loads(files["config.json"])
    assert written["max_position_embeddings"] == 32768 and written["bos_token_id"] == 3  # the loaded model's own
    assert written["eos_token_id"] == run.sampler.engine.stop_ids[0]
    (target / "generation_config.json").unlink()  # killed before the end
    (target / "tokenizer.json").write_text("{")
    train.export_policy(run, params, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    again = jax.tree.map(lambda x: x + 1, params)
    train.export_policy(run, again, target)  # whole: stays
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    config, _ = hf.load_config(target)
    assert config == run.policy.model
