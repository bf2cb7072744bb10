"""The plan of the server's process: its parts by arithmetic, and its programs compiled."""

import re

import jax
import numpy as np
import pytest
from runs import ROOT

from jzero.blueprint import Topology
from jzero.config import AdapterConfig, Config
from jzero.errors import UserError
from jzero.model import adapters
from jzero.planning import chips
from jzero.planning.arithmetic import adapter_update_bytes
from jzero.planning.models import architecture
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.tinker import __main__ as command
from jzero.tinker import plan
from jzero.tinker.plan import Parts, Residents

RANK = 32
SIZES = ("--context=2048", f"--max-rank={RANK}", "--resident=2", "--resident-snapshots=4")
SPLIT = ("--config.mesh.tensor=8", "--config.mesh.fsdp=1")


def read(model: str, *flags: str) -> tuple[Config, Residents]:
    given, settings = command.parse([f"--model={model}", "--plan=v5e:1x1", *flags])
    return settings, command.residents_of(command.options_of(given))


def described(model: str, topology: str, *flags: str) -> tuple[Config, Parts, Residents, float]:
    """Returns the parts on devices that are only described, and the bytes of a device."""
    settings, residents = read(model, *SIZES, *flags)
    devices = chips.described_devices(topology)
    topology = Topology(devices, 0)
    server = plan.describe_server(settings, architecture(model), topology, residents)
    parts = plan.parts_of(server, residents)
    available = plan.usable_bytes(devices[0].device_kind, devices[0].platform)
    assert available is not None
    return settings, parts, residents, available


@pytest.mark.parametrize(
    ("model", "topology", "flags"),
    [
        ("Qwen3-4B", "v5e:1x1", ("--config.model.base=int8",)),
        ("Qwen3-8B", "v5e:2x4", SPLIT),
        ("Qwen3-8B", "h100:1", ()),
    ],
)
def test_everything_is_on_a_device_at_the_same_time(model, topology, flags) -> None:
    settings, parts, residents, available = described(model, topology, *flags)

    fixed = parts.fixed_bytes(residents)
    sizes = plan.choose_sizes(settings, parts, residents, available)

    page = kv_bytes_per_token(parts.engine) * parts.engine.settings.page_size
    pages = sizes.num_pages / parts.engine.num_shards
    tokens = sizes.microbatch_tokens / plan.row_shards(parts.learner.mesh)
    total = sum(fixed.values()) + pages * page + plan.work_bytes(parts, int(tokens))
    assert 0.6 * available < total <= available
    num_trained = adapters.num_params(
        architecture(model), AdapterConfig(RANK, plan.ALPHA, parts.learner.adapter.targets)
    )
    if parts.learner.mesh.size == 1:
        # Parameters, two moments and the gradient in fp32; snapshots in bfloat16.
        assert fixed["2 training states"] == pytest.approx(2 * 16 * num_trained, rel=1e-4)
        assert fixed["bank of 4 snapshots"] == pytest.approx(4 * 2 * num_trained, rel=1e-4)
    assert "decoder's copy of the base" not in fixed


def compiled_gradients() -> list[tuple[str, str, str, int, float]]:
    """Returns model, base, topology, tokens and GiB of the compiled gradients in lab/memory.md."""
    page = (ROOT / "lab" / "memory.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^## Gradients of adapters\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(
        r"^\| (\S+) \| (\w+) \| ([^,|]+).*? \| ([\d,]+) \| ([\d.]+) \|", table, re.MULTILINE
    )
    return [(m, b, t, int(n.replace(",", "")), float(gib)) for m, b, t, n, gib in rows]


@pytest.mark.parametrize(("model", "base", "topology", "tokens", "gib"), compiled_gradients())
def test_the_gradient_of_an_adapter_is_counted_as_it_is_compiled(
    model, base, topology, tokens, gib
) -> None:
    flags = [f"--config.model.base={base}"] if base == "int8" else []
    flags += SPLIT if topology == "v5e:2x4" else []
    _, parts, _, _ = described(model, topology, *flags)
    counted = adapter_update_bytes(parts.learner, tokens) / plan.GIB
    assert 0.95 * gib < counted < 1.12 * gib


def test_a_server_that_does_not_fit_says_what_helps() -> None:
    # Every chip of a split base has a copy for its decoder, unless the base is split by heads.
    arguments = described("Qwen3-8B", "v5e:2x4")
    with pytest.raises(UserError, match=r"needs .* GiB on a device.*--config.mesh.tensor"):
        plan.choose_sizes(*arguments)


def test_given_sizes_take_precedence() -> None:
    flags = ("--config.rollout.num_pages=100", "--config.train.microbatch_tokens=4096")
    sizes = plan.choose_sizes(*described("Qwen3-8B", "h100:1", *flags))
    assert sizes == plan.Sizes(num_pages=100, microbatch_tokens=4096)
    flags = ("--config.model.base=int8", "--config.rollout.num_pages=1000")
    with pytest.raises(UserError, match=r"num_pages=1000 takes .* at most \d+"):
        plan.choose_sizes(*described("Qwen3-4B", "v5e:1x1", *flags))


@pytest.mark.parametrize("context", [512, 8192])
def test_microbatch_is_the_largest_power_of_two_rows_that_fits(context: int) -> None:
    flags = (f"--context={context}", "--max-rank=8", "--config.model.base=int8")
    settings, parts, residents, available = described("Qwen3-4B", "v5e:1x1", *flags)

    sizes = plan.choose_sizes(settings, parts, residents, available)

    fixed = sum(parts.fixed_bytes(residents).values())
    left = available - fixed - plan.pool_bytes(parts.engine, sizes.num_pages)
    rows = [context << power for power in range(16)]
    possible = [n for n in rows if n <= max(context, plan.MOST_MICROBATCH_TOKENS)]
    fitting = [n for n in possible if plan.work_bytes(parts, n) <= left]
    assert sizes.microbatch_tokens == max(fitting)


def test_all_programs_of_a_tiny_server_are_compiled(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chips.CHIPS, "cpu", chips.CHIPS["TPU v5 lite"])
    settings, residents = read(
        model,
        "--context=128",
        "--max-rank=8",
        "--config.rollout.num_slots=8",
        "--config.rollout.page_size=32",
    )

    made = plan.plan_on(settings, residents, jax.devices()[:1], "cpu", None)

    names = {name.split()[0] for name in made.programs}
    expected = {"prefill", "insert", "generate", "engine-score", "forward_backward", "optim_step"}
    assert names == expected
    assert made.fits and made.work > 0
    # The programs of sampling have the bank as an argument, and those of training the base.
    base = made.parts["frozen base"]
    bank = made.parts["bank of 8 snapshots"]
    for name, one in made.programs.items():
        if name.startswith(("prefill", "generate")):
            assert one.argument_bytes > base + bank
    assert made.programs["forward_backward"].argument_bytes > base
    text = plan.format_plan(made)
    assert text.endswith("fits") and "training states" in text
    assert np.isfinite(made.needed)
