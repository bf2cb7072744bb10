"""The preset that a recipe has without a name: the largest that fits the attached accelerator."""

from collections.abc import Callable, Collection, Sequence

from jzero import config, terminal
from jzero.config import Config


def choose_fitting_preset(
    argument: str,
    tiny: Callable[[], Config],
    make: Callable[[str], Config],
    hub: Collection[str],
    largest_first: Sequence[str],
) -> Config:
    """Returns the config of `argument`, as `config.choose_preset` does.

    If `argument` names no preset, the first of `largest_first` that fits the attached accelerator
    is used, or tiny if there is no accelerator or none fits. A printed line gives the choice and
    the reason.
    """
    preset, separator, algorithm = argument.partition(",")
    if preset:
        return config.choose_preset(argument, tiny, make, hub, largest_first[0])
    # Not at the top: a recipe with a preset loads without JAX.
    import jax

    from jzero.planning.fitting import attached_bytes, attached_devices, largest_that_fits

    if jax.default_backend() == "cpu":
        return config.choose_preset(argument, tiny, make, hub, largest_first[0])
    available = attached_bytes(config.MemoryConfig())
    preset, reason = largest_that_fits(make, largest_first, attached_devices(), available)
    terminal.say(f"no preset given: using {preset}, {reason}")
    return config.choose_preset(preset + separator + algorithm, tiny, make, hub, preset)
