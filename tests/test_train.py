"""What a step is made of: rollouts to items, shapes of a run, metrics, interruption, the reference, the export."""

import json
import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jzero import algorithms, config, setup, train
from jzero.distributed import interrupt
from jzero.distributed.mesh import train_mesh
from jzero.model import huggingface
from jzero.rollout.collect import ROUND_STRIDE
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.run.base_model import read_base_model
from jzero.run.export_model import export_model
from jzero.training.credit import token_weights, turn_rewards
from jzero.training.packing import TrainingSequence, pack
from jzero.training.reference import load_reference
from jzero.training.step import update_metrics
from jzero.training.trainer import microbatch_rows
from jzero.types import Grade, RowLayout

ROLLOUTS = reference.random_rollouts(1, 4, 4)
GROUPS = [ROLLOUTS[i : i + 4] for i in range(0, 16, 4)]


@pytest.mark.parametrize("truncated", ["grade", "fixed", "mask"])
@pytest.mark.parametrize("weight", ["sequence_mean", "token_mean", "constant"])
def test_token_weights(weight, truncated):
    config = reference.settings(algorithm={"weight": weight, "truncated": truncated})
    chosen = list(range(16))
    weights = token_weights(ROLLOUTS, chosen, weight, config)
    want = reference.token_weights(ROLLOUTS, config.algorithm, config.rollout.max_new_tokens)
    for i in chosen:
        np.testing.assert_allclose(weights[i], want[i], rtol=1e-6)


def test_rewards_of_truncated_rollouts():
    ends = lambda **fields: replace(ROLLOUTS[0], turns=(replace(ROLLOUTS[0].turns[0], **fields),))
    cut, whole = (
        ends(finish_reason=finish, grade=Grade(0.7, False, "")) for finish in ("length", "stop")
    )
    for truncated, score in (("grade", 0.7), ("mask", 0.7), ("fixed", -0.5)):
        config = reference.settings(algorithm={"truncated": truncated, "truncated_score": -0.5})
        assert turn_rewards(cut, config) == [score] and turn_rewards(whole, config) == [0.7]
    config = reference.settings(algorithm={"truncated_penalty": 0.5})
    assert turn_rewards(cut, config) == pytest.approx([0.2]) and turn_rewards(whole, config) == [
        0.7
    ]
    with pytest.raises(AssertionError, match="was not graded"):
        turn_rewards(ends(grade=None), config)


def test_rollout_metrics():
    values = rollout_metrics(ROLLOUTS, 4)
    scores, lengths = (
        [r.grade.score for r in ROLLOUTS],
        [len(r.tokens) - r.prompt_length for r in ROLLOUTS],
    )
    assert values["reward/mean"] == pytest.approx(sum(scores) / 16)
    assert values["reward/accuracy"] == sum(r.grade.correct for r in ROLLOUTS) / 16
    same = [len({r.grade.score for r in group}) == 1 for group in GROUPS]
    assert values["reward/zero_variance_groups"] == sum(same) / 4 >= 0.25
    assert values["rollout/length"] == sum(lengths) / 16 and values["rollout/length_max"] == max(
        lengths
    )
    assert values["rollout/truncated"] == sum(r.finish_reason == "length" for r in ROLLOUTS) / 16
    assert values["rollout/tokens"] == sum(lengths)


def test_update_metrics_are_means_over_tokens_of_all_optimizer_steps():
    one = {
        "tokens": 10.0,
        "entropy": 20.0,
        "clip_fraction": 1.0,
        "mismatch": 0.5,
        "loss": 0.3,
        "grad_norm": 2.0,
        "skipped": 0.0,
    }
    two = {
        "tokens": 30.0,
        "entropy": 30.0,
        "clip_fraction": 5.0,
        "mismatch": 9.0,
        "loss": 0.1,
        "grad_norm": 4.0,
        "skipped": 1.0,
    }
    values = update_metrics([one, two], [])
    assert values["policy/entropy"] == 50 / 40 and values["policy/clip_fraction"] == 6 / 40
    assert values["policy/mismatch"] == 0.05  # before any update
    assert values["optimizer/loss"] == pytest.approx(0.2) and values["optimizer/grad_norm"] == 3.0
    assert values["optimizer/skipped"] == 0.5 and "policy/kl" not in values
    assert update_metrics([one | {"kl": 4.0}], [])["policy/kl"] == 0.4
    nothing = dict.fromkeys(one, 0.0)
    assert all(np.isfinite(x) for x in update_metrics([nothing], []).values())


# -- shapes of a run ---------------------------------------------------------------------------------------------------


def test_microbatch_rows():
    layout, mesh = RowLayout(6, 2, 12), train_mesh(2, 2, 2)
    rows = lambda tokens: microbatch_rows(
        reference.settings(train={"microbatch_tokens": tokens}).train, mesh, layout
    )
    assert [rows(120), rows(239), rows(240), rows(1000)] == [4, 4, 8, 32]
    with pytest.raises(
        ValueError,
        match=r"train.microbatch_tokens=119 .* set it to at least 120, or lower train.packs_per_row",
    ):
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
def test_a_run_never_needs_more_microbatches_than_it_compiled(
    group, row_slots, buckets, minibatches, tokens, seed
):
    """More would be another shape, and another compilation in the middle of a run."""
    config = reference.settings(
        rollout={"group_size": group},
        train={
            "packs_per_row": row_slots,
            "pack_buckets": buckets,
            "minibatches": minibatches,
            "microbatch_tokens": tokens,
        },
    )
    trainer = setup.build(config, None).trainer
    rng = np.random.default_rng(seed)
    floats = np.zeros(18, np.float32)

    def item():
        length = 6 + int(rng.choice([12, rng.integers(1, 13)]))
        return TrainingSequence(np.ones(length, np.int32), 6, floats[:length], floats[:length])

    groups = [[item() for _ in range(group)] for _ in range(4 // minibatches)]
    for packed, most in zip(
        pack(groups, trainer.layouts, trainer.rows, trainer.microbatches),
        trainer.microbatches,
        strict=True,
    ):
        assert packed.batch.tokens.shape[0] == max(1, most)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"mesh": {"tensor": 4, "data": 1, "fsdp": -1}},
            "mesh.tensor=4 does not divide the model's 2 key-value heads",
        ),
        (
            {"mesh": {"data": 3, "fsdp": 1}},
            "mesh data=3 fsdp=1 tensor=1 does not fill the 8 devices",
        ),
        ({"train": {"microbatch_tokens": 7}}, "train.microbatch_tokens=7 holds less than one row"),
        ({"rollout": {"num_pages": 1, "page_size": 4}}, "rollout.num_pages=1 is too small"),
        ({"model": {"path": "/no/such/directory"}}, "no such directory"),
        (
            {"model": {"tokenizer": "/no/such/directory"}},
            "no tokenizer in model.tokenizer=/no/such/directory",
        ),
    ],
)
def test_build_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        setup.build(reference.settings(**changes), None)


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
            setup.check(reference.settings(**changes), tmp_path / workdir)
    setup.check(reference.settings(), tmp_path / "a/b/c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sealed"]


def run_config(steps: int, **algorithm) -> config.Config:
    """Seconds to compile, milliseconds to run."""
    return reference.settings(
        model={
            "arch": config.ArchitectureConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
            )
        },
        task={
            "template": "plain",
            "numbers_min": 2,
            "numbers_max": 2,
            "value_max": 9,
            "format_score": 0.3,
        },
        rollout={
            "max_prompt_tokens": 16,
            "max_new_tokens": 24,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 8,
            "temperature": 1.0,
        },
        algorithm=vars(algorithms.PRESETS[algorithm.pop("name")](**algorithm)),
        warm_start={"steps": 30, "batch_size": 8, "lr": 2e-2, "tries": 1},
        optimizer={"lr": 1e-3, "schedule": "constant"},
        critic={"warmup_steps": 1},
        train={
            "steps": steps,
            "microbatch_tokens": 320,
            "packs_per_row": 1,
            "minibatches": 2,
            "checkpoint_every": 2,
        },
        eval={"problems": 8, "samples": 1, "greedy": False},
    )


def test_ppo_with_a_refreshed_reference_resumes_to_the_same_numbers(tmp_path, quick_runs):
    """The critic, both optimizers and the reference are as they were."""

    def settings(steps):
        values = run_config(steps, name="ppo", kl_reward=0.05, kl_coef=0.01, reference_every=1)
        values.train.export_every = 3
        return values

    train.train(settings(4), tmp_path / "whole")
    for steps in (2, 4):
        train.train(settings(steps), tmp_path / "resumed")

    def numbers(workdir):
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        timed = lambda name: (
            name.startswith(("time/", "compile/", "eval")) or name.endswith("per_second")
        )
        return [{name: value for name, value in row.items() if not timed(name)} for row in rows]

    whole, resumed = numbers(tmp_path / "whole"), numbers(tmp_path / "resumed")
    assert len(whole) == 4 and whole == resumed
    assert all(row["critic/loss"] > 0 for row in whole)
    assert (
        "optimizer/grad_norm" not in whole[0] and whole[1]["optimizer/grad_norm"] > 0
    )  # the critic's warm-up
    weights = [
        (tmp_path / name / "export-4/model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    ]
    assert weights[0] == weights[1]
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    assert summary["steps"] == 4 and summary["export"] == str(tmp_path / "whole/export-4")
    earlier = [
        (tmp_path / name / "export-3/model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    ]
    assert earlier[0] == earlier[1] != weights[0]  # train.export_every
    assert (
        not (tmp_path / "whole/export-2").exists() and (tmp_path / "resumed/export-2").exists()
    )  # where it ended


def test_a_critic_starts_from_the_policy_or_from_another_model(tmp_path):
    settings = reference.settings(
        algorithm=vars(algorithms.PRESETS["ppo"]()), train={"microbatch_tokens": 240}
    )
    run = setup.build(settings, None)
    policy = run.trainer.policy
    params = reference.placed(policy, reference.random_params(policy.model))
    state = setup.initial_state(run, params)
    for name in ("embed", "layers", "norm"):
        jax.tree.map(np.testing.assert_array_equal, state.critic.params[name], params[name])
    head = np.asarray(state.critic.params["value"])
    assert "lm_head" not in state.critic.params and 0.5 < head.std() * (len(head) + 1) < 2
    jax.tree.map(lambda x: x.delete(), state.params)  # as donation does
    assert np.isfinite(np.asarray(state.critic.params["embed"])).all()

    other = replace(policy.model, hidden_size=48, tie_word_embeddings=False)
    weights = reference.random_params(other)
    huggingface.save(tmp_path / "critic", other, weights, dtype="float32", hf_config_extra={})
    settings.critic.path = str(tmp_path / "critic")
    run = setup.build(settings, None)
    state = setup.initial_state(
        run, reference.placed(run.trainer.policy, reference.random_params(policy.model))
    )
    jax.tree.map(np.testing.assert_array_equal, state.critic.params["layers"], weights["layers"])
    assert jax.tree.map(np.shape, state.critic.params) == jax.tree.map(
        np.shape, setup.abstract_state(run).critic.params
    )
    huggingface.save(
        tmp_path / "small",
        reference.MODEL,
        reference.random_params(),
        dtype="float32",
        hf_config_extra={},
    )
    settings.critic.path = str(tmp_path / "small")
    with pytest.raises(
        ValueError, match="small has a vocabulary of 61, the policy one of 112: give a model with"
    ):
        setup.build(settings, None)


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tmp_path, quick_runs):
    train.train(run_config(1, name="dapo", dynamic_sampling_rounds=6), tmp_path / "run")
    [row] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rounds = row["rollout/rounds"]
    assert 1 < rounds <= 7 and row["rollout/tokens"] > 0
    samples = [
        json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()
    ]
    later = [sample for sample in samples if int(sample["id"].split("/")[-1]) >= 4 * ROUND_STRIDE]
    assert later and len({sample["score"] for sample in samples[:4]}) > 1  # mixed groups come first


# -- surroundings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_check_and_a_second_one_at_once(number, capsys):
    before = signal.getsignal(number)
    with interrupt.StopSignal() as stop:
        stop.raise_if_stopped_here()
        stop.raise_if_stopped_anywhere()
        os.kill(os.getpid(), number)
        for check in (stop.raise_if_stopped_here, stop.raise_if_stopped_anywhere):
            with pytest.raises(interrupt.Interrupted, match=number.name):
                check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            signal.pause()
    assert signal.getsignal(number) is before
    assert capsys.readouterr().err == f"{number.name}: saving a checkpoint; again to stop at once\n"


def test_reference_is_the_first_policy_whenever_it_was_killed(tmp_path):
    run = setup.build(
        reference.settings(mesh={"data": 2, "fsdp": 2, "tensor": 2}, algorithm={"kl_coef": 0.1}),
        None,
    )
    policy = run.trainer.policy
    params = reference.placed(policy, reference.random_params(policy.model))
    first = load_reference(tmp_path, policy, run.config.algorithm, 0, params, 0)
    jax.tree.map(np.testing.assert_array_equal, first, params)
    later = jax.tree.map(lambda x: x + 1, params)
    for step in (3, 0):  # resumed later, and resumed at step 0 once more
        jax.tree.map(
            np.testing.assert_array_equal,
            load_reference(tmp_path, policy, run.config.algorithm, step, later, 0),
            params,
        )
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(), first, policy.shardings)


def test_reference_is_refreshed_and_kept_as_long_as_a_checkpoint_may_need_it(tmp_path):
    run = setup.build(
        reference.settings(
            algorithm={"kl_coef": 0.1, "reference_every": 2}, train={"microbatch_tokens": 240}
        ),
        None,
    )
    policy = run.trainer.policy
    at = [
        reference.placed(
            policy, jax.tree.map(lambda x, n=n: x + n, reference.random_params(policy.model))
        )
        for n in range(6)
    ]
    held = lambda step, now, oldest: round(
        float(
            load_reference(tmp_path, policy, run.config.algorithm, step, at[now], oldest)["norm"][0]
        )
        - float(at[0]["norm"][0])
    )
    made = lambda: sorted(int(path.name) for path in (tmp_path / "reference").iterdir())
    assert [held(step, step, 0) for step in (0, 2, 4)] == [0, 2, 4] and made() == [0, 2, 4]
    assert held(3, 3, 0) == 2 and held(5, 5, 3) == 4 and made() == [2, 4]


def test_export_is_whole_or_made_again(tmp_path):
    base, rollout = read_base_model(reference.settings().model), reference.settings().rollout
    written = {
        "max_position_embeddings": 32768,
        "bos_token_id": 3,
        "eos_token_id": 99,
        "dtype": "float16",
    }
    base = base._replace(hf_config=written)
    params = reference.random_params(base.model)
    target = tmp_path / "export-3"
    assert export_model(target, base, rollout, params, "float32") == str(target)
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    written = json.loads(files["config.json"])
    assert (
        written["max_position_embeddings"] == 32768 and written["bos_token_id"] == 3
    )  # the loaded model's own
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert written["eos_token_id"] == base.stop_tokens[0]
    (target / "generation_config.json").unlink()  # killed before the end
    (target / "tokenizer.json").write_text("{")
    export_model(target, base, rollout, params, "float32")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    again = jax.tree.map(lambda x: x + 1, params)
    export_model(target, base, rollout, again, "float32")  # whole: stays
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    config, _ = huggingface.load_config(target)
    assert config == base.model
