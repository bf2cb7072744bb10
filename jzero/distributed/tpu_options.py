"""Options of XLA for programs on TPUs. docs/log.md has what each of them changes."""

from jax.sharding import Mesh

# KiB of a core's on-chip memory (VMEM) that one operation may use, by the `device_kind` that JAX
# reports. XLA's own limit is 16 MiB, and 32 MiB on v6e. A product reads a weight in blocks, and
# larger blocks are read at more of the bandwidth. What is left of VMEM, which is 128 MiB on v5e
# and v6e and 64 MiB on the others, is for arrays that XLA keeps there from one operation to the
# next.
SCOPED_VMEM_KIB = {
    "TPU v5 lite": 80 * 1024,
    "TPU v6 lite": 64 * 1024,
    "TPU v5": 48 * 1024,
    "TPU7x": 48 * 1024,
}


def tpu_options(mesh: Mesh) -> dict[str, bool | str]:
    """Returns the options for every program on the devices of `mesh`; none but for TPUs."""
    options: dict[str, bool | str] = {}
    kind = mesh.devices.flat[0].device_kind
    if kind in SCOPED_VMEM_KIB:
        options["xla_tpu_scoped_vmem_limit_kib"] = str(SCOPED_VMEM_KIB[kind])
    return options
