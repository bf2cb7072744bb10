"""What benchmarks print, for a model that is small enough for a CPU, and what they count."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.attention import xla
from jzero.model import huggingface, qwen
from jzero.planning.compiling import compile_only_devices
from jzero.sharding.mesh import make_mesh
from jzero.types import Params, RowLayout

ROOT = Path(__file__).resolve().parents[2]
TINY = qwen.QwenConfig("qwen2", 512, 64, 128, 1, 4, 2, 16, True, 10000.0, 1e-6)


Load = Callable[[str], ModuleType]


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Returns a function that imports a script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Returns a directory with the config.json of a tiny model."""
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_json(TINY, "float32")))
    return str(tmp_path)


# The tables


def table_rows(script: str, environment: dict[str, str], *arguments: str) -> list[list[str]]:
    """Runs a script, and returns the cells of every row of its table."""
    path = str(ROOT / "benchmarks" / script)
    command = [sys.executable, path, "--dtype=float32", "--repeat=1", *arguments]
    environment = environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    _headings, _rule, *body = lines
    return [cells_of(line) for line in body]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def number_in(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_decode_prints_a_row_for_every_number_of_slots(
    environment: dict[str, str], model: str
) -> None:
    sizes = ("--slots", "4", "8", "--prompt=16", "--new=80")

    rows = table_rows("decode.py", environment, f"--model={model}", *sizes)

    assert [row[1] for row in rows] == ["4", "8"]
    for _, _, tokens_per_second, milliseconds, _, share in rows:
        assert number_in(tokens_per_second) > 0
        assert number_in(milliseconds) > 0
        assert share == "unknown", "nobody knows the bandwidth of this CPU"


def test_update_prints_a_row(environment: dict[str, str], model: str) -> None:
    sizes = ("--sequences=16", "--prompt=16", "--new=48")

    [row] = table_rows("update.py", environment, f"--model={model}", *sizes)

    _, num_sequences, remat, tokens_per_second, _, _, share = row
    assert num_sequences == "16"
    assert remat == "full"
    assert number_in(tokens_per_second) > 0
    assert share == "unknown", "nobody knows the FLOP/s of this CPU"


def test_lengths_compares_costs_with_the_work_of_the_first_length(
    environment: dict[str, str], model: str
) -> None:
    sizes = ("--lengths", "128", "256", "--tokens=512", "--slots=2", "--new=64")

    rows = table_rows("lengths.py", environment, f"--model={model}", *sizes)

    assert [row[0] for row in rows] == ["128", "256"]
    first, second = [[number_in(cell) for cell in row[1:]] for row in rows]
    assert first[1:3] == first[4:6] == [1.0, 1.0]
    assert min(second) > 0
    assert 1 < second[2] < 2, "attention is a part of the FLOPs"
    assert 1 < second[5] < 2, "keys and values are a part of the bytes"


# FLOPs


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the logits of TINY for rows that hold one sequence each."""
    num_rows, num_tokens = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
    segments = jnp.ones((num_rows, num_tokens), jnp.int32)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: None
    ) -> tuple[jax.Array, None]:
        return xla.packed(q, k, v, segments, RowLayout(0, 1, num_tokens)), carry

    hidden, _ = qwen.forward(TINY, params, tokens, positions, attend, dtype=jnp.float32)
    return qwen.head(TINY, params, hidden, jnp.float32)


def test_flops_are_three_times_those_that_xla_counts_forward(load_benchmark: Load) -> None:
    update = load_benchmark("update")
    B, T = 2, 256
    params = qwen.abstract(TINY)  # of one layer: XLA counts the body of a loop once
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    flops = update.update_flops(TINY, B, T)

    cost = jax.jit(forward).lower(params, tokens).compile().cost_analysis()
    # XLA's definition computes the half of the attention that it masks, too.
    attention = 4 * B * T * T * TINY.num_attention_heads * TINY.head_dim
    assert flops / 3 + attention / 2 == pytest.approx(cost["flops"], rel=0.1)


# Cycles


def compiled_loops(outer_turns: int) -> str:
    """Returns a loop of 5 turns inside a loop, compiled for a TPU that is not there, as text."""
    mesh = make_mesh(compile_only_devices("v5e:2x2")[:1], {"data": 1})
    matrix = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def inner(_: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    def outer(_: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(lax.fori_loop(0, 5, inner, x))

    def program(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, outer_turns, outer, x)

    return jax.jit(program).lower(matrix).compile().as_text()


def test_cycles_are_summed_over_loops(load_benchmark: Load) -> None:
    pytest.importorskip("libtpu")
    cycles = load_benchmark("cycles")

    def cycles_by_turns(outer_turns: int) -> Counter[int]:
        """Sums the cycles of the operations, by how many times an operation runs."""
        total: Counter[int] = Counter()
        computations = cycles.computations(compiled_loops(outer_turns))
        for operation in cycles.operations(computations):
            total[operation.turns] += operation.cycles
        return total

    of_7_turns = cycles_by_turns(7)
    of_14_turns = cycles_by_turns(14)

    assert of_7_turns.keys() >= {7, 35}
    assert of_14_turns.keys() >= {14, 70}
    assert of_7_turns[35] > of_7_turns[7] > 0
    assert of_14_turns[70] == 2 * of_7_turns[35]
    assert of_14_turns[14] == 2 * of_7_turns[7]
