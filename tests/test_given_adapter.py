"""Adapters in PEFT's format that a command is given: it samples from them, or trains them on."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_equal
from test_adapter_runs import with_adapter
from test_train import reproducible_metrics, tiny_run

from jzero import algorithms, export, serve, setup
from jzero.commands import evaluate
from jzero.config import AdapterConfig, Config, put_value, tiny_arch
from jzero.errors import UserError
from jzero.loops import rl, sft
from jzero.model import adapters, huggingface, peft, qwen, tokenizer
from jzero.model.new_model import new_model
from jzero.service.weights import load
from jzero.setup import with_given_adapter
from jzero.workers.pool import Pool

ARCH = tiny_arch(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
GIVEN = AdapterConfig(rank=2, alpha=3.0, targets=("o", "up"))
MODEL = new_model(tokenizer.num_ids(tokenizer.countdown()), ARCH)

pytestmark = pytest.mark.usefixtures("quick_runs")


def random_adapter(settings: AdapterConfig = GIVEN) -> qwen.Params:
    rng = np.random.default_rng(5)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(MODEL, settings))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a random model."""
    path = tmp_path_factory.mktemp("models") / "base"
    params = reference.random_params(MODEL)
    huggingface.save(path, MODEL, params, dtype="float32", hf_config_extra={})
    tokenizer.countdown().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    path = base.with_name("adapter")
    peft.save(path, MODEL, GIVEN, random_adapter(), base=str(base), dtype="float32")
    return path


def config_with(base: Path, adapter: AdapterConfig) -> Config:
    return reference.settings(
        model={"path": str(base), "adapter": adapter}, train={"microbatch_tokens": 240}
    )


# -- sampling --------------------------------------------------------------------------------------


def evaluation(model: Path, adapter: str = "") -> Config:
    config = evaluate.parse(
        f"--model {model} --adapter={adapter} --suite countdown --config.model.dtype=float32 "
        "--config.task.name=countdown --config.task.template=plain --config.eval.limit=4 "
        "--config.rollout.max_prompt_tokens=32 --config.rollout.max_new_tokens=16 "
        "--config.rollout.num_slots=8".split()
    )
    return config[2]


def test_the_decoder_reads_the_base_and_the_factors_unmerged(base: Path, adapter: Path) -> None:
    with Pool(0) as pool:
        _, whole = evaluate.load(evaluation(base, str(adapter)), pool)
        _, plain = evaluate.load(evaluation(base), pool)

    found_base, found_adapter = adapters.split(whole)
    assert_equal(found_adapter, random_adapter())
    assert_equal(found_base, plain)
    assert adapters.scale_of(whole) == 3.0 / 2


def test_evaluation_with_an_adapter_answers_as_the_merged_model_does(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    merged = adapters.merge(MODEL, reference.random_params(MODEL), random_adapter(), GIVEN.scale)
    huggingface.save(tmp_path / "merged", MODEL, merged, dtype="float32", hf_config_extra={})
    tokenizer.countdown().save_pretrained(tmp_path / "merged")
    cases = {
        "adapter": evaluation(base, str(adapter)),
        "merged": evaluation(tmp_path / "merged"),
        "base": evaluation(base),
    }

    for name, config in cases.items():
        evaluate.run(["countdown"], tmp_path / name, config)

    answers = {name: (tmp_path / name / "countdown-greedy.jsonl").read_text() for name in cases}
    assert answers["adapter"] == answers["merged"]
    assert answers["adapter"] != answers["base"]
    summary = json.loads((tmp_path / "adapter/summary.json").read_text())
    assert summary["config"]["model"]["adapter"]["path"] == str(adapter)


def test_several_adapters_are_evaluated_in_one_go_as_each_alone(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    other = AdapterConfig(rank=4, alpha=8.0, targets=("q", "down"))
    peft.save(tmp_path / "b", MODEL, other, random_adapter(other), base=str(base), dtype="float32")
    named = {"one": str(adapter), "two": str(tmp_path / "b")}
    out = tmp_path / "together"

    summaries = evaluate.run_adapters(["countdown"], named, out, evaluation(base))

    assert list(summaries) == ["one", "two"]
    answers = {}
    for name, path in named.items():
        evaluate.run(["countdown"], tmp_path / name, evaluation(base, path))
        answers[name] = (out / name / "countdown-greedy.jsonl").read_text()
        assert answers[name] == (tmp_path / name / "countdown-greedy.jsonl").read_text()
        summary = json.loads((out / name / "summary.json").read_text())
        assert summary["suites"] == summaries[name]
        assert summary["config"]["model"]["adapter"]["path"] == path
    assert answers["one"] != answers["two"]


def test_adapters_by_name_are_read_from_their_flags(base: Path) -> None:
    model = ["--model", str(base), "--suite=countdown"]
    command = evaluate.parse([*model, "--adapter=a=x/y=z", "--adapter=b-2=hub/id"])
    assert command.adapters == {"a": "x/y=z", "b-2": "hub/id"}
    assert command.settings.model.adapter.path == ""
    # A path with a = has no name.
    command = evaluate.parse([*model, "--adapter=x/y=z"])
    assert (command.adapters, command.settings.model.adapter.path) == ({}, "x/y=z")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--adapter a=x --adapter a=y", "the name a twice"),
        ("--adapter x --adapter y", "several adapters without a name"),
        ("--adapter x --adapter a=y", "several adapters need names"),
        ("--adapter ..=x", "give NAME=DIR"),
        ("--adapter =x", "give NAME=DIR"),
        ("--adapter a=x --config.model.adapter.path=y", "remove it, or --adapter"),
    ],
)
def test_wrong_names_of_adapters_are_refused(base: Path, flags: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate.parse(["--model", str(base), "--suite=countdown", *flags.split()])


def test_the_server_takes_an_adapter(base: Path, adapter: Path) -> None:
    _, settings = serve.parse(["--model", str(base), "--adapter", str(adapter)])
    assert settings.model.adapter.path == str(adapter)
    assert with_given_adapter(settings).model.adapter.rank == GIVEN.rank


# -- the settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        AdapterConfig(),
        AdapterConfig(rank=2, alpha=3.0),
        AdapterConfig(targets=("up", "o")),
    ],
)
def test_the_adapter_gives_its_settings(given: AdapterConfig, base: Path, adapter: Path) -> None:
    config = config_with(base, replace(given, path=str(adapter)))

    found = with_given_adapter(config)

    assert found.model.adapter == replace(GIVEN, path=str(adapter))
    assert with_given_adapter(found) == found
    without = config_with(base, AdapterConfig())
    assert with_given_adapter(without) == without


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 3}, "has rank=2, and the settings say otherwise"),
        ({"alpha": 1.0}, "has alpha=3, and"),
        ({"rank": 2, "targets": ("q",)}, "has targets=o,up, and"),
        ({"targets": ("all",)}, "has targets=o,up, and"),
        ({"path": "/nowhere"}, "no such directory: /nowhere: give one that holds adapter_config"),
    ],
)
def test_other_settings_than_the_adapters_are_refused(
    changes: dict, message: str, base: Path, adapter: Path
) -> None:
    given = replace(AdapterConfig(path=str(adapter)), **changes)
    with pytest.raises(UserError, match=message):
        with_given_adapter(config_with(base, given))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "model",
            {"path": ""},
            "was trained on a different base model: set model.path to that model",
        ),
        (
            "warm_start",
            {"steps": 3},
            r"warm_start=warm_start\(steps=3,.*trains the model that the adapter",
        ),
        ("critic", {"path": "/a/critic"}, "is a model of its own, and with model.adapter.path"),
    ],
)
def test_settings_that_change_the_base_are_refused(
    section: str, changes: dict, message: str, base: Path, adapter: Path
) -> None:
    config = config_with(base, AdapterConfig(path=str(adapter)))
    for name, value in changes.items():
        put_value(config, f"{section}.{name}", value)
    with pytest.raises(UserError, match=message):
        with_given_adapter(config)


def test_an_adapter_in_the_place_of_a_model_is_refused(base: Path, adapter: Path) -> None:
    with pytest.raises(UserError, match="holds an adapter and no model: give its base"):
        huggingface.load_config(adapter)


# -- training --------------------------------------------------------------------------------------


def test_rl_starts_from_the_adapter_and_a_new_critic(base: Path, adapter: Path) -> None:
    config = config_with(base, AdapterConfig(path=str(adapter)))
    config.algorithm = algorithms.PRESETS["ppo"]()
    run = setup.build(setup.resolve(with_given_adapter(config)), None)  # pyright: ignore

    state = setup.initial_state(run, load(run.blueprint.without_adapter(), base))

    assert_equal(state.params, random_adapter())
    assert state.critic is not None
    assert not state.critic.params["layers"]["o"]["b"].any()


def sft_config(data: Path, epochs: float) -> Config:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": str(data), "eval_data": str(data), "batch_size": 4, "pack_length": 16}
    return reference.settings(sft=settings | {"epochs": epochs}, optimizer={"lr": 3e-2})


@pytest.mark.usefixtures("explicit_transfers")
def test_fine_tuning_goes_on_from_an_exported_adapter(base: Path, tmp_path: Path) -> None:
    """The second run's first evaluation is the first run's last one, and it learns on."""

    def run(name: str, given: AdapterConfig, epochs: float) -> dict[str, dict[str, float]]:
        config = sft_config(tmp_path / "rows.jsonl", epochs)
        config.model.path = str(base)
        return sft.train(with_adapter(config, given), tmp_path / name)["eval_all"]

    first = run("first", AdapterConfig(rank=4), 4)
    out = export.run(export.Options(tmp_path / "first", tmp_path / "adapter", adapter=True))
    second = run("second", AdapterConfig(path=out), 2)

    assert second["before"]["eval/loss"] == list(first.values())[-1]["eval/loss"]
    assert second["before"]["eval/loss"] < first["before"]["eval/loss"]
    # The same command resumes, with the settings that the adapter has given.
    assert run("second", AdapterConfig(path=out), 4)["before"] == second["before"]
    assert [row["step"] for row in reproducible_metrics(tmp_path / "second")] == list(range(1, 13))


@pytest.mark.usefixtures("explicit_transfers")
def test_the_reference_of_rl_is_the_given_adapter(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Without an update the policy stays its own reference, after a restart as well."""

    def run(steps: int) -> list[dict]:
        config = tiny_run(steps, algorithms.PRESETS["grpo"](kl=algorithms.KL(coef=0.1)))
        config.model.path = str(base)
        config.warm_start = None
        config.optimizer.lr = 0.0
        config.rollout.kv_dtype = "float32"
        config.train.checkpoint_every = 1
        with_adapter(config, AdapterConfig(path=str(adapter)))
        rl.train(config, tmp_path / "run")
        return reproducible_metrics(tmp_path / "run")

    run(1)
    metrics = run(2)

    assert len(metrics) == 2
    assert all(row["policy/kl"] == 0 for row in metrics)
    assert (tmp_path / "run/reference/0/adapter.safetensors").exists()
