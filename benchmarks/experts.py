"""Measures products of rows with the weights of their experts beside one dense product.

    python benchmarks/experts.py [--rows 4096] [--experts 8] [--inputs 512] [--outputs 512]

Rows are spread over experts at random, unevenly. The dense product multiplies as many rows by one
weight, which are the same FLOPs. The gradient is that of rows and weights, with the forward pass.
Every time is the fastest of --repeat calls.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jzero.model.grouped_products import PRODUCTS, grouped_product


def fastest_seconds(function: Callable, arguments: tuple[jax.Array, ...], repeat: int) -> float:
    """Returns the seconds of the fastest call, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def with_gradient(product: Callable) -> Callable:
    """Returns the jitted gradient of a product by its rows and its weights."""

    def total(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(product(rows, weights, sizes) ** 2)

    return jax.jit(jax.grad(total, argnums=(0, 1)))


def dense_product(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies all rows by the first weight."""
    return jnp.einsum("ni,io->no", rows, weights[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--dtype", default="float32", help="of rows and weights")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(args.experts, 4.0))
    sizes = jnp.asarray(rng.multinomial(args.rows, shares), jnp.int32)
    rows = jnp.asarray(rng.standard_normal((args.rows, args.inputs)), args.dtype)
    shape = (args.experts, args.inputs, args.outputs)
    weights = jnp.asarray(rng.standard_normal(shape), args.dtype)
    arguments = (rows, weights, sizes)

    print(f"{args.rows} rows of {args.inputs} inputs and {args.outputs} outputs, {args.dtype}")
    print(f"rows of the {args.experts} experts: {sizes.tolist()}")
    print("| product | forward ms | of dense | with gradient ms | of dense |")
    print("|---|---|---|---|---|")
    dense: list[float] = []
    # As a layer calls them. Triton compiles for GPUs only.
    names = [name for name in PRODUCTS if name != "triton" or jax.default_backend() == "gpu"]
    grouped = {name: partial(grouped_product, name) for name in names}
    for name, product in {"dense": dense_product, **grouped}.items():
        seconds = [
            fastest_seconds(jax.jit(product), arguments, args.repeat),
            fastest_seconds(with_gradient(product), arguments, args.repeat),
        ]
        dense = dense or seconds
        cells = [
            f"{1000 * taken:.1f} | {taken / of_dense:.2f}"
            for taken, of_dense in zip(seconds, dense, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
