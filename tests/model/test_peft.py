"""Adapters of PEFT: `peft` computes what we do with ours and with its own, and what is refused."""

import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference import assert_equal
from safetensors.numpy import load_file, save_file
from test_adapters import CONFIGS, LINEAR, every_config, trained_adapter
from test_experts import MOE
from test_qwen import TOKENS, logits_of, random_params, relative_error
from test_qwen3_5_moe import TEXT_ENTRIES

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETTINGS = AdapterConfig(rank=3, alpha=6.0, targets=LINEAR)
MODEL = CONFIGS["qwen2"]
HYBRID_MOE = huggingface.parse_config({**TEXT_ENTRIES, "model_type": "qwen3_5_moe_text"})
BASE = "someone/model"
MAX_PEAK_BYTES = 16 << 20  # of what NumPy and Python allocate for an adapter of 20 KB

Weights = dict[str, np.ndarray]


def save(path: Path, settings: AdapterConfig = SETTINGS, dtype: str = "float32") -> Path:
    adapter = trained_adapter(MODEL, settings)
    peft.save(path, MODEL, settings, adapter, base=BASE, dtype=dtype)
    return path


def read(path: Path, config: qwen.QwenConfig = MODEL) -> tuple[AdapterConfig, qwen.Params]:
    settings = peft.read_settings(path, config)
    return settings, peft.load(path, config, settings)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of an adapter on every linear layer. Tests damage copies."""
    return save(tmp_path_factory.mktemp("good") / "adapter")


@pytest.fixture
def adapter(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "adapter"))


# PEFT reads an attribute that `transformers` will rename.
of_another_version = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


# -- peft reads what we write, and we what peft writes ---------------------------------------------


def logits_of_torch(model: Any) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()


def write_base(path: Path, config: qwen.QwenConfig) -> Any:
    """Writes random weights and returns them as the model of `transformers`."""
    transformers = pytest.importorskip("transformers")
    params = random_params(config)
    huggingface.save(path, config, params, dtype="float32", hf_config_extra={})
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.peer
@of_another_version
@every_config
@pytest.mark.parametrize("targets", [LINEAR, ("q", "o", "down")], ids=["all", "some"])
def test_peft_computes_what_we_do_with_our_adapter(
    config: qwen.QwenConfig, targets: tuple[str, ...], tmp_path: Path
) -> None:
    peer = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", config)
    settings = replace(SETTINGS, targets=targets)
    adapter = trained_adapter(config, settings)

    peft.save(
        tmp_path / "adapter",
        config,
        settings,
        adapter,
        base=str(tmp_path / "base"),
        dtype="float32",
    )
    model = peer.PeftModel.from_pretrained(base, tmp_path / "adapter")
    report = model.load_adapter(tmp_path / "adapter", "again")

    assert not report.unexpected_keys
    assert not [key for key in report.missing_keys if "again" in key]
    expected = logits_of_torch(model)
    joined = adapters.join(random_params(config), adapter, settings.scale)
    np.testing.assert_allclose(logits_of(config, joined), expected, atol=1e-5, rtol=1e-5)
    without = logits_of(config, random_params(config))
    assert relative_error(without, expected) > 1e-2, "the adapter changes nothing"


@pytest.mark.peer
@of_another_version
@every_config
@pytest.mark.parametrize("target_modules", ["all-linear", ["v_proj", "mlp.up_proj"]])
def test_we_compute_what_peft_does_with_its_adapter(
    config: qwen.QwenConfig, target_modules: str | list[str], tmp_path: Path
) -> None:
    peer = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    base = write_base(tmp_path / "base", config)
    torch.manual_seed(0)
    lora = peer.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=target_modules,
        init_lora_weights=False,  # B is random, too
    )
    model = peer.get_peft_model(base, lora)
    model.eval()

    model.save_pretrained(tmp_path / "adapter")
    settings, adapter = read(tmp_path / "adapter", config)

    assert (settings.rank, settings.alpha) == (4, 6.0)
    assert settings.targets == (LINEAR if target_modules == "all-linear" else ("v", "up"))
    expected = logits_of_torch(model)
    joined = adapters.join(random_params(config), adapter, settings.scale)
    np.testing.assert_allclose(logits_of(config, joined), expected, atol=1e-5, rtol=1e-5)
    without = logits_of(config, random_params(config))
    assert relative_error(without, expected) > 1e-2, "the adapter changes nothing"


# -- the output layer ------------------------------------------------------------------------------

UNTIED = replace(MODEL, tie_word_embeddings=False)
with_output = pytest.mark.parametrize("config", [MODEL, UNTIED], ids=["tied", "untied"])


@with_output
@pytest.mark.parametrize("targets", [("q", "lm_head"), ("lm_head",)], ids=["with layers", "only"])
def test_adapters_of_the_output_layer_round_trip(
    config: qwen.QwenConfig, targets: tuple[str, ...], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, targets=targets)
    adapter = trained_adapter(config, settings)

    peft.save(tmp_path / "adapter", config, settings, adapter, base=BASE, dtype="float32")
    found_settings, found = read(tmp_path / "adapter", config)

    assert found_settings == settings
    assert_equal(found, adapter)
    tensors = load_file(tmp_path / "adapter" / peft.WEIGHTS)
    output = {name: tensor.shape for name, tensor in tensors.items() if "lm_head" in name}
    V, E = config.vocab_size, config.hidden_size
    assert output == {
        "base_model.model.lm_head.lora_A.weight": (3, E),
        "base_model.model.lm_head.lora_B.weight": (V, 3),
    }
    entries = json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())
    assert entries["target_modules"][-1] == "lm_head"


def test_the_written_settings_have_the_dropout_of_the_run() -> None:
    written = peft.config_json(CONFIGS["qwen2"], replace(SETTINGS, dropout=0.1), BASE)
    assert written["lora_dropout"] == 0.1
    assert peft.config_json(CONFIGS["qwen2"], SETTINGS, BASE)["lora_dropout"] == 0.0


# PEFT warns that a tied output layer cannot be merged.
of_tied = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


@pytest.mark.peer
@of_another_version
@of_tied
@with_output
def test_peft_computes_what_we_do_with_an_adapter_of_the_output_layer(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    peer = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", config)
    settings = replace(SETTINGS, targets=("all", "lm_head"))
    adapter = trained_adapter(config, settings)

    peft.save(tmp_path / "adapter", config, settings, adapter, base=BASE, dtype="float32")
    model = peer.PeftModel.from_pretrained(base, tmp_path / "adapter")

    expected = logits_of_torch(model)
    joined = adapters.join(random_params(config), adapter, settings.scale)
    np.testing.assert_allclose(logits_of(config, joined), expected, atol=1e-5, rtol=1e-5)
    layers_only = adapters.join(random_params(config), {"layers": adapter["layers"]}, 2.0)
    assert relative_error(logits_of(config, layers_only), expected) > 1e-2


@pytest.mark.peer
@of_another_version
@of_tied
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@with_output
def test_we_compute_what_peft_does_with_its_adapter_of_the_output_layer(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    peer, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    base = write_base(tmp_path / "base", config)
    torch.manual_seed(0)
    lora = peer.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        target_modules=["v_proj", "lm_head"],
        init_lora_weights=False,
    )
    model = peer.get_peft_model(base, lora).eval()
    # By default PEFT saves a copy of the base's output layer.
    model.save_pretrained(tmp_path / "with copy")
    model.save_pretrained(tmp_path / "without", save_embedding_layers=False)

    settings, adapter = read(tmp_path / "without", config)

    assert settings.targets == ("v", "lm_head")
    joined = adapters.join(random_params(config), adapter, settings.scale)
    ours = logits_of(config, joined)
    np.testing.assert_allclose(ours, logits_of_torch(model), atol=1e-5, rtol=1e-5)
    with_copy = peft.load(tmp_path / "with copy", config, settings, base=tmp_path / "base")
    assert_equal(with_copy, adapter)


@with_output
def test_a_copy_of_the_output_layer_has_to_be_that_of_the_base(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    params = random_params(config)
    huggingface.save(tmp_path / "base", config, params, dtype="float32", hf_config_extra={})
    settings = replace(SETTINGS, targets=("lm_head",))
    adapter = trained_adapter(config, settings)
    path = tmp_path / "adapter"
    peft.save(path, config, settings, adapter, base=BASE, dtype="float32")
    tensors = load_file(path / peft.WEIGHTS)
    weight = params["embed"] if config.tie_word_embeddings else params["lm_head"].T
    copy = np.array(weight)

    def load(base: Path | None) -> qwen.Params:
        name = "base_model.model.lm_head.base_layer.weight"
        save_file(tensors | {name: np.ascontiguousarray(copy)}, path / peft.WEIGHTS)
        return peft.load(path, config, settings, base=base)

    assert_equal(load(tmp_path / "base"), adapter)
    with pytest.raises(UserError, match="save_embedding_layers=False"):
        load(None)
    copy[3, 2] += 1
    with pytest.raises(UserError, match="is not .* of the model in .*/base"):
        load(tmp_path / "base")


# -- other ranks and scales of modules -------------------------------------------------------------

UNSLOTH = (  # what Unsloth writes for models with a vision tower, shortened
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|v_proj|q_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "a regular expression": {"target_modules": UNSLOTH},
    "a slow regular expression": {"target_modules": "(a|a?)+" * 30 + "b"},
    "rsLoRA": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5}},
    "a rank of a pattern": {"rank_pattern": {r"^model.layers.\d+.self_attn.q_proj": 5}},
    "alphas": {"alpha_pattern": {"layers.0.self_attn.q_proj": 9, "q_proj": 0.5}},
    "all": {
        "target_modules": UNSLOTH,
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 1, "up_proj": 4},
        "alpha_pattern": {"q_proj": 9},
    },
}


def rank_and_scale(entries: dict[str, Any], module: str) -> tuple[int, float]:
    """Returns what PEFT uses for a module: `LoraModel._create_and_replace` and `update_layer`."""

    def of_pattern(patterns: dict[str, Any], default: float) -> Any:
        for key, value in patterns.items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default

    rank = of_pattern(entries.get("rank_pattern", {}), entries["r"])
    alpha = of_pattern(entries.get("alpha_pattern", {}), entries["lora_alpha"])
    return rank, alpha / math.sqrt(rank) if entries.get("use_rslora") else alpha / rank


def write_variant(path: Path, changes: dict[str, Any], start: str = "model.") -> dict[str, Any]:
    """Writes an adapter of random factors on q and up; returns the change of every weight."""
    entries = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "up_proj"],
    }
    entries |= changes
    rng = np.random.default_rng(0)
    stored, expected = {}, {}
    tensors = huggingface.checkpoint_tensors(MODEL)
    for leaf in ("layers.q", "layers.up"):
        for tensor in tensors[leaf]:
            module = tensor.name.removesuffix(".weight")
            rank, scale = rank_and_scale(entries, module)
            outputs, inputs = tensor.stored_shape
            a, b = (rng.normal(size=shape) for shape in ((rank, inputs), (outputs, rank)))
            name = f"base_model.model.{start}{module.removeprefix('model.')}"
            stored[f"{name}.lora_A.weight"] = a.astype(np.float32)
            stored[f"{name}.lora_B.weight"] = b.astype(np.float32)
            expected[tensor.name] = scale * b @ a
    path.mkdir(parents=True)
    save_file(stored, path / peft.WEIGHTS)
    (path / peft.CONFIG).write_text(json.dumps(entries))
    return expected


def assert_changes(path: Path, expected: dict[str, Any]) -> None:
    """Asserts that the adapter in a directory changes the weights so."""
    settings, factors = read(path)
    zeros = jax.tree.map(jnp.zeros_like, random_params(MODEL))
    merged = adapters.merge(MODEL, zeros, factors, settings.scale)
    assert settings.targets == ("q", "up")
    for leaf in settings.targets:
        for tensor in huggingface.checkpoint_tensors(MODEL)[f"layers.{leaf}"]:
            change = tensor.to_stored(np.asarray(merged["layers"][leaf][tensor.layer]))
            np.testing.assert_allclose(change, expected[tensor.name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_modules_have_the_ranks_and_scales_of_peft(variant: str, tmp_path: Path) -> None:
    expected = write_variant(tmp_path / "theirs", VARIANTS[variant])

    assert_changes(tmp_path / "theirs", expected)

    # Our copy has one rank and one scale, and computes the same.
    settings, factors = read(tmp_path / "theirs")
    peft.save(tmp_path / "ours", MODEL, settings, factors, base=BASE, dtype="float32")
    assert_changes(tmp_path / "ours", expected)
    assert_equal(peft.load_to_host(tmp_path / "theirs", MODEL, settings), factors)


@pytest.mark.parametrize("start", ["", "model.language_model.", "language_model.model."])
def test_other_prefixes_of_modules_are_read(start: str, tmp_path: Path) -> None:
    assert_changes(tmp_path / "a", write_variant(tmp_path / "a", VARIANTS["rsLoRA"], start))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern with q_proj=0"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern with q_proj=4"),
        ({"rank_pattern": [4]}, "rank_pattern="),
        ({"alpha_pattern": {".*q_proj": 4}}, r"alpha_pattern with .\*q_proj: only endings"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*lm_head.*complete weights"),
        ({"use_rslora": "yes"}, "use_rslora=yes"),
    ],
)
def test_what_is_no_pattern_is_refused(
    changes: dict[str, Any], message: str, adapter: Path
) -> None:
    entries = json.loads((adapter / peft.CONFIG).read_text()) | changes
    (adapter / peft.CONFIG).write_text(json.dumps(entries))

    with pytest.raises(UserError, match=message):
        peft.read_settings(adapter, MODEL)


def test_a_rank_that_no_entry_names_is_refused(tmp_path: Path) -> None:
    write_variant(tmp_path / "a", {"rank_pattern": {"q_proj": 2}})
    entries = json.loads((tmp_path / "a" / peft.CONFIG).read_text())
    (tmp_path / "a" / peft.CONFIG).write_text(json.dumps(entries | {"rank_pattern": {"q_proj": 7}}))

    with pytest.raises(UserError, match="q_proj has rank 2, and r and rank_pattern"):
        peft.read_settings(tmp_path / "a", MODEL)


@pytest.mark.peer
@of_another_version
@pytest.mark.parametrize("variant", ["rsLoRA", "ranks", "alphas", "all"])
def test_peft_computes_the_same_from_other_ranks_and_scales(variant: str, tmp_path: Path) -> None:
    peer = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", MODEL)
    write_variant(tmp_path / "adapter", {"task_type": "CAUSAL_LM", **VARIANTS[variant]})

    model = peer.PeftModel.from_pretrained(base, tmp_path / "adapter")
    settings, factors = read(tmp_path / "adapter")

    joined = adapters.join(random_params(MODEL), factors, settings.scale)
    expected = logits_of_torch(model)
    np.testing.assert_allclose(logits_of(MODEL, joined), expected, atol=2e-4, rtol=1e-3)


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.peer
@of_another_version
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_peft_computes_what_we_do_with_adapters_on_experts(tmp_path: Path) -> None:
    """The module of every expert has an adapter, as before `transformers` 5 fused them."""
    peer = pytest.importorskip("peft")
    base = write_base(tmp_path / "base", MOE)
    settings = replace(SETTINGS, targets=())
    adapter = trained_adapter(MOE, settings)

    peft.save(
        tmp_path / "adapter", MOE, settings, adapter, base=str(tmp_path / "base"), dtype="float32"
    )
    model = peer.PeftModel.from_pretrained(base, tmp_path / "adapter")

    joined = adapters.join(random_params(MOE), adapter, settings.scale)
    ours = logits_of(MOE, joined)
    np.testing.assert_allclose(ours, logits_of_torch(model), atol=1e-5, rtol=1e-5)
    attention = {"layers": {name: adapter["layers"][name] for name in "qkvo"}}
    without = logits_of(MOE, adapters.join(random_params(MOE), attention, settings.scale))
    assert relative_error(without, ours) > 1e-2, "the adapters of the experts change nothing"


@pytest.mark.parametrize("config", [MOE, HYBRID_MOE], ids=["experts", "hybrid"])
@pytest.mark.parametrize(
    "targets", [(), ("experts_up", "experts_down"), ("q", "shared_up")], ids=["all", "some", "none"]
)
def test_adapters_of_experts_round_trip(
    config: qwen.QwenConfig, targets: tuple[str, ...], tmp_path: Path
) -> None:
    if config is MOE and "shared_up" in targets:
        targets = ("q",)
    settings = replace(SETTINGS, targets=targets)
    adapter = trained_adapter(config, settings)

    peft.save(tmp_path / "adapter", config, settings, adapter, base=BASE, dtype="float32")
    found_settings, found = read(tmp_path / "adapter", config)

    assert found_settings.targets == tuple(adapters.targets(config, settings))
    assert_equal(found, adapter)


def test_an_ending_that_other_layers_have_too_is_longer() -> None:
    def target_modules(*targets: str) -> list[str]:
        return peft.config_json(HYBRID_MOE, replace(SETTINGS, targets=targets), BASE)[
            "target_modules"
        ]

    assert target_modules("q", "experts_up", "shared_up") == ["q_proj", "up_proj"]
    assert target_modules("shared_up") == ["shared_expert.up_proj"]
    assert target_modules("experts_up")[:2] == ["0.up_proj", "1.up_proj"]


# -- the entries of the config ---------------------------------------------------------------------


@pytest.mark.peer
def test_our_config_has_the_entries_and_the_values_of_pefts_own(good: Path) -> None:
    peer = pytest.importorskip("peft")

    loaded = peer.PeftConfig.from_pretrained(good).to_dict()

    written = json.loads((good / peft.CONFIG).read_text())
    for name, value in written.items():
        found = sorted(loaded[name]) if isinstance(loaded[name], set) else loaded[name]
        assert found == (sorted(value) if isinstance(value, list) else value), name
    off = peer.LoraConfig(task_type="CAUSAL_LM", inference_mode=True).to_dict()
    for name in loaded.keys() - {"r", "lora_alpha", "target_modules", "base_model_name_or_path"}:
        assert loaded[name] == off[name], name


# -- the files -------------------------------------------------------------------------------------


def test_the_files_hold_what_vllm_and_sglang_look_for(adapter: Path) -> None:
    assert {path.name for path in adapter.iterdir()} == set(peft.FILES)
    entries = json.loads((adapter / "adapter_config.json").read_text())
    assert entries["peft_type"] == "LORA"
    assert entries["base_model_name_or_path"] == BASE
    assert (entries["r"], entries["lora_alpha"]) == (3, 6)
    assert isinstance(entries["lora_alpha"], int)
    assert entries["target_modules"] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    weights = load_file(adapter / "adapter_model.safetensors")
    E, F = MODEL.hidden_size, MODEL.intermediate_size
    heads = MODEL.num_attention_heads * MODEL.head_dim
    kv = MODEL.num_key_value_heads * MODEL.head_dim
    shapes = {
        "self_attn.q_proj": (heads, E),
        "self_attn.k_proj": (kv, E),
        "self_attn.v_proj": (kv, E),
        "self_attn.o_proj": (E, heads),
        "mlp.gate_proj": (F, E),
        "mlp.up_proj": (F, E),
        "mlp.down_proj": (E, F),
    }
    expected = {}
    for layer in range(MODEL.num_hidden_layers):
        for module, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            expected[f"{prefix}.lora_A.weight"] = (3, inputs)
            expected[f"{prefix}.lora_B.weight"] = (outputs, 3)
    assert {name: array.shape for name, array in weights.items()} == expected


@every_config
def test_the_stored_factors_change_the_stored_weight_as_ours_change_ours(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    """W' = W + (alpha / r) B A, in the shapes of torch, is our merged weight as it is exported."""
    base, adapter = random_params(config), trained_adapter(config, SETTINGS)
    merged = adapters.merge(config, base, adapter, SETTINGS.scale)

    peft.save(tmp_path / "adapter", config, SETTINGS, adapter, base=BASE, dtype="float32")

    stored = load_file(tmp_path / "adapter" / peft.WEIGHTS)
    tensors = huggingface.checkpoint_tensors(config)
    for name in LINEAR:
        for tensor in tensors[f"layers.{name}"]:
            module = f"base_model.model.{tensor.name.removesuffix('.weight')}"
            change = stored[f"{module}.lora_B.weight"] @ stored[f"{module}.lora_A.weight"]
            before = tensor.to_stored(np.asarray(base["layers"][name][tensor.layer]))
            after = tensor.to_stored(np.asarray(merged["layers"][name][tensor.layer]))
            np.testing.assert_allclose(before + 6 / 3 * change, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "targets"), [("float32", LINEAR), ("bfloat16", ("v", "down")), ("float32", ())]
)
def test_an_adapter_round_trips_bit_for_bit(
    dtype: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, targets=targets, alpha=2.5)
    expected = qwen.cast(qwen.cast(trained_adapter(MODEL, settings), dtype), jnp.float32)

    found_settings, found = read(save(tmp_path / "parent" / "adapter", settings, dtype))

    assert found_settings == replace(settings, targets=targets or LINEAR)
    assert_equal(found, expected)
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["adapter"]


def test_load_places_every_leaf_and_casts_it(good: Path) -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding_of(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
        is_split = leaf.shape[1] % 8 == 0
        return jax.NamedSharding(mesh, jax.P(None, "fsdp") if is_split else jax.P())

    shardings = jax.tree.map(sharding_of, adapters.abstract(MODEL, SETTINGS))

    loaded = peft.load(good, MODEL, SETTINGS, shardings, "bfloat16")

    def assert_placed(leaf: jax.Array, sharding: jax.NamedSharding) -> None:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

    jax.tree.map(assert_placed, loaded, shardings)
    assert_equal(loaded, qwen.cast(trained_adapter(MODEL, SETTINGS), jnp.bfloat16))


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "float32"), ("qwen3", "bfloat16")])
def test_a_merged_export_is_the_unmerged_model_up_to_rounding(
    name: str, dtype: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    base = random_params(config)
    adapter = trained_adapter(config, SETTINGS)
    joined = adapters.join(base, adapter, SETTINGS.scale)

    huggingface.save(tmp_path / "model", config, joined, dtype=dtype, hf_config_extra={})

    exported = huggingface.load(tmp_path / "model", config)
    # The merged weights are rounded once, and nothing else is.
    rounded = qwen.cast(adapters.merge(config, base, adapter, SETTINGS.scale), dtype)
    unit = 2.0**-22 if dtype == "float32" else 2.0**-7  # of the last bit: NumPy sums in its order

    def assert_close(found: jax.Array, expected: jax.Array) -> None:
        np.testing.assert_allclose(found, expected.astype(jnp.float32), rtol=unit, atol=1e-7)

    jax.tree.map(assert_close, exported, rounded)
    error = relative_error(logits_of(config, exported), logits_of(config, joined))
    assert error < (1e-5 if dtype == "float32" else 2e-2)


def test_save_does_not_replace_a_directory(adapter: Path) -> None:
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        save(adapter)
    with pytest.raises(UserError, match="dtype='float16' is not one of"):
        save(adapter.with_name("other"), dtype="float16")
    assert not adapter.with_name("other").exists()


# -- adapter_config.json that is read --------------------------------------------------------------


def entries(path: Path, **changes: Any) -> None:
    """Changes entries of adapter_config.json; None removes one."""
    file = path / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "target_modules",
    [
        "all-linear",
        ["self_attn." + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        + ["mlp.gate_proj", "up_proj", "layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
    ],
    ids=["all-linear", "longer names"],
)
def test_modules_have_all_the_names_that_peft_gives_them(
    target_modules: Any, adapter: Path
) -> None:
    entries(adapter, target_modules=target_modules)

    settings, found = read(adapter)

    assert settings == SETTINGS
    assert_equal(found, trained_adapter(MODEL, SETTINGS))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.1, "peft_version": "0.21.2", "revision": "main"},
        {"megatron_core": "megatron.core", "qalora_group_size": 16},
        {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}, "task_type": None},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"setting_of_2030": None, "other_of_2030": False, "third_of_2030": {}},
    ],
)
def test_entries_that_change_nothing_are_accepted(changes: dict[str, Any], adapter: Path) -> None:
    entries(adapter, **changes)
    assert read(adapter)[0] == SETTINGS


# -- what is refused -------------------------------------------------------------------------------


def assert_refused(path: Path, *words: str) -> None:
    """Asserts that a directory is refused in one line with some words."""
    with pytest.raises(UserError) as caught:
        read(path)

    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    for word in (str(path), *words):
        assert word in message


UNSUPPORTED: dict[str, Any] = {
    "use_dora": True,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "exclude_modules": ["q_proj"],
    "layers_to_transform": [0],
    "layer_replication": [[0, 2]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "alora_invocation_tokens": [1],
    "init_lora_weights": "pissa",
    "task_type": "SEQ_CLS",
    "peft_type": "IA3",
    "setting_of_2030": 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_that_is_not_implemented_is_refused_by_name(name: str, adapter: Path) -> None:
    entries(adapter, **{name: UNSUPPORTED[name]})
    assert_refused(adapter, peft.CONFIG, "not implemented", f"{name}=")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"r": None}, "lacks r"),
        ({"r": 0}, "r=0 is not between 1 and"),
        ({"r": 10**12}, "r=1000000000000 is not between 1 and"),
        ({"r": True}, "r=True is not a whole number"),
        ({"r": 2.5}, "r=2.5 is not a whole number"),
        ({"r": 17}, "r=17 is above 16, the rank of the weight k itself"),
        ({"lora_alpha": 0}, "lora_alpha=0 is not between"),
        ({"lora_alpha": "16"}, "lora_alpha=16 is not a number"),
        ({"lora_alpha": float("nan")}, "NaN is not a JSON number"),
        ({"peft_type": None}, "lacks peft_type"),
        ({"peft_type": ["LORA"]}, "is not text"),
        ({"task_type": 1}, "task_type=1 is not text"),
        ({"target_modules": None}, "target_modules=None is neither"),
        ({"target_modules": []}, "target_modules=[] is neither"),
        ({"target_modules": ["q_proj", 1]}, "is neither a list of names"),
        ({"target_modules": ["q_proj", "norm"]}, "target_modules has norm, which is no"),
        ({"target_modules": ["proj"]}, "target_modules has proj, which is not a linear layer"),
        ({"target_modules": ["layers.0.mlp.up_proj"]}, "not that module of the other layers"),
        ({"bias": "all\n\x1b[31m" * 1000}, "bias="),
    ],
)
def test_a_damaged_config_is_refused(changes: dict[str, Any], word: str, adapter: Path) -> None:
    entries(adapter, **changes)
    assert_refused(adapter, peft.CONFIG, word)


def replace_weights(change: Callable[[Weights], Any]) -> Callable[[Path], None]:
    """Returns a function that changes the tensors of an adapter in place."""

    def damage(path: Path) -> None:
        weights = load_file(path / peft.WEIGHTS)
        change(weights)
        save_file(weights, path / peft.WEIGHTS)

    return damage


PLACE = "base_model.model.model.layers.1.self_attn.o_proj"
A, B = f"{PLACE}.lora_A.weight", f"{PLACE}.lora_B.weight"
HEAD_A = "base_model.model.lm_head.lora_A.weight"


def link_outside(path: Path) -> None:
    outside = path.with_name("outside")
    shutil.move(path / peft.WEIGHTS, outside)
    (path / peft.WEIGHTS).symlink_to(outside)


def cut(path: Path) -> None:
    file = path / peft.WEIGHTS
    file.write_bytes(file.read_bytes()[:-4])


def pickle(path: Path) -> None:
    (path / peft.WEIGHTS).rename(path / peft.PICKLED)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no file": (lambda path: (path / peft.WEIGHTS).unlink(), "no adapter_model.safetensors in"),
    "a pickle": (pickle, "adapter_model.bin may run code and is not read"),
    "a link that leads outside": (link_outside, "leads out of its directory"),
    "a short file": (cut, "is damaged"),
    "no config": (lambda path: (path / peft.CONFIG).unlink(), "no adapter_config.json in"),
    "a config of text": (lambda path: (path / peft.CONFIG).write_text("r: 3") and None, "not JSON"),
    "a tensor too few": (replace_weights(lambda weights: weights.pop(A)), f"lacks {A}"),
    "a tensor too many": (
        replace_weights(lambda weights: weights.update({HEAD_A: weights[A]})),
        f"holds unexpected {HEAD_A}",
    ),
    "another name": (
        replace_weights(lambda weights: weights.update({"q": weights.pop(B)})),
        f"lacks {B}",
    ),
    "a transposed factor": (
        replace_weights(lambda weights: weights.update({A: weights[A].T.copy()})),
        f"{A} is (32, 3), and (3, 32) by adapter_config.json",
    ),
    "another rank": (lambda path: entries(path, r=4), "is (3, 48), and (4, 48)"),
    "other targets": (lambda path: entries(path, target_modules=["q_proj"]), "holds unexpected"),
    "integers": (
        replace_weights(lambda weights: weights.update({A: weights[A].astype(np.int8)})),
        f"{A} is I8, only F32, BF16, F16 are read",
    ),
    "doubles": (
        replace_weights(lambda weights: weights.update({A: weights[A].astype(np.float64)})),
        f"{A} is F64, only F32, BF16, F16 are read",
    ),
    "no number": (
        replace_weights(lambda weights: weights[B].fill(np.nan)),
        f"{B} holds NaN or infinite numbers",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_directory_is_refused(name: str, adapter: Path) -> None:
    damage, word = DAMAGES[name]
    damage(adapter)
    assert_refused(adapter, word)


def test_nothing_is_allocated_for_an_adapter_that_is_refused(adapter: Path) -> None:
    """The file says that each factor has 256 MiB, and its config says the same."""
    model = replace(MODEL, vocab_size=8, hidden_size=8192, intermediate_size=8192)
    entries(adapter, r=8192, target_modules=["up_proj"])
    settings = peft.read_settings(adapter, model)
    names = {t.name: t for ts in peft.adapter_tensors(model, settings).values() for t in ts}
    size = 4 * 8192 * 8192
    header = {
        name: {
            "dtype": "F32",
            "shape": list(tensor.stored_shape),
            "data_offsets": [number * size, (number + 1) * size],
        }
        for number, (name, tensor) in enumerate(names.items())
    }
    text = json.dumps(header).encode()
    (adapter / peft.WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    tracemalloc.start()

    with pytest.raises(UserError, match="is damaged"):
        peft.load(adapter, model, settings)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory: .*nowhere: give one that holds"):
        peft.resolve(tmp_path / "nowhere")


def test_an_adapter_of_another_model_is_refused(good: Path) -> None:
    deeper = replace(MODEL, num_hidden_layers=4)
    settings = peft.read_settings(good, deeper)
    with pytest.raises(UserError, match=r"lacks base_model.model.model.layers.2.* and 25 more"):
        peft.load(good, deeper, settings)


def test_bfloat16_of_peft_is_read_exactly(adapter: Path) -> None:
    rounded: Weights = {}

    def round_all(weights: Weights) -> None:
        weights.update({name: a.astype(ml_dtypes.bfloat16) for name, a in weights.items()})
        rounded.update(weights)

    replace_weights(round_all)(adapter)

    _, found = read(adapter)

    expected = rounded[A].astype(np.float32)
    np.testing.assert_array_equal(found["layers"]["o"]["a"][1].reshape(32, 3).T, expected)
