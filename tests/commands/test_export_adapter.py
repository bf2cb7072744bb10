"""Export of a run that trains an adapter: the adapter alone, or merged into its base."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from huggingface_hub import ModelCard
from reference import assert_equal
from test_export import evaluation, file_names

from jzero import config, export, setup
from jzero.errors import UserError
from jzero.export import Options
from jzero.model import adapters, huggingface, peft, qwen
from jzero.model.base_model import read_base_model
from jzero.run.checkpoint import Checkpoints
from jzero.run.environment import versions
from jzero.run.workdir import claim_workdir
from jzero.training import frozen_base

ADAPTER = config.AdapterConfig(rank=2, alpha=3.0, targets=("o", "up"))


def random_adapter(model: qwen.QwenConfig, step: int) -> qwen.Params:
    rng = np.random.default_rng(step)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(model, ADAPTER))


@pytest.fixture(scope="module")
def settings() -> config.Config:
    return reference.settings(model={"adapter": ADAPTER}, train={"microbatch_tokens": 240})


@pytest.fixture(scope="module")
def model(settings: config.Config) -> qwen.QwenConfig:
    return read_base_model(settings.model).model


@pytest.fixture(scope="module")
def base(model: qwen.QwenConfig) -> qwen.Params:
    return reference.random_params(model)


@pytest.fixture(scope="module")
def workdir(
    settings: config.Config,
    model: qwen.QwenConfig,
    base: qwen.Params,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Returns what a run leaves that trains an adapter, with checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    claim_workdir(workdir, config.to_json(settings))
    (workdir / "versions.json").write_text(json.dumps(versions()))
    huggingface.save(workdir / "base", model, base, dtype="float32", hf_config_extra={})
    weights = setup.initial_weights(settings, read_base_model(settings.model), workdir)
    description = frozen_base.describe_base(weights)

    policy = setup.build(setup.resolve(settings), None).trainer.policy  # pyright: ignore
    checkpoints = Checkpoints(workdir, 0)
    for step in (1, 2):
        state = policy.start(reference.placed(policy, random_adapter(model, step)))
        record = {"eval": {"after": evaluation(0.5)}, "base": description}
        checkpoints.save(step, state, record, wait=True)
    checkpoints.close()
    return workdir


def test_the_adapter_is_that_of_the_checkpoint_bit_for_bit(
    workdir: Path, model: qwen.QwenConfig, tmp_path: Path
) -> None:
    for step in (1, 2):
        out = Path(
            export.run(Options(workdir, tmp_path / str(step), step=step % 2 or None, adapter=True))
        )

        read = peft.read_settings(out, model)
        assert read == ADAPTER
        assert_equal(peft.load(out, model, read), random_adapter(model, step))
        entries = json.loads((out / peft.CONFIG).read_text())
        assert entries["base_model_name_or_path"] == str(workdir / "base")
    assert file_names(tmp_path) == {"1", "2"}, "something was left beside the export"


def test_the_export_holds_the_tokenizer_and_a_card_and_no_model(
    workdir: Path, tmp_path: Path
) -> None:
    out = Path(export.run(Options(workdir, tmp_path / "x", adapter=True, dtype="bfloat16")))

    names = file_names(out)
    assert names >= {*peft.FILES, "README.md", "tokenizer.json", "tokenizer_config.json"}
    assert not names & {"config.json", "model.safetensors"}
    card = ModelCard.load(out / "README.md", ignore_metadata_errors=False)
    assert card.data.library_name == "peft"
    assert "A LoRA adapter of rank 2 with" in card.text
    assert "The weights are bfloat16" in card.text
    export.run(Options(workdir, out, adapter=True, force=True))  # it is known as an export
    export.run(Options(workdir, out, force=True))
    assert not file_names(out) & set(peft.FILES)


def test_without_the_flag_the_adapter_is_merged_once(
    workdir: Path, model: qwen.QwenConfig, base: qwen.Params, tmp_path: Path
) -> None:
    out = Path(export.run(Options(workdir, tmp_path / "x")))

    exported = huggingface.load(out, model)
    merged = adapters.merge(model, base, random_adapter(model, 2), ADAPTER.scale)

    def assert_close(found: jax.Array, expected: jax.Array) -> None:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    jax.tree.map(assert_close, exported, merged)
    assert "A LoRA adapter" not in (out / "README.md").read_text()


def test_a_base_of_the_hub_is_named_by_its_id(tmp_path: Path) -> None:
    settings = reference.settings(model={"adapter": ADAPTER})
    base = read_base_model(settings.model)
    options = Options(tmp_path, tmp_path / "x", adapter=True, push_to_hub="someone/adapter")

    settings.model.path = "Qwen/Qwen3-4B"
    assert export.check_adapter(options, settings, base) == "Qwen/Qwen3-4B"

    settings.model.path = str(tmp_path)
    with pytest.raises(UserError, match="which is not on the hub: remove --adapter"):
        export.check_adapter(options, settings, base._replace(directory=tmp_path))


def test_mistakes_are_refused_before_anything_is_written(workdir: Path, tmp_path: Path) -> None:
    settings = reference.settings()
    with pytest.raises(UserError, match="trains the whole model: remove --adapter"):
        export.check_adapter(
            Options(tmp_path / "whole", tmp_path / "x", adapter=True),
            settings,
            read_base_model(settings.model),
        )
    with pytest.raises(UserError, match="push the merged model, or remove --push-to-hub"):
        export.run(Options(workdir, tmp_path / "x", adapter=True, push_to_hub="someone/adapter"))
    assert not (tmp_path / "x").exists()
