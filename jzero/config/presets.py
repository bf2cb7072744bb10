"""Moved from jzero.config."""

from collections.abc import Callable, Collection

import jax

from jzero import algorithms
from jzero.config.schema import Config
from jzero.errors import UserError

QWEN25_HUB_IDS = {
    f"qwen2.5-{size}": f"Qwen/Qwen2.5-{size.upper()}" for size in ("0.5b", "1.5b", "3b", "7b")
}  # preset: hub id


def choose_preset(
    argument: str,
    tiny: Callable[[], Config],
    qwen: Callable[[str], Config],
    hub: Collection[str],
    accelerator: str,
) -> Config:
    """Of "preset", "preset,algorithm" or "": `accelerator` where one is attached, else tiny; `hub`: qwen's."""
    preset, _, algorithm = argument.partition(",")
    if not preset:
        platform = jax.default_backend()
        preset = "tiny" if platform == "cpu" else accelerator
        print(f"no preset given and platform {platform} attached: using {preset}", flush=True)
    if preset not in ("tiny", *hub):
        raise UserError(
            f"no preset {preset!r} in this recipe; there are {', '.join(('tiny', *hub))}"
        )
    config = tiny() if preset == "tiny" else qwen(preset)
    if algorithm:
        if algorithm not in algorithms.PRESETS:
            raise UserError(
                f"no algorithm {algorithm!r}; there are {', '.join(algorithms.PRESETS)}"
            )
        config.algorithm = algorithms.PRESETS[algorithm]()
        config.name += f"-{algorithm}"
    return config
