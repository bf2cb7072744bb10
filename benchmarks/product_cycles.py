"""Prints how many cycles XLA expects of one product of a layer on a TPU. No TPU is needed.

    python benchmarks/product_cycles.py --topology v5e:2x4 --rows 32 --outputs 11008 22016

A product of few rows, as in decoding, has to read its weight; one of many rows has to multiply.
XLA expects both to run below the chip's peak. A program that is made of such products cannot exceed
their share. Each product is in a loop over weights, as in a model.
"""

import argparse

import cycles
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.planning.chips import CHIPS
from jzero.planning.compiling import compile_only_devices
from jzero.sharding.mesh import make_mesh
from jzero.sharding.tpu_options import tpu_options

LAYERS = 8
BYTES = 2  # of a number in bfloat16


def product_cycles(topology: str, rows: int, inputs: int, outputs: int) -> int:
    """Returns the cycles of x W for x [rows, inputs] and W [inputs, outputs], in bfloat16."""
    mesh = make_mesh(compile_only_devices(topology)[:1], {"data": 1})
    place = NamedSharding(mesh, P())

    def multiply(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        product = jnp.dot(x, weight, preferred_element_type=jnp.float32)
        # The next product needs this one, but nothing large is computed between them.
        return x + product.max(axis=1, keepdims=True).astype(x.dtype), None

    def program(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(multiply, x, weights)[0]

    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16, sharding=place)
    weights = jax.ShapeDtypeStruct((LAYERS, inputs, outputs), jnp.bfloat16, sharding=place)
    jitted = jax.jit(program, compiler_options=tpu_options(mesh))
    largest = cycles.compiled_operations(jitted, (x, weights))[0]
    return largest.cycles // LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5e:2x4", help="a slice of TPUs")
    parser.add_argument("--rows", type=int, default=32, help="of the activations")
    parser.add_argument("--inputs", type=int, default=2048, help="rows of the weight")
    parser.add_argument("--outputs", type=int, nargs="+", default=[11008, 22016])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    kind = compile_only_devices(args.topology)[0].device_kind
    chip, clock = CHIPS[kind], cycles.CLOCKS[kind]
    print("| outputs | cycles | of the bandwidth | of the FLOPs |")
    print("|---|---|---|---|")
    for outputs in args.outputs:
        found = product_cycles(args.topology, args.rows, args.inputs, outputs)
        seconds = found / clock
        bandwidth = BYTES * args.inputs * outputs / seconds / chip.bandwidth
        flops = 2 * args.rows * args.inputs * outputs / seconds / chip.flops
        print(f"| {outputs:,} | {found:,} | {bandwidth:.0%} | {flops:.0%} |")


if __name__ == "__main__":
    main()
