"""Scaled rotary position embeddings: frequencies for contexts longer than the original one.

    scaling = SCALINGS["llama3"](factor=32.0, low_freq_factor=1.0, ...)
    scaling.frequencies(theta=5e5, head_dim=64)      # fp32 [head_dim / 2]

Each class is one `rope_type` of config.json, and its fields are the other entries of that object.
`transformers` computes frequencies in fp32, and so does this module, in the same order: a relative
error of 1e-7 in a frequency is an angle of 0.01 at position 100,000. A new kind is one more class
and one line of SCALINGS.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float32


def plain_frequencies(theta: float, head_dim: int) -> Float32[np.ndarray, " half"]:
    """Returns theta^(-2i / head_dim), the frequencies of RoPE (Su et al. 2021, section 3.2.2)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return (1.0 / theta**exponents).astype(np.float32)


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency is divided."""

    kind: ClassVar[str] = "linear"
    factor: float

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        return 1.0

    def mistakes(self, theta: float) -> Iterator[str]:
        """Yields nothing: every factor is possible."""
        yield from ()

    def frequencies(self, theta: float, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Returns the frequency of every pair of a head."""
        return (plain_frequencies(theta, head_dim) / np.float32(self.factor)).astype(np.float32)


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1, 3.2 and 3.3: only slow rotations are slowed down further.

    A pair that turns at least `high_freq_factor` times in the original context keeps its frequency.
    For a pair that turns at most `low_freq_factor` times, the frequency is divided by `factor`. In
    between, the frequency is interpolated linearly in the number of turns.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        return 1.0

    def mistakes(self, theta: float) -> Iterator[str]:
        """Yields a phrase for values that contradict each other."""
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"high_freq_factor={self.high_freq_factor} is not above "
                f"low_freq_factor={self.low_freq_factor}"
            )

    def frequencies(self, theta: float, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Returns the frequency of every pair of a head."""
        plain = plain_frequencies(theta, head_dim)
        low, high = self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / plain  # in tokens
        turns = self.original_max_position_embeddings / wavelengths
        # Linear interpolation between the slow and the fast pairs.
        share = (turns - low) / (high - low)  # weight of the plain frequency
        between = (1 - share) * plain / self.factor + share * plain
        # By wavelength, as `transformers` compares: the turns may round to the other side.
        is_slow = wavelengths > self.original_max_position_embeddings / low
        is_fast = wavelengths < self.original_max_position_embeddings / high
        scaled = np.where(is_slow, plain / self.factor, np.where(is_fast, plain, between))
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), with the options that `transformers` reads.

    Pair i keeps its frequency if it turns at least `beta_fast` times in the original context. If it
    turns at most `beta_slow` times, the frequency is divided by `factor`. In between there is a
    linear ramp over i. Queries and keys are multiplied by an amplitude, which implements the
    temperature of the softmax. A field that is None has the default of `transformers`.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    # The amplitude. None: as in the paper, 0.1 ln(factor) + 1.
    attention_factor: float | None = None
    beta_fast: float | None = None  # 32
    beta_slow: float | None = None  # 1
    # DeepSeek's options: if both are set, the amplitude is the quotient of their two amplitudes.
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None  # true: the ramp begins and ends at integer pairs

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of(1.0)

    def mscale_of(self, scale: float) -> float:
        """Returns 0.1 `scale` ln(factor) + 1, or 1 if the context is not stretched."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def mistakes(self, theta: float) -> Iterator[str]:
        """Yields a phrase for values that contradict each other."""
        if theta <= 1:
            yield f"rope_theta={theta}: yarn needs a base above 1"

    def frequencies(self, theta: float, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Returns the frequency of every pair of a head."""
        positions_per_turn = theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        plain = 1.0 / positions_per_turn
        stretched = 1.0 / (self.factor * positions_per_turn)
        # Pairs up to `first` keep their frequency; pairs from `last` on are stretched.
        first, last = self.ramp(theta, head_dim)
        pairs = np.arange(head_dim // 2, dtype=np.float32)
        share = 1 - np.clip((pairs - first) / (last - first), 0, 1)  # weight of the plain frequency
        return (stretched * (1 - share) + plain * share).astype(np.float32)

    def ramp(self, theta: float, head_dim: int) -> tuple[float, float]:
        """Returns the first and last pair of the ramp from plain to stretched frequencies."""
        first = self.pair_of(self.beta_fast or 32, theta, head_dim)
        last = self.pair_of(self.beta_slow or 1, theta, head_dim)
        if self.truncate is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return first, last if last != first else last + 0.001  # no division by zero

    def pair_of(self, turns: float, theta: float, head_dim: int) -> float:
        """Returns the (fractional) pair that turns `turns` times in the original context."""
        wavelength = self.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling

# rope_type -> class. The kind "default" has no scaling.
SCALINGS: dict[str, type[LinearScaling] | type[Llama3Scaling] | type[YarnScaling]] = {
    scaling.kind: scaling for scaling in (LinearScaling, Llama3Scaling, YarnScaling)
}
