"""Plans without a compilation: topologies, known models, the programs of a run, the search."""

import importlib.util
import math
from dataclasses import replace
from functools import partial

import jax
import pytest
import reference
from descriptions import algorithm_of
from tiny import ROW_TOKENS, TOPOLOGY, needs_libtpu, small_settings, supervised_trainer

from jzero.algorithms import PRESETS, needs_critic, needs_reference
from jzero.config import AdapterConfig, Config, EvalConfig, MeshConfig, ModelConfig, Sft
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.model.base_model import read_base_model
from jzero.planning import chips
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.chips import smaller_slice
from jzero.planning.compiling import compile_only_devices, measure
from jzero.planning.models import architecture
from jzero.planning.planned_run import build, kv_bytes_per_token
from jzero.planning.roofline import roofline, update_by_layout
from jzero.sharding.mesh import train_mesh
from jzero.training.examples import Example
from jzero.training.step import make_minibatches, score_and_credit
from jzero.training.trainer import abstract_batches, make_trainer
from jzero.types import Batch

# Parameters in billions, of the models' cards.
PUBLISHED_SIZES = {
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.62,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "rho-math-1b-v0.1": 1.1,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
}


def with_adapter(settings: Config, **adapter: object) -> Config:
    return replace(settings, model=replace(settings.model, adapter=AdapterConfig(**adapter)))


@pytest.mark.parametrize(
    ("path", "kv_bytes"),
    [
        # Keys and values of bfloat16: 2 * 2 bytes * layers * KV heads * head_dim.
        ("lkevinzc/rho-1b-sft-GSM8K", 4 * 22 * 4 * 64),
        ("meta-llama/Llama-3.2-3B", 4 * 28 * 8 * 128),
    ],
)
def test_the_memory_of_a_llama_is_counted(path: str, kv_bytes: int) -> None:
    settings = replace(small_settings(), model=ModelConfig(path=path), mesh=MeshConfig())
    run = build(settings, chips.described_devices("v6e:1x1"))
    num_params = qwen.num_params(architecture(path))

    assert run.parts["weights"] == num_params * 4
    assert run.parts["decoder weights"] == num_params * 2
    assert kv_bytes_per_token(run.engine) == kv_bytes
    needed = totals(bytes_of_phases(run))["update"]
    # Weights, their gradients and Adam's moments in fp32, and the copy for decoding.
    assert needed > num_params * 16
    assert roofline(run)["update"].flops > 3 * 2 * num_params


def test_of_an_adapter_the_decoder_of_one_device_reads_the_trainers_base() -> None:
    settings = replace(small_settings(), mesh=MeshConfig())
    devices = chips.described_devices("v5e:1x1")
    adapted = with_adapter(settings, rank=4)
    model = build(settings, devices).trainer.policy.model
    num_trained = adapters.num_params(model, adapted.model.adapter)

    run = build(adapted, devices)

    assert run.parts["weights"] == num_trained * 4  # bytes of fp32
    assert run.parts["optimizer"] == pytest.approx(num_trained * 8, rel=1e-3)  # Adam's moments
    assert run.parts["frozen base"] == qwen.num_params(model) * 2  # bfloat16, once
    assert run.parts["decoder weights"] == num_trained * 2
    assert "reference" not in run.parts
    assert "publish base" not in run.programs


def test_of_an_int8_base_the_integers_are_counted_once() -> None:
    settings = with_adapter(replace(small_settings(), mesh=MeshConfig()), rank=4)
    devices = chips.described_devices("v5e:1x1")
    native = build(settings, devices)
    settings.model.base = "int8"
    model = native.trainer.policy.model
    shapes = [(target.inputs, target.outputs) for target in adapters.linear_layers(model).values()]
    weights = model.num_hidden_layers * sum(math.prod(i + o) for i, o in shapes)
    scales = model.num_hidden_layers * sum(math.prod(outputs) for _, outputs in shapes)

    run = build(settings, devices)

    saved = native.parts["frozen base"] - run.parts["frozen base"]
    assert saved == weights - 4 * scales  # 1 byte in place of 2, and fp32 scales
    unchanged = ("weights", "optimizer", "decoder weights", "KV pool")
    assert all(run.parts[part] == native.parts[part] for part in unchanged)
    assert "publish base" not in run.programs


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_of_a_sampler_in_8_bits_weights_and_pages_are_counted(precision: str) -> None:
    settings = replace(small_settings(), mesh=MeshConfig())
    devices = chips.described_devices("v5e:1x1")
    settings.model.attention = "xla"
    native = build(settings, devices)
    settings.rollout.weights = precision
    settings.rollout.kv_dtype = precision

    run = build(settings, devices)

    model, pages = native.trainer.policy.model, native.engine.pages_per_shard
    linear = adapters.linear_layers(model).values()
    weights = model.num_hidden_layers * sum(math.prod(t.inputs + t.outputs) for t in linear)
    scales = model.num_hidden_layers * sum(math.prod(t.outputs) for t in linear)
    saved = native.parts["decoder weights"] - run.parts["decoder weights"]
    assert saved == weights - 4 * scales  # 1 byte in place of 2, and fp32 scales
    heads = 2 * len(model.attention_layers) * model.num_key_value_heads
    tokens = pages * settings.rollout.page_size
    saved = native.parts["KV pool"] - run.parts["KV pool"]
    assert saved == tokens * heads * (model.head_dim - 4)  # a scale of fp32 for each head
    # A prefill returns keys and values in the type of the computation, as before.
    assert run.parts["prefixes"] == native.parts["prefixes"]
    assert run.parts["weights"] == native.parts["weights"]


def test_of_an_adapter_a_decoder_that_is_split_otherwise_has_a_copy_of_the_base() -> None:
    settings = with_adapter(small_settings(), rank=4)
    run = build(settings, chips.described_devices(TOPOLOGY))

    model, mesh = run.trainer.policy.model, run.mesh
    assert mesh.shape["fsdp"] > 1
    assert run.parts["decoder weights"] > qwen.num_params(model) * 2 / mesh.shape["tensor"]
    assert run.parts["frozen base"] < run.parts["decoder weights"]
    assert "publish base" in run.programs


def test_the_planner_reads_no_adapter() -> None:
    settings = with_adapter(small_settings(), path="somewhere")
    settings.model.path = "Qwen/Qwen3-4B"
    with pytest.raises(UserError, match=r"model.adapter.path=somewhere: .* model.adapter.rank"):
        build(settings, chips.described_devices(TOPOLOGY))


@pytest.mark.parametrize("topology", ["v5e-8", "v5e:2x3", "v9:2x2", "h100", "v5p:2x2"])
def test_an_unknown_topology_is_answered_with_known_ones(topology) -> None:
    with pytest.raises(UserError, match="v5e:2x4|not divisible"):
        compile_only_devices(topology)


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.*\[tpu\]'"):
        compile_only_devices(TOPOLOGY)
    with pytest.raises(UserError, match=r"pip install -e '.*\[cuda12\]'"):
        compile_only_devices("h100:8")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="jax-cuda12-plugin is not installed"
)
def test_gpus_that_are_not_there() -> None:
    devices = compile_only_devices("h100:8")
    publish = build(small_settings(), devices).programs["publish"]
    assert len(devices) == 8
    assert devices[0].device_kind in chips.CHIPS
    assert measure(publish, "h100:8", None).peak_bytes > 0


@pytest.mark.parametrize("name, billions", PUBLISHED_SIZES.items())
def test_known_architectures_have_their_published_sizes(name, billions) -> None:
    assert qwen.num_params(architecture(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_unknown_model_is_answered_with_known_ones() -> None:
    with pytest.raises(UserError, match=r"Qwen2\.5-0\.5B"):
        architecture("Qwen/QwQ-32B")


@needs_libtpu
def test_every_host_decodes_its_share() -> None:
    """v5e:4x4 is 4 hosts of 4 chips."""
    settings = small_settings(num_rows=16, num_slots=256)
    run = build(settings, compile_only_devices("v5e:4x4"))
    assert run.num_hosts == 4
    assert run.engine.mesh.size == 4
    assert run.engine.max_concurrent_decodes == 64
    assert run.mesh.size == 16


@needs_libtpu
def test_two_hosts_decode_together() -> None:
    settings = small_settings(num_rows=16, num_slots=256)
    settings.mesh.tensor = 8
    settings.rollout.hosts_per_decoder = 2
    run = build(settings, compile_only_devices("v5e:4x4"))
    assert (run.num_hosts, run.num_decoders) == (4, 2)
    assert dict(run.engine.mesh.shape) == {"slots": 1, "tensor": 8}
    assert run.engine.max_concurrent_decodes == 128


@pytest.mark.parametrize(
    ("kind", "num_devices", "topology"),
    [
        ("TPU v5 lite", 1, "v5e:1x1"),
        ("TPU v5 lite", 4, "v5e:2x2"),
        ("TPU v6 lite", 8, "v6e:2x4"),
        ("TPU v5 lite", 32, "v5e:4x8"),
        ("TPU v5", 4, "v5p:2x2x1"),
        ("TPU v5", 16, "v5p:2x2x4"),
        ("TPU7x", 16, "tpu7x:2x2x2"),
    ],
)
def test_smaller_slices_have_the_devices_of_a_decoder(
    kind: str, num_devices: int, topology: str
) -> None:
    assert smaller_slice(kind, num_devices) == topology


def test_a_decoder_without_a_slice_is_refused() -> None:
    with pytest.raises(UserError, match="no slice of v5e has the 12 devices of a decoder"):
        smaller_slice("TPU v5 lite", 12)


@needs_libtpu
def test_a_host_that_is_a_slice_decodes_alone() -> None:
    settings = small_settings(num_rows=16, num_slots=256)
    settings.mesh.slices = 2
    run = build(settings, compile_only_devices("2xv5e:2x4"))
    assert (run.num_hosts, run.engine.mesh.size, run.mesh.size) == (2, 8, 16)
    assert run.mesh.shape["slices"] == 2


@pytest.mark.parametrize(
    "name, minibatches",
    [
        ("grpo", 1),  # its fields are among those of trl_018
        ("trl_018", 1),
        ("ppo", 2),
        ("distill", 1),
        ("three parts", 1),
    ],
)
def test_abstract_batches_are_what_a_step_makes(name, minibatches, quick_compilation) -> None:
    """They have every field that scoring sets, and no other."""
    presets = PRESETS | {
        "three parts": partial(algorithm_of, ce_coef=1.0, ce_tokens="correct", kl_coef=0.1)
    }
    settings = reference.settings(
        algorithm=vars(presets[name]()), train={"minibatches": minibatches}
    )
    critic = reference.MODEL if needs_critic(settings.algorithm) else None
    mesh = train_mesh(-1, 1, 1, jax.devices()[:1])
    trainer = make_trainer(settings, reference.MODEL, critic, mesh)
    state = trainer.policy.start(trainer.policy.init_params(0))
    if trainer.critic:
        state = replace(state, critic=trainer.critic.start(trainer.critic.init_params(0)))
    reference_params = state.params if needs_reference(settings.algorithm) else None
    rollouts = reference.random_rollouts(0, 4, 4)

    minibatch, *_ = parts = make_minibatches(trainer, rollouts, 1)
    teacher = reference.GivenTeacher([rollout.tokens.logps for rollout in rollouts])
    score_and_credit(trainer, state, parts, rollouts, reference_params, teacher)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes(minibatch.batches) == shapes(abstract_batches(trainer))


@pytest.mark.parametrize("packs_per_row", [4, 0])
def test_the_update_of_every_layout_is_counted(
    packs_per_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 prompts of 32 tokens with 4 responses each, and two layouts, on 8 devices."""
    chip = chips.CHIPS["TPU v5 lite"]
    monkeypatch.setitem(chips.CHIPS, "cpu", chip)
    settings = small_settings()
    settings.model.remat = "full"
    settings.train = replace(settings.train, pack="auto", packs_per_row=packs_per_row)
    run = build(settings, jax.devices())

    costs = update_by_layout(run)

    # Behind 32 tokens of a prompt, a shared row has 4 slots of 32 or 16 tokens. A plain row has one
    # sequence of 64 or 32 tokens: the whole prompt with 32, or 31 of its tokens with one.
    if packs_per_row:
        row_tokens, responses, prompt_lengths = (160, 96), (32, 16), (32, 32)
        num_prompts, num_rows = 16, 16
    else:
        row_tokens, responses, prompt_lengths = (64, 32), (32, 1), (32, 31)
        num_prompts, num_rows = 64, 64
    assert tuple(costs) == row_tokens
    model = run.trainer.policy.model
    per_token = 2 * qwen.num_params(model)
    if not model.tie_word_embeddings:
        per_token -= 2 * model.vocab_size * 256
    per_pair = 4 * 2 * 16 * 128  # QK and PV, in 2 layers of 16 heads of 128
    weights, moments = run.parts["weights"], run.parts["optimizer"]
    for tokens, response, prompt in zip(row_tokens, responses, prompt_lengths, strict=True):
        num_tokens = 64 * response + num_prompts * prompt
        num_pairs = 64 * response * (prompt + response / 2) + num_prompts * prompt * prompt / 2
        flops = 4 * (num_tokens * per_token + num_pairs * per_pair) / 8  # 4 passes, 8 devices
        rows_of_microbatch = 1280 // (8 * tokens) * 8
        num_calls = -(-num_rows // rows_of_microbatch)
        moved = 2 * (weights + moments)
        moved += num_calls * (3 * weights + 4 * run.parts["decoder weights"])
        cost = costs[tokens]
        assert cost.flops == pytest.approx(flops)
        assert cost.bytes == pytest.approx(moved)
        assert cost.seconds == pytest.approx(max(flops / chip.flops, moved / chip.bandwidth))

    longest, shorter = costs.values()
    assert longest.flops > shorter.flops
    assert roofline(run)["update"] == longest


def fine_tuning_settings(**evaluation: object) -> Config:
    """Returns settings of fine-tuning on 20 examples in rows of 160 tokens, 8 rows a microbatch."""
    settings = small_settings()
    settings.sft = Sft(data="countdown", batch_size=20, pack_length=ROW_TOKENS)
    settings.eval = EvalConfig(**evaluation)
    return settings


@needs_libtpu
def test_the_plan_of_fine_tuning_has_its_programs_and_no_others() -> None:
    run = build(fine_tuning_settings(), compile_only_devices(TOPOLOGY))
    assert set(run.programs) == {"score", "update"}  # the score is the loss of held-out examples
    assert set(run.parts) == {"weights", "optimizer", "batches"}
    [batch] = run.programs["update"][1][1]
    assert batch.tokens.shape == (4, 8, ROW_TOKENS)  # 3 microbatches, rounded up as in a run
    costs = roofline(run)
    assert list(costs) == ["update"]
    assert costs["update"].flops > 6 * qwen.num_params(run.trainer.policy.model) * 20 * 160 / 8 / 2

    with_suites = build(fine_tuning_settings(suites=("countdown",)), compile_only_devices(TOPOLOGY))
    names = {name.split()[0] for name in with_suites.programs}
    assert names == {"publish", "prefill", "insert", "generate", "score", "update"}
    assert {"KV pool", "decoder weights"} <= set(with_suites.parts)


@needs_libtpu
def test_the_planned_batches_of_fine_tuning_are_those_of_a_run() -> None:
    settings = fine_tuning_settings()
    model = read_base_model(settings.model).model
    supervised = supervised_trainer(model, train_mesh(1, 8, 1), settings, ROW_TOKENS)
    example = Example(
        tokens=[1] * (ROW_TOKENS + 1), trained=[False] + [True] * ROW_TOKENS
    )  # it fills a row
    packed = supervised.pack([example] * 20)

    run = build(settings, compile_only_devices(TOPOLOGY))

    def shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
        arrays = vars(batch) | {"tracks": None} | batch.tracks
        return {name: x.shape for name, x in arrays.items() if x is not None}

    [planned] = run.programs["update"][1][1]
    assert shapes(planned) == shapes(packed.batch)
