"""Ahead-of-time plans: one real compilation for TPUs that are not there, and what is said of it."""

import importlib.util
import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference

from jzero import plan
from jzero.algorithms import PRESETS, needs_critic, needs_reference
from jzero.config import ArchitectureConfig, Config, ModelConfig, RolloutConfig, TrainConfig
from jzero.distributed.mesh import train_mesh
from jzero.model import qwen
from jzero.training.step import make_minibatches, score_and_credit
from jzero.training.trainer import abstract_batches, make_trainer

TOPOLOGY = "v5e:2x4"
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def small(tokens: int = 8 * 160, **rollout) -> Config:
    """Two layers with the heads of Qwen2.5-3B, few shapes, many pages."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    arch = ArchitectureConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, **heads)
    shapes = {
        "prompts": 16,
        "group": 4,
        "max_prompt": 32,
        "max_new": 32,
        "slots": 128,
        "page": 64,
        "pages": 16384,
    }
    return Config(
        name="small",
        model=ModelConfig(arch=arch),
        rollout=RolloutConfig(**shapes | rollout),
        train=TrainConfig(microbatch_tokens=tokens, pack_buckets=1, packs_per_row=4),
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def report(cache):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return plan.run(small(), TOPOLOGY, cache)


def test_a_run_compiles_for_a_slice_that_is_not_there(report):
    assert report["fits"] and report["suggestions"] == []
    assert (report["device_kind"], report["devices"], report["hosts"]) == ("TPU v5 lite", 8, 1)
    names = {name.split()[0] for name in report["programs"]}
    assert names == {"publish", "prefill", "insert", "generate", "update"}
    for found in report["programs"].values():
        assert found.keys() >= {
            "compile_s",
            "argument_bytes",
            "temp_bytes",
            "peak_bytes",
            "kv_bytes",
        }
        assert found["peak_bytes"] > 0
    keys = "config model topology device_kind devices hosts mesh hbm_bytes fits parts phases programs roofline step_s"
    assert json.loads(json.dumps(report)).keys() >= set(keys.split())


def test_decoding_writes_its_pages_in_place(report):
    generate = report["programs"]["generate"]
    assert generate["kv_bytes"] > 2**27
    assert generate["temp_bytes"] < 0.02 * generate["kv_bytes"]


def test_parts_are_what_programs_take(report):
    parts, programs = report["parts"], report["programs"]
    assert programs["publish"]["argument_bytes"] == pytest.approx(parts["weights"], rel=0.02)
    taken = parts["weights"] + parts["optimizer"] + parts["batches"]
    assert programs["update"]["argument_bytes"] == pytest.approx(taken, rel=0.05)
    taken = parts["decoder weights"] + parts["KV pool"]
    assert programs["generate"]["argument_bytes"] == pytest.approx(taken, rel=0.05)


def test_table_names_every_program_and_phase(report):
    text = plan.table(report)
    assert text.startswith(
        "small on v5e:2x4: 8 x TPU v5 lite (data 1 x fsdp 8 x tensor 1), 1 hosts, 15.75 GiB each"
    )
    for name in (*report["programs"], *report["parts"], *report["phases"], *report["roofline"]):
        assert f"\n{name} " in text
    assert text.endswith("\nfits")


@needs_libtpu
def test_what_does_not_fit_says_what_to_change(report, cache, monkeypatch):
    chip = plan.CHIPS["TPU v5 lite"]
    little = chip._replace(hbm=report["phases"]["rollout"] - report["parts"]["KV pool"] / 4)
    monkeypatch.setitem(plan.CHIPS, "TPU v5 lite", little)
    again = plan.run(small(), TOPOLOGY, cache)
    assert (
        not again["fits"]
        and "rollout  " in plan.table(again)
        and "DOES NOT FIT" in plan.table(again)
    )
    pages = next(line for line in again["suggestions"] if "rollout.num_pages=" in line)
    value = int(pages.split("=")[1].split(":")[0])
    fewer = plan.build(small(pages=value), plan.devices(TOPOLOGY))
    generate = plan.measure(fewer.programs["generate"], TOPOLOGY, cache)
    assert plan.totals(fewer, {"generate": generate})["rollout"] <= little.hbm
    monkeypatch.setitem(plan.CHIPS, "TPU v5 lite", chip._replace(hbm=2**20))
    lines = plan.run(small(), TOPOLOGY, cache)["suggestions"]
    for change in ("mesh.tensor=2", "train.packs_per_row=2", "twice the devices"):
        assert any(change in line for line in lines), lines


@needs_libtpu
def test_what_the_compiler_refuses_is_a_figure():
    """16 GiB of zeros."""
    mesh = jax.sharding.Mesh(np.array(plan.devices("v5e:1x1")), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2**16, 2**16), np.float32, sharding=place)
    found = plan.measure((jax.jit(lambda x: (x @ x) @ x), (x,)), "v5e:1x1", None)
    assert "RESOURCE_EXHAUSTED" in found["error"]
    assert found["peak_bytes"] > 16 * plan.GIB


@needs_libtpu
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command(report, cache, monkeypatch, tmp_path, capsys):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from test_plan import small\n\n\ndef get_config():\n    return small()\n")
    (tmp_path / "home" / "jzero").mkdir(parents=True)
    (tmp_path / "home" / "jzero" / "plan").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    arguments = [
        "jzero.plan",
        f"--config={recipe}",
        f"--topology={TOPOLOGY}",
        f"--json={tmp_path / 'plan.json'}",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as fits:
        plan.command()
    assert fits.value.code == 0 and capsys.readouterr().out.endswith("\nfits\n")
    assert json.loads((tmp_path / "plan.json").read_text())["programs"] == report["programs"]
    monkeypatch.setitem(plan.CHIPS, "TPU v5 lite", plan.CHIPS["TPU v5 lite"]._replace(hbm=2**20))
    with pytest.raises(SystemExit) as too_large:
        plan.command()
    assert too_large.value.code == 1 and "does not fit; try" in capsys.readouterr().out


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e-8", "v5e:2x3", "v9:2x2", "h100", "v5p:2x2"])
def test_unknown_topologies_are_told_of_known_ones(topology):
    with pytest.raises(ValueError, match="v5e:2x4|not divisible"):
        plan.devices(topology)


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'jzero\[tpu\]'"):
        plan.devices(TOPOLOGY)
    with pytest.raises(ValueError, match=r"pip install 'jzero\[cuda12\]'"):
        plan.devices("h100:8")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="jax-cuda12-plugin is not installed"
)
def test_gpus_that_are_not_there(cache):
    devices = plan.devices("h100:8")
    publish = plan.build(small(), devices).programs["publish"]
    assert len(devices) == 8 and devices[0].device_kind in plan.CHIPS
    assert plan.measure(publish, "h100:8", cache)["peak_bytes"] > 0


@needs_libtpu
def test_decoding_is_of_one_host():
    """v5e:4x4 is 4 hosts of 4 chips; each decodes its share."""
    plans = plan.build(small(16 * 160, slots=256), plan.devices("v5e:4x4"))
    assert (plans.hosts, plans.engine.mesh.size, plans.engine.max_concurrent_decodes) == (4, 4, 64)
    assert plans.trainer.policy.mesh.size == 16


@needs_libtpu
def test_a_host_of_several_decodes_with_split_heads(cache):
    """The compiler refuses a part of a slice whose devices talk to each other."""
    settings = small(16 * 160, slots=256)
    settings.mesh.tensor = 2
    generate = plan.build(settings, plan.devices("v5e:4x4")).programs["generate"]
    assert plan.measure(generate, "v5e:4x4", cache)["peak_bytes"] > 0


@pytest.mark.parametrize("limit", [0, 5])
def test_search_finds_the_largest_that_fits(limit, monkeypatch):
    """Of microbatches of up to `limit` rows on each of 8 devices. Pages for every slot take little."""
    monkeypatch.setitem(plan.CHIPS, "cpu", plan.CHIPS["TPU v5 lite"])
    tries = []

    def measure(program):
        tries.append(program)
        batches = program[1][1]
        rows = batches[0].tokens.shape[1] if isinstance(batches, tuple) else 0
        return {"peak_bytes": 2**60 if rows > 8 * limit else 0, "argument_bytes": 0}

    values = small(prompts=256, kv_dtype="float32")
    found = plan.search(plan.build(values, jax.devices()), measure)
    assert (
        found
        == {
            "train.microbatch_tokens": limit * 8 * 160,
            "rollout.num_pages": values.rollout.num_slots,
        }
        and len(tries) < 12
    )


def test_known_architectures_have_their_published_sizes():
    """Parameters in billions, of the models' cards."""
    sizes = {"Qwen2.5-0.5B": 0.49, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62}
    sizes |= {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19}
    for name, size in sizes.items():
        model = plan.architecture(name)
        assert qwen.num_params(model) / 1e9 == pytest.approx(size, rel=0.01), name
    with pytest.raises(ValueError, match=r"Qwen2\.5-0\.5B"):
        plan.architecture("Qwen/QwQ-32B")


@pytest.mark.parametrize(("name", "minibatches"), [("grpo", 1), ("trl_018", 1), ("ppo", 2)])
def test_abstract_batches_are_what_a_step_makes(name, minibatches, quick_compilation):
    """Every field that `score` sets, and no other."""
    values = reference.settings(algorithm=vars(PRESETS[name]()), train={"minibatches": minibatches})
    critic = reference.MODEL if needs_critic(values.algorithm) else None
    trainer = make_trainer(values, reference.MODEL, critic, train_mesh(-1, 1, 1, jax.devices()[:1]))
    state = trainer.policy.start(trainer.policy.init_params(0))
    if trainer.critic:
        state = replace(state, critic=trainer.critic.start(trainer.critic.init_params(0)))
    reference_params = state.params if needs_reference(values.algorithm) else None
    rollouts = reference.random_rollouts(0, 4, 4)
    parts = make_minibatches(trainer, rollouts, 1)
    score_and_credit(trainer, state, parts, rollouts, reference_params)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(parts[0].batches) == shapes(abstract_batches(trainer))
