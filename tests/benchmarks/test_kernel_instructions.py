"""The instructions of the TPU's decode kernel are read from what libtpu writes, and counted."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from jzero.attention.tpu_decode import Sizes, sizes_of

ROOT = Path(__file__).resolve().parents[2]

# As libtpu writes it: header, addresses, labels, one > for each loop around, and empty bundles.
BUNDLES = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1   :  { %s2 = sld [smem:[#allocation1]]
base_bounds: (4, 1) }
   0x2 LB: > { %s3 = sadd.s32 1, %s1 }
   0x3   : > { %4 = sbr.rel target = $region1 }
   0x4   :  {}
   0x5 LB: > { %s5 = smov 0 }
   0x6 LB: >> { %s6 = smov 0 }
   0x7   : >> { %s7 = smov 0 }
   0x8   :  {} /* End region 3 */
   0x9 LB: >> { %s8 = smov 0 }
   0xa PF: > { %s9 = smov 0 }
   0xb PF:  { %s10 = smov 0 }
"""


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("kernel_instructions")


def kernel_sizes(num_slots: int, group: int) -> Sizes:
    """Returns those of Qwen2.5-3B with pages of 64 tokens."""
    q = jax.ShapeDtypeStruct((num_slots, 16, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((2, 1000, 64, 128), jnp.bfloat16)
    return sizes_of(q, 2, pool, 20, num_slots // group, 1)


def test_bundles_are_those_of_their_loop(instructions: ModuleType) -> None:
    kernel = instructions.loops_of(BUNDLES)

    first, second = kernel.inner
    assert kernel.bundles == 3
    assert (first.bundles, first.inner) == (3, [])
    assert second.bundles == 2
    assert [loop.bundles for loop in second.inner] == [3, 1]


@pytest.mark.parametrize(
    ("num_slots", "group", "prompt", "tokens"),
    [(32, 8, 256, 768), (32, 8, 600, 1200), (32, 1, 256, 768), (80, 8, 70, 130), (8, 8, 256, 768)],
)
def test_bundles_are_counted_turn_by_turn(
    num_slots: int, group: int, prompt: int, tokens: int, instructions: ModuleType
) -> None:
    Loop, Work = instructions.Loop, instructions.Work
    sizes = kernel_sizes(num_slots, group)
    own = Loop(331, [Loop(17), Loop(4)])
    shared = Loop(531, [Loop(18), Loop(5)])
    is_together = sizes.neighbors > 1
    neighbors = Loop(103, [shared, Loop(62, [own])]) if is_together else Loop(40, [own])
    is_loop = num_slots > group  # of one turn there is none
    part = Loop(556, [Loop(13), neighbors] if is_loop else [Loop(13), *neighbors.inner])
    num_parts = -(-num_slots // sizes.slots)
    kernel = Loop(7, [part]) if num_parts > 1 else part

    found = instructions.count(kernel, sizes, Work(num_slots, tokens, prompt, cores=1))

    assert is_together == (group > 1)
    total = 7 if num_parts > 1 else 0
    for _ in range(num_parts):
        total += 556
        for _ in range(0, sizes.slots, sizes.neighbors):
            pages_of_prompt = [*range(prompt // 64)] if is_together else []
            pages_of_slot = [*range(len(pages_of_prompt), -(-tokens // 64))]
            total += neighbors.bundles if is_loop else 0
            for block in range(0, len(pages_of_prompt), 8):
                total += 531 + len(pages_of_prompt[block : block + 8]) * (18 + 5)
            for _ in range(sizes.neighbors):
                total += 62 if is_together else 0
                for block in range(0, len(pages_of_slot), 8):
                    total += 331 + len(pages_of_slot[block : block + 8]) * (17 + 4)
    assert found == total


def test_shared_pages_are_read_once(instructions: ModuleType) -> None:
    together, alone = kernel_sizes(32, 8), kernel_sizes(32, 1)
    work = instructions.Work(slots=32, tokens=768, prompt=260, cores=1)

    read = [instructions.bytes_read(sizes, work, 2.0) for sizes in (together, alone)]

    assert read == [2.0 * (32 * 512 + 4 * 256), 2.0 * 32 * 768]


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
def test_the_kernel_of_a_decode_step_is_counted(topology: str) -> None:
    pytest.importorskip("libtpu", reason="libtpu, whose compiler this is, is not installed")
    command = [sys.executable, "benchmarks/cycles.py", "--model", "Qwen2.5-0.5B"]
    command += ["--topology", topology, "--attention", "tpu_fused"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    found = re.search(r"\(([\d,]+) bundles; ([\d.]+) ms at the peak\)", ran.stdout)
    assert found is not None
    # Of 24 layers. A block of 512 tokens takes some hundred bundles, and a slot has at least one.
    bundles_of_slot = int(found[1].replace(",", "")) / 24 / 32
    assert 100 < bundles_of_slot < 5000


def test_larger_weights_are_read_at_more_of_the_bandwidth() -> None:
    """And a product of many rows is near the peak FLOPs."""
    pytest.importorskip("libtpu", reason="libtpu, whose compiler this is, is not installed")

    def shares(*arguments: str) -> list[tuple[int, int]]:
        command = [sys.executable, "benchmarks/product_cycles.py", "--topology", "v5e:2x4"]
        ran = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        _, _, *rows = ran.stdout.splitlines()
        found = [re.findall(r"(\d+)%", row) for row in rows]
        return [(int(bandwidth), int(flops)) for bandwidth, flops in found]

    [(small, _), (large, _)] = shares("--outputs", "2048", "22016")
    [(_, of_peak)] = shares("--rows", "4096", "--outputs", "4096")

    assert 30 < small < large < 100
    assert 85 < of_peak <= 100


def test_attention_alone_grows_with_the_length_of_responses() -> None:
    pytest.importorskip("libtpu", reason="libtpu, whose compiler this is, is not installed")
    command = [sys.executable, "benchmarks/cycles_by_length.py", "--model", "Qwen2.5-0.5B"]
    command += ["--topology", "v5e:2x4", "--program", "decode", "--tokens", "1024", "4096"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    _, _, *rows = ran.stdout.splitlines()
    [short, long] = [
        [float(cell.replace(",", "")) for cell in row.split("|")[1:-1]] for row in rows
    ]
    assert [short[0], long[0]] == [1024, 4096]
    assert long[1] == pytest.approx(short[1], rel=0.01)
    # The prompt of 256 tokens is shared, and its pages are read once.
    assert 3 * short[2] < long[2] < 4 * short[2]


def test_a_token_of_the_update_has_cycles_without_attention() -> None:
    """A token takes more cycles than its FLOPs at the peak, and fewer than ten times as many."""
    pytest.importorskip("libtpu", reason="libtpu, whose compiler this is, is not installed")
    command = [sys.executable, "benchmarks/cycles_by_length.py", "--model", "Qwen2.5-0.5B"]
    command += ["--topology", "v5e:2x2", "--tokens", "1024"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    row = ran.stdout.splitlines()[-1].replace(",", "")
    tokens, products, attention = (float(cell) for cell in row.split("|")[1:-1])
    flops_in_a_cycle = 197e12 / 1.5e9
    least = 6 * 0.494e9 / flops_in_a_cycle  # three passes of two FLOPs for each parameter
    assert tokens == 1024
    assert least < products < 10 * least
    assert 0 < attention < products
