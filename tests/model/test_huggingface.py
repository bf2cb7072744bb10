"""Checkpoints written for transformers and read back, and the message for each broken one."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_equal
from safetensors.numpy import load_file, save_file
from test_qwen import CONFIGS, TOKENS, every_config, logits_of, random_params

from jzero.model import huggingface, qwen

TIED = CONFIGS["qwen2-tied"]  # the model of the fixture `checkpoint`
EXTRA = {"eos_token_id": 5, "bos_token_id": None, "max_position_embeddings": 64}

Weights = dict[str, np.ndarray]  # the tensors of a checkpoint by name


def rewrite(checkpoint: Path, change: Callable[[Weights], None]) -> None:
    """Changes the tensors of a single-file checkpoint in place."""
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Returns the directory "model" with the random parameters of TIED, and nothing beside it."""
    path = tmp_path / "model"
    huggingface.save(path, TIED, random_params(TIED), dtype="float32", hf_config_extra=EXTRA)
    return path


# -- transformers reads what we write --------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.usefixtures("quick_compilation")
@every_config
def test_transformers_loads_what_save_writes(config: qwen.QwenConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = random_params(config)

    huggingface.save(tmp_path / "model", config, params, dtype="float32", hf_config_extra=EXTRA)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == 5
    assert model.config.max_position_embeddings == 64
    leaves = huggingface.flatten(params)
    for leaf, tensors in huggingface.checkpoint_tensors(config).items():
        for tensor in tensors:
            stacked = np.asarray(leaves[leaf])
            expected = tensor.to_stored(stacked if tensor.layer is None else stacked[tensor.layer])
            loaded = model.get_parameter(tensor.name).detach().numpy()
            np.testing.assert_array_equal(loaded, expected)

    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    with torch.no_grad():
        expected_logits = model(tokens).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params), expected_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.peer
def test_transformers_loads_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    config = CONFIGS["qwen3-tied"]
    params = random_params(config)

    huggingface.save(
        tmp_path / "model",
        config,
        params,
        dtype="bfloat16",
        hf_config_extra={},
        max_shard_bytes=30_000,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")

    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    expected = params["embed"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(loaded, expected)


# -- round trips -----------------------------------------------------------------------------------


@every_config
@pytest.mark.parametrize("max_shard_bytes", [50_000, 10**9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_round_trips(
    config: qwen.QwenConfig, dtype: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    params = random_params(config)
    path = tmp_path / "parent" / "model"

    huggingface.save(
        path, config, params, dtype=dtype, hf_config_extra=EXTRA, max_shard_bytes=max_shard_bytes
    )
    read_config, hf_config = huggingface.load_config(path)
    loaded = huggingface.load(path, config)

    files = list(path.glob("*.safetensors"))
    is_split = max_shard_bytes == 50_000
    assert (len(files) > 1) == is_split
    assert (path / "model.safetensors.index.json").exists() == is_split
    if is_split:
        assert all(file.stat().st_size < max_shard_bytes + 10_000 for file in files)
    assert [path.name for path in path.parent.iterdir()] == ["model"]  # no temporary directory

    assert read_config == config
    assert hf_config["eos_token_id"] == 5
    assert hf_config["torch_dtype"] == dtype
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded))
    assert_equal(loaded, qwen.cast(qwen.cast(params, dtype), jnp.float32))


def test_load_places_every_leaf(checkpoint: Path) -> None:
    num_devices = jax.device_count()
    mesh = jax.make_mesh((num_devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding_of(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
        """Splits the second axis where it divides by the number of devices."""
        is_split = leaf.ndim > 1 and leaf.shape[1] % num_devices == 0
        return jax.NamedSharding(mesh, jax.P(None, "fsdp") if is_split else jax.P())

    shardings = jax.tree.map(sharding_of, qwen.abstract(TIED))

    loaded = huggingface.load(checkpoint, TIED, shardings)

    def assert_placed(leaf: jax.Array, sharding: jax.NamedSharding) -> None:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

    jax.tree.map(assert_placed, loaded, shardings)
    assert_equal(loaded, random_params(TIED))


def test_redundant_lm_head_of_a_tied_model_is_ignored(checkpoint: Path) -> None:
    def repeat_the_embedding(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    rewrite(checkpoint, repeat_the_embedding)

    assert "lm_head" not in huggingface.load(checkpoint, TIED)


# -- broken checkpoints ----------------------------------------------------------------------------


def drop_a_tensor(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def add_a_tensor(weights: Weights) -> None:
    weights["extra"] = np.zeros(1)


def shorten_a_tensor(weights: Weights) -> None:
    weights["model.norm.weight"] = np.ones(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_a_tensor, "lacks model.layers.1.mlp.up_proj.weight"),
        (add_a_tensor, "unexpected extra"),
        (
            shorten_a_tensor,
            r"model.norm.weight has shape \(3,\), and config.json describes \(64,\)",
        ),
    ],
)
def test_wrong_tensors_have_an_error_of_one_line(
    checkpoint: Path, change: Callable[[Weights], None], message: str
) -> None:
    rewrite(checkpoint, change)

    with pytest.raises(ValueError, match=message) as error:
        huggingface.load(checkpoint, TIED)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x08" + b"\0" * 20)

    with pytest.raises(ValueError, match="is damaged"):
        huggingface.load(checkpoint, TIED)


def test_a_checkpoint_without_tensors_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()

    with pytest.raises(ValueError, match="no model"):
        huggingface.load(checkpoint, TIED)


def test_a_file_of_the_index_that_does_not_exist_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ValueError, match="download is incomplete"):
        huggingface.load(checkpoint, TIED)


def test_a_config_that_is_not_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")

    with pytest.raises(ValueError, match="is not JSON"):
        huggingface.load_config(checkpoint)


def test_a_directory_without_a_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()

    with pytest.raises(ValueError, match="no config"):
        huggingface.load_config(checkpoint)


def test_resolve_returns_a_directory_as_it_is(checkpoint: Path) -> None:
    assert huggingface.resolve(checkpoint) == checkpoint


def test_resolve_says_why_a_path_is_no_model(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="is a file"):
        huggingface.resolve(checkpoint / "config.json")
    with pytest.raises(ValueError, match="no such directory: /nowhere/model"):
        huggingface.resolve("/nowhere/model")


def test_resolve_without_the_hub_has_an_error_of_one_line() -> None:
    message = "no such directory, and the hub is unreachable"

    with pytest.raises(ValueError, match=message) as error:
        huggingface.resolve("jzero-nobody/no-such-model")
    assert "\n" not in str(error.value)


# -- what save leaves behind -----------------------------------------------------------------------


def test_save_overwrites_nothing(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()

    with pytest.raises(ValueError, match="is not an empty directory"):
        huggingface.save(checkpoint, TIED, random_params(TIED), dtype="float32", hf_config_extra={})

    assert (checkpoint / "model.safetensors").read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model"]


def test_save_fills_an_empty_directory(tmp_path: Path) -> None:
    params = random_params(TIED)

    huggingface.save(tmp_path, TIED, params, dtype="float32", hf_config_extra={})

    assert_equal(huggingface.load(tmp_path, TIED), params)


def test_save_refuses_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int4'"):
        huggingface.save(
            tmp_path / "model", TIED, random_params(TIED), dtype="int4", hf_config_extra={}
        )

    assert list(tmp_path.iterdir()) == []


def test_save_leaves_nothing_half_written(tmp_path: Path) -> None:
    params = random_params(TIED)
    del params["norm"]

    with pytest.raises(KeyError):
        huggingface.save(tmp_path / "model", TIED, params, dtype="float32", hf_config_extra={})

    assert list(tmp_path.iterdir()) == []
