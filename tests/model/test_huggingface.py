"""Checkpoints written for transformers and read back; every way a checkpoint can be wrong has its message."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_qwen import CONFIGS, causal, every_config, random_params

from jzero.model import huggingface, qwen

EXTRA = {"eos_token_id": 5, "bos_token_id": None, "max_position_embeddings": 64}


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def rewrite(path, change):
    """Change the tensors of a single-file checkpoint in place."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path):
    config = CONFIGS["qwen2-tied"]
    huggingface.save(
        tmp_path / "model", config, random_params(config), dtype="float32", hf_config_extra=EXTRA
    )
    return tmp_path / "model"


@pytest.mark.peer
@every_config
def test_transformers_loads_what_save_writes(config, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    params = random_params(config)
    huggingface.save(tmp_path / "model", config, params, dtype="float32", hf_config_extra=EXTRA)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.float32 and model.config.eos_token_id == 5
    assert model.config.max_position_embeddings == 64
    for leaf, group in huggingface.checkpoint_tensors(config).items():
        for tensor in group:
            host = np.asarray(huggingface.flatten(params)[leaf])
            theirs = tensor.to_stored(host if tensor.layer is None else host[tensor.layer])
            np.testing.assert_array_equal(model.get_parameter(tensor.name).detach().numpy(), theirs)

    tokens, positions = jnp.arange(18).reshape(2, 9) * 5, jnp.tile(jnp.arange(9), (2, 1))
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    hidden, _ = qwen.forward(config, params, tokens, positions, causal, dtype=jnp.float32)
    np.testing.assert_allclose(
        qwen.head(config, params, hidden, jnp.float32), want, atol=1e-5, rtol=1e-5
    )


@every_config
@pytest.mark.parametrize("max_shard_bytes", [50_000, 10**9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(config, dtype, max_shard_bytes, tmp_path):
    params = random_params(config)
    path = tmp_path / "a" / "model"  # parents are made
    huggingface.save(
        path, config, params, dtype=dtype, hf_config_extra=EXTRA, max_shard_bytes=max_shard_bytes
    )
    files = list(path.glob("*.safetensors"))
    assert (
        (len(files) > 1)
        == (path / "model.safetensors.index.json").exists()
        == (max_shard_bytes < 10**9)
    )
    assert all(file.stat().st_size < 50_000 + 10_000 for file in files) or len(files) == 1
    read, hf_config = huggingface.load_config(path)
    assert read == config and hf_config["eos_token_id"] == 5 and hf_config["torch_dtype"] == dtype
    loaded = huggingface.load(path, config)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(loaded))
    equal(loaded, jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params))
    assert [p.name for p in path.parent.iterdir()] == ["model"]  # no temporary left


@pytest.mark.peer
def test_transformers_loads_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    config = CONFIGS["qwen3-tied"]
    params = random_params(config)
    huggingface.save(
        tmp_path / "m", config, params, dtype="bfloat16", hf_config_extra={}, max_shard_bytes=30_000
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    embed = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    np.testing.assert_array_equal(embed, params["embed"].astype(jnp.bfloat16).astype(jnp.float32))


def test_load_places_every_leaf(checkpoint):
    config = CONFIGS["qwen2-tied"]
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    shard, replicate = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in [(None, "fsdp"), ()])
    even = lambda x: x.ndim > 1 and x.shape[1] % jax.device_count() == 0
    sharding = jax.tree.map(lambda x: shard if even(x) else replicate, qwen.abstract(config))
    loaded = huggingface.load(checkpoint, config, sharding)
    jax.tree.map(
        lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(),
        loaded,
        sharding,
    )
    equal(loaded, random_params(config))


def test_redundant_lm_head_of_a_tied_model_is_ignored(checkpoint):
    rewrite(
        checkpoint,
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"]}),
    )
    assert "lm_head" not in huggingface.load(checkpoint, CONFIGS["qwen2-tied"])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "lacks model.layers.1.mlp.up_proj.weight",
        ),
        (lambda w: w.update(extra=np.zeros(1)), "unexpected extra"),
        (
            lambda w: w.update({"model.norm.weight": np.ones(3)}),
            r"model.norm.weight is \(3,\), config.json says \(64,\)",
        ),
    ],
)
def test_wrong_tensors_have_one_clear_error(checkpoint, change, message):
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=message) as error:
        huggingface.load(checkpoint, CONFIGS["qwen2-tied"])
    assert "\n" not in str(error.value)


def test_incomplete_directories_have_one_clear_error(checkpoint):
    config = CONFIGS["qwen2-tied"]
    (checkpoint / "model.safetensors").write_bytes(b"\x08" + b"\0" * 20)
    with pytest.raises(ValueError, match="is damaged"):
        huggingface.load(checkpoint, config)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model"):
        huggingface.load(checkpoint, config)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="download is incomplete"):
        huggingface.load(checkpoint, config)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        huggingface.load_config(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match="no config"):
        huggingface.load_config(checkpoint)


def test_resolve_says_what_to_do(checkpoint):
    assert huggingface.resolve(checkpoint) == checkpoint
    with pytest.raises(ValueError, match="is a file"):
        huggingface.resolve(checkpoint / "config.json")
    with pytest.raises(ValueError, match="no such directory: /nowhere/model"):
        huggingface.resolve("/nowhere/model")
    with pytest.raises(ValueError, match="no such directory, and the hub is unreachable") as error:
        huggingface.resolve("jzero-nobody/no-such-model")
    assert "\n" not in str(error.value)


def test_save_overwrites_nothing_and_leaves_nothing_half_written(checkpoint):
    config = CONFIGS["qwen2-tied"]
    params = random_params(config)
    before = (checkpoint / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is not an empty directory"):
        huggingface.save(checkpoint, config, params, dtype="float32", hf_config_extra={})
    assert (checkpoint / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="dtype='int4'"):
        huggingface.save(
            checkpoint.parent / "new", config, params, dtype="int4", hf_config_extra={}
        )
    del params["norm"]
    with pytest.raises(KeyError):
        huggingface.save(
            checkpoint.parent / "new", config, params, dtype="float32", hf_config_extra={}
        )
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model"]
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    huggingface.save(checkpoint, config, random_params(config), dtype="float32", hf_config_extra={})
    equal(huggingface.load(checkpoint, config), random_params(config))
