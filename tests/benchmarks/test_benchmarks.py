"""What benchmarks print, on a model small enough for a CPU, and what they count by hand."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import plan
from jzero.attention import xla
from jzero.distributed.mesh import make_mesh
from jzero.model import huggingface, qwen
from jzero.types import RowLayout

ROOT = Path(__file__).resolve().parents[2]
TINY = qwen.QwenConfig("qwen2", 512, 64, 128, 1, 4, 2, 16, True, 10000.0, 1e-6)


@pytest.fixture
def benchmark(monkeypatch):
    """A script, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_json(TINY, "float32")))
    return str(tmp_path)


def numbers(script: str, environment, *arguments: str) -> list[list[str]]:
    """The cells of the rows of its table."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / script),
        "--dtype=float32",
        "--repeat=1",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_decode(environment, model):
    found = numbers(
        "decode.py", environment, f"--model={model}", "--slots", "4", "8", "--prompt=16", "--new=80"
    )
    assert [row[1] for row in found] == ["4", "8"]
    for row in found:
        assert (
            float(row[2].replace(",", "")) > 0 and float(row[3]) > 0 and row[5] == "unknown"
        )  # a CPU's peak


def test_update(environment, model):
    small = "--sequences=16", "--prompt=16", "--new=48"
    [row] = numbers("update.py", environment, f"--model={model}", *small)
    assert row[1:3] == ["16", "full"] and float(row[3].replace(",", "")) > 0 and row[6] == "unknown"


def test_flops_are_three_times_those_that_xla_counts_forward(benchmark):
    update = benchmark("update")
    B, T = 2, 256

    def forward(params, tokens):
        positions, segments = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32)
        attend = lambda q, k, v, layer, carry: (
            xla.packed(q, k, v, segments, RowLayout(0, 1, T)),
            carry,
        )
        hidden, _ = qwen.forward(TINY, params, tokens, positions, attend, dtype=jnp.float32)
        return qwen.head(TINY, params, hidden, jnp.float32)

    params = qwen.abstract(TINY)  # of one layer: XLA counts the body of a loop once
    cost = (
        jax.jit(forward)
        .lower(params, jax.ShapeDtypeStruct((B, T), jnp.int32))
        .compile()
        .cost_analysis()
    )
    attended = (
        4 * B * T * T * TINY.num_attention_heads * TINY.head_dim
    )  # XLA's definition computes what it masks
    counted = update.flops(TINY, B, T) / 3 + attended / 2
    assert counted == pytest.approx(cost["flops"], rel=0.1)


def test_cycles_are_summed_over_loops(benchmark):
    """Of a program with a loop inside a loop, compiled for a TPU that is not there."""
    pytest.importorskip("libtpu")
    cycles, devices = benchmark("cycles"), plan.devices("v5e:2x2")[:1]
    place = NamedSharding(make_mesh(devices, {"data": 1}), P())

    def program(outer: int):
        inner = lambda _, x: jnp.tanh(x @ x)
        loop = lambda x: lax.fori_loop(
            0, outer, lambda _, x: jnp.sin(lax.fori_loop(0, 5, inner, x)), x
        )
        compiled = (
            jax.jit(loop)
            .lower(jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=place))
            .compile()
        )
        return list(cycles.operations(cycles.computations(compiled.as_text())))

    few, more = program(7), program(14)
    total = lambda every, turns: sum(each.cycles for each in every if each.turns == turns)
    assert {each.turns for each in few} >= {7, 35} and {each.turns for each in more} >= {14, 70}
    assert total(few, 35) > total(few, 7) > 0
    assert total(more, 70) == 2 * total(few, 35) and total(more, 14) == 2 * total(few, 7)
