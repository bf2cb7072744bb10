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

from jzero.attention import xla
from jzero.distributed.mesh import make_mesh
from jzero.model import huggingface, qwen
from jzero.planning.compiling import compile_only_devices
from jzero.types import RowLayout

ROOT = Path(__file__).resolve().parents[2]
TINY = qwen.QwenConfig("qwen2", 512, 64, 128, 1, 4, 2, 16, True, 10000.0, 1e-6)


@pytest.fixture
def load_benchmark(monkeypatch):
    """Imports a script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_json(TINY, "float32")))
    return str(tmp_path)


def table_rows(script: str, environment: dict[str, str], *arguments: str) -> list[list[str]]:
    """Runs a script, and returns the cells of the rows of its table."""
    path = str(ROOT / "benchmarks" / script)
    command = [sys.executable, path, "--dtype=float32", "--repeat=1", *arguments]
    environment = environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def positive(cell: str) -> bool:
    return float(cell.replace(",", "")) > 0


def test_decode(environment, model):
    sizes = ("--slots", "4", "8", "--prompt=16", "--new=80")
    rows = table_rows("decode.py", environment, f"--model={model}", *sizes)
    assert [row[1] for row in rows] == ["4", "8"]
    for row in rows:
        assert positive(row[2])
        assert positive(row[3])
        assert row[5] == "unknown"  # the peak of a CPU


def test_update(environment, model):
    sizes = ("--sequences=16", "--prompt=16", "--new=48")
    [row] = table_rows("update.py", environment, f"--model={model}", *sizes)
    assert row[1:3] == ["16", "full"]
    assert positive(row[3])
    assert row[6] == "unknown"


def test_flops_are_three_times_those_that_xla_counts_forward(load_benchmark):
    update = load_benchmark("update")
    B, T = 2, 256

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        segments = jnp.ones((B, T), jnp.int32)

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, RowLayout(0, 1, T)), carry

        hidden, _ = qwen.forward(TINY, params, tokens, positions, attend, dtype=jnp.float32)
        return qwen.head(TINY, params, hidden, jnp.float32)

    params = qwen.abstract(TINY)  # of one layer: XLA counts the body of a loop once
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    cost = jax.jit(forward).lower(params, tokens).compile().cost_analysis()

    # XLA's definition computes the half of the attention that it masks, too.
    attended = 4 * B * T * T * TINY.num_attention_heads * TINY.head_dim
    counted = update.update_flops(TINY, B, T) / 3 + attended / 2
    assert counted == pytest.approx(cost["flops"], rel=0.1)


def test_cycles_are_summed_over_loops(load_benchmark):
    """The program has a loop inside a loop, and is compiled for a TPU that is not there."""
    pytest.importorskip("libtpu")
    cycles = load_benchmark("cycles")
    mesh = make_mesh(compile_only_devices("v5e:2x2")[:1], {"data": 1})
    matrix = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def operations_of(outer_turns: int):
        def inner(_, x):
            return jnp.tanh(x @ x)

        def outer(_, x):
            return jnp.sin(lax.fori_loop(0, 5, inner, x))

        def program(x):
            return lax.fori_loop(0, outer_turns, outer, x)

        text = jax.jit(program).lower(matrix).compile().as_text()
        return list(cycles.operations(cycles.computations(text)))

    def total(operations, turns: int) -> int:
        return sum(operation.cycles for operation in operations if operation.turns == turns)

    few, more = operations_of(7), operations_of(14)

    assert {operation.turns for operation in few} >= {7, 35}
    assert {operation.turns for operation in more} >= {14, 70}
    assert total(few, 35) > total(few, 7) > 0
    assert total(more, 70) == 2 * total(few, 35)
    assert total(more, 14) == 2 * total(few, 7)
