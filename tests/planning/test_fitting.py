"""Whether a run fits, as a function of settings, devices and bytes: no accelerator is attached."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from tiny import small_settings

from configs import countdown
from jzero import setup
from jzero.cli import parse_settings
from jzero.config import Config
from jzero.errors import UserError
from jzero.planning.chips import CHIPS, GIB, DescribedDevice, described_devices
from jzero.planning.fitting import (
    check_memory,
    fit,
    largest_that_fits,
    require_fit,
    setting_flags,
    usable_bytes,
)
from jzero.planning.largest import smallest_batch
from jzero.planning.remedies import (
    OFFLOAD_OPTIMIZER,
    REMEDIES,
    SPLIT_STATE,
    TRAIN_AN_ADAPTER,
    Remedy,
    offload_optimizer,
    split_rows,
)

V5E = float(CHIPS["TPU v5 lite"].hbm_bytes)

# The recipes differ in the lengths of their responses.
RECIPES = ["countdown", "gsm8k", "math"]


def load_recipe(name: str) -> ModuleType:
    return importlib.import_module(f"configs.{name}")


def choose(recipe: str, topology: str, available: float | None) -> tuple[str, str]:
    module = load_recipe(recipe)
    devices = described_devices(topology)
    return largest_that_fits(module.get_config, module.LARGEST_FIRST, devices, available)


def test_the_default_is_the_largest_that_the_memory_holds() -> None:
    """By compiled programs, 3B fits 8 chips of 16 GB and 7B does not (lab/memory.md)."""
    chosen, reason = choose("countdown", "v5e:2x4", V5E)
    assert chosen == "qwen2.5-3b"
    assert "the largest that fits: it needs 1" in reason
    assert "of 15.8 GiB on each of 8 TPU v5 lite" in reason

    assert choose("countdown", "v5e:2x4", 80 * GIB)[0] == "qwen2.5-7b"


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_one_chip_of_16_gb_the_default_is_an_adapter_on_4b(recipe: str) -> None:
    assert choose(recipe, "v5e:1x1", V5E)[0] == "qwen3-4b-lora"


@pytest.mark.parametrize("recipe", RECIPES)
def test_8b_in_8_bits_fits_one_chip_of_16_gb(recipe: str) -> None:
    settings = load_recipe(recipe).get_config("qwen3-8b-lora-int8")
    assert settings.model.path == "Qwen/Qwen3-8B"
    assert settings.model.base == "int8"

    verdict = fit(settings, described_devices("v5e:1x1"), V5E)

    assert verdict.fits
    assert verdict.run.parts["frozen base"] / GIB == pytest.approx(8.79, abs=0.01)


def test_where_nothing_fits_the_default_is_tiny_and_says_so() -> None:
    chosen, reason = choose("math", "v5e:1x1", 4 * GIB)
    assert chosen == "tiny"
    assert "because qwen3-1.7b-lora does not fit 4.0 GiB on each of 1 TPU v5 lite" in reason
    assert choose("math", "v5e:1x1", None) == (
        "tiny",
        "because the memory of TPU v5 lite is not known",
    )


@pytest.mark.parametrize(
    ("asked_for", "advice"),
    [
        ("train.microbatch_tokens=278528", "train.microbatch_tokens="),
        ("rollout.num_pages=400000", "rollout.num_pages="),
        ("mesh.data=4", "mesh.data=1"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_settings_that_do(
    asked_for: str, advice: str
) -> None:
    """Qwen2.5-3B fits 8 chips of 16 GB with the recipe's own settings."""
    settings = parse_settings(countdown.get_config("qwen2.5-3b"), [f"--config.{asked_for}"])
    devices = described_devices("v5e:2x4")

    with pytest.raises(UserError) as refused:
        require_fit(settings, devices, V5E)

    message = str(refused.value)
    assert message.startswith("countdown-qwen2.5-3b needs ")
    assert "GiB on each of 8 TPU v5 lite (" in message
    assert "and there are 15.8 GiB: it fits with --config." in message
    assert message.endswith("--config.memory.check=False starts it nevertheless")
    flags = [word for word in message.split(";")[0].split() if word.startswith("--config.")]
    assert f"--config.{advice}" in " ".join(flags)
    assert fit(parse_settings(settings, flags), devices, V5E).fits


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.change.__name__)
def test_a_remedy_changes_what_it_says_and_saves_memory(remedy: Remedy) -> None:
    """In some settings of a run, each remedy lowers each phase that it names."""
    devices, lowered = described_devices("v5e:2x4"), set()
    for flags in (
        ["model.remat=none", "mesh.data=2", "mesh.fsdp=4", "train.microbatch_tokens=262144"],
        ["model.remat=none", "mesh.fsdp=8", "mesh.data=1", "train.packs_per_row=4"],
        ["model.adapter.rank=8", "mesh.fsdp=8", "mesh.data=1", "rollout.num_pages=200000"],
    ):
        recipe = load_recipe("gsm8k").get_config("qwen2.5-3b-ppo")
        settings = parse_settings(recipe, [f"--config.{flag}" for flag in flags])
        before = fit(settings, devices, V5E)
        changed = remedy.change(settings, before.run)
        if changed is None:
            continue
        different = setting_flags(settings, changed)
        names = {flag.partition("=")[0].removeprefix("--config.") for flag in different}
        assert names <= set(remedy.settings)
        after = fit(changed, devices, V5E)
        lowered |= {name for name in before.phases if after.phases[name] < before.phases[name]}
    assert lowered >= set(remedy.phases)


def test_the_advice_says_what_it_costs() -> None:
    settings = parse_settings(countdown.get_config("qwen2.5-3b"), ["--config.mesh.data=4"])
    with pytest.raises(UserError, match=SPLIT_STATE.costs):
        require_fit(settings, described_devices("v5e:2x4"), V5E)


def test_an_adapter_that_does_not_fit_may_fit_on_an_int8_base() -> None:
    """Qwen3-8B takes 15.3 GiB in bfloat16, and 8.8 GiB with its linear layers in 8 bits."""
    changes = ["--config.model.path=Qwen/Qwen3-8B"]
    settings = parse_settings(countdown.get_config("qwen3-4b-lora"), changes)
    with pytest.raises(UserError, match=r"it fits with .*--config\.model\.base=int8"):
        require_fit(settings, described_devices("v5e:1x1"), V5E)


def test_where_a_whole_model_does_not_fit_an_adapter_is_named_with_its_learning_rate() -> None:
    settings = countdown.get_config("qwen2.5-3b")
    with pytest.raises(UserError) as refused:
        require_fit(settings, described_devices("v5e:1x1"), V5E)
    message = str(refused.value)
    assert "--config.model.adapter.rank=32" in message
    assert "--config.optimizer.lr=1e-05" in message


def test_a_model_that_no_setting_makes_fit_is_refused() -> None:
    least = ("rollout.num_slots=1", "rollout.max_new_tokens=256", "train.microbatch_tokens=512")
    flags = [f"--config.{setting}" for setting in least]
    settings = parse_settings(countdown.get_config("qwen3-8b-lora-int8"), flags)
    with pytest.raises(UserError, match=r"weights and optimizer alone take 9\.\d GiB as it is"):
        require_fit(settings, described_devices("v5e:1x1"), 8 * GIB)


def test_where_one_row_does_not_fit_devices_share_it() -> None:
    """The update of 7B at 32k tokens takes 31.7 GiB with a row on each of 8 devices."""
    settings = countdown.get_config("qwen2.5-7b")
    settings = smallest_batch(settings, num_devices=8, response_tokens=32768)
    devices = described_devices("v6e:2x4")
    whole = fit(settings, devices, 100 * GIB)

    shared_settings = split_rows(settings, whole.run)

    assert shared_settings is not None
    assert shared_settings.mesh.context == 2
    shared = fit(shared_settings, devices, 100 * GIB)
    assert dict(shared.run.mesh.shape) == {"data": 1, "fsdp": 4, "context": 2, "tensor": 1}
    assert shared.run.trainer.rows == [4]
    # Half of the tokens of a device are gone; weights and optimizer stay split over 8.
    assert whole.phases["update"] - shared.phases["update"] > 4 * GIB
    assert shared.phases["publish"] == whole.phases["publish"]
    # 28 heads cannot be shared by 8 devices.
    fourth = split_rows(shared_settings, shared.run)
    assert fourth is not None
    assert split_rows(fourth, fit(fourth, devices, 100 * GIB).run) is None


def test_where_the_decoder_does_not_fit_beside_the_moments_they_wait_on_the_host() -> None:
    """Without them a decode of 7B at 32k tokens has 7 GiB more on each of 8 devices."""
    settings = countdown.get_config("qwen2.5-7b")
    settings = smallest_batch(settings, num_devices=8, response_tokens=32768)
    devices = described_devices("v6e:2x4")
    there = fit(settings, devices, 100 * GIB)

    offloaded_settings = offload_optimizer(settings, there.run)

    assert offloaded_settings is not None
    offloaded = fit(offloaded_settings, devices, 100 * GIB)
    moments = there.run.parts["optimizer"]
    assert moments == pytest.approx(8 * 7.6e9 / 8, rel=0.02)  # two of fp32, on 8 devices
    for phase in ("publish", "rollout"):
        assert there.phases[phase] - offloaded.phases[phase] == moments
    assert there.phases["update"] == offloaded.phases["update"]
    assert offload_optimizer(offloaded_settings, offloaded.run) is None
    # It is among the advice, before what changes the run's numbers.
    assert OFFLOAD_OPTIMIZER.phases == ("publish", "rollout", "score")
    assert REMEDIES.index(OFFLOAD_OPTIMIZER) < REMEDIES.index(TRAIN_AN_ADAPTER)


def test_what_fits_is_not_refused() -> None:
    require_fit(small_settings(), described_devices("v5e:2x4"), V5E)


def test_a_gpu_leaves_what_jax_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "NVIDIA H100 80GB HBM3"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert usable_bytes(kind, "gpu") == 0.75 * CHIPS[kind].hbm_bytes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert usable_bytes(kind, "gpu") == pytest.approx(0.9 * CHIPS[kind].hbm_bytes)
    assert usable_bytes("a kind of its own", "gpu") is None


def tiny(device_gib: float) -> Config:
    settings = countdown.get_config("tiny")
    settings.memory.device_gib = device_gib
    return settings


def test_a_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """memory.device_gib gives the CPU a limit."""
    with pytest.raises(UserError, match=r"countdown-tiny needs .* and there are 0\.0 GiB"):
        setup.check(tiny(0.001), tmp_path / "run")
    assert not (tmp_path / "run").exists()

    anyway = tiny(0.001)
    anyway.memory.check = False
    setup.check(anyway, tmp_path / "run")
    setup.check(tiny(100.0), tmp_path / "run")
    setup.check(tiny(0.0), tmp_path / "run")


def test_a_model_that_nobody_knows_is_not_checked_and_this_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = tiny(0.001)
    settings.model.path = "Qwen/QwQ-32B"
    check_memory(settings)
    printed = capsys.readouterr().out
    assert printed.startswith("memory is not checked: model.path=Qwen/QwQ-32B is neither")


def test_described_devices_are_those_of_a_slice() -> None:
    hosts = [device.process_index for device in described_devices("v5e:4x4")]
    assert hosts == [host for host in range(4) for _ in range(4)]
    assert len(described_devices("tpu7x:2x2x1")) == 8
    assert {device.process_index for device in described_devices("v5e:2x4")} == {0}
    several = described_devices("2xv5e:4x4")
    assert [device.slice_index for device in several] == 16 * [0] + 16 * [1]
    assert [device.process_index for device in several] == [n // 4 for n in range(32)]
    [gpu] = described_devices("l4:1")
    assert gpu == DescribedDevice(0, 0, "gpu", "NVIDIA L4")
    for unknown in ("v5e:2x", "2xh100:8", "0xv5e:2x4", "xv5e:2x4"):
        with pytest.raises(UserError, match="v5e:2x4"):
            described_devices(unknown)
