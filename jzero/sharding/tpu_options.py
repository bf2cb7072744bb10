"""XLA options for programs on TPUs. lab/log.md has the effect of each option."""

from jax.sharding import Mesh

# KiB of a core's on-chip memory (VMEM) that one operation may use, by the `device_kind` that JAX
# reports. XLA's default limit is 16 MiB, and 32 MiB on v6e. A matrix product reads a weight in
# blocks, and larger blocks use more of the bandwidth. XLA keeps arrays between operations in the
# remaining VMEM. A core has 128 MiB of VMEM on v5e and v6e, and 64 MiB on the other TPUs.
SCOPED_VMEM_KIB = {
    "TPU v5 lite": 80 * 1024,
    # In an update of 3B, 64 MiB save 5 % of the cycles, and 96 MiB cost 8 % (lab/log.md,
    # 2026-11-23).
    "TPU v6 lite": 64 * 1024,
    "TPU v5": 48 * 1024,
    "TPU7x": 48 * 1024,
}


def tpu_options(mesh: Mesh) -> dict[str, bool | str]:
    """Returns the options for every program on the devices of `mesh`; empty except on TPUs."""
    options: dict[str, bool | str] = {}
    kind = mesh.devices.flat[0].device_kind
    if kind in SCOPED_VMEM_KIB:
        options["xla_tpu_scoped_vmem_limit_kib"] = str(SCOPED_VMEM_KIB[kind])
    return options
