"""Tests of the claim that a model has sampled logged tokens.

**Log-probs.** A stack that computes in another order, or with kernels of its own, rounds in other
ways. The size of the difference is measured, not assumed: `rounding_errors` compares this model in
bfloat16 and in fp32, and other types round less by the ratio of their unit roundoffs. A row is
rejected if the root mean square of its differences, or one of them, is too many times as large.

**Tokens.** Two exact tests need no logged log-probs. A token that the filters exclude by more than
rounding explains was not sampled. And the ratio of the likelihoods under another distribution,
fixed in advance, and under the claimed one has the mean 1 if the claim is true, so that it exceeds
1/a with a probability of at most a (Ville's inequality), at any length. The other distributions are
the claimed one at seven other temperatures; log-probs that are too low or too high on average make
their ratios large. z, the same statistic in standard deviations, is printed for the reader.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from jzero.audits.log import Response, Sampling
from jzero.audits.scores import TILTS, Scores

# Unit roundoffs: half of the distance between 1 and the next number. TF32 has the one of float16.
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_NOISE = 1e-4  # nats: logs with four decimals, and sums in another order

MOST_OF_ROW = 3.0  # root mean square of a row, in units of the noise, plus 6 / sqrt(tokens)

FALSE_ALARM = 1e-6  # probability of one in an honest log

# What the logged log-probs are.
SAMPLED = "sampled"  # after temperature and filters
UNFILTERED = "unfiltered"  # after the temperature, before the filters
RAW = "raw"  # at temperature 1, before the filters
CONVENTIONS = (SAMPLED, UNFILTERED, RAW)


class Size(NamedTuple):
    """The size of a log: the more is tested, the larger is the largest honest difference."""

    rows: int
    tokens: int

    @property
    def most_of_token(self) -> float:
        """The largest honest difference of a token, in units of the noise.

        Rounding errors have heavier tails than a normal distribution, because an early one changes
        everything after it: this is the quantile of a Laplace distribution.
        """
        return math.log(self.tokens / FALSE_ALARM) / math.sqrt(2)


class Evidence(NamedTuple):
    """The tests of a row under one hypothesis."""

    differences: Float32[np.ndarray, " tokens"] | None  # logged - computed; None: not logged
    rms: float  # of the differences, 0 without log-probs
    num_outside: int  # tokens that the filters exclude
    log_ratio: float  # log of the mean likelihood ratio: above 0 speaks against the claim
    z: float
    logps_fit: bool
    tokens_fit: bool

    @property
    def fits(self) -> bool:
        return self.logps_fit and self.tokens_fit


def rounding_errors(
    narrow: Scores,
    wide: Scores,
    convention: str,
) -> Float32[np.ndarray, " tokens"]:
    """Returns the sizes of the errors of bfloat16, in nats.

    narrow, wide: scores in bfloat16 and in fp32.
    """
    # The edge of top-p jumps, which the bounds of `judge` allow: noise is measured without it.
    if convention == RAW:
        return np.abs(narrow.raw - wide.raw)
    return np.abs(narrow.unfiltered - wide.unfiltered)


def noise_of(errors: Float32[np.ndarray, " tokens"], dtype: str) -> float:
    """Returns the root mean square of the errors of a type, at least LEAST_NOISE.

    errors: of bfloat16.
    """
    # Rounding errors grow in proportion to the unit roundoff of a type.
    scaled = errors * (ROUNDOFF[dtype] / ROUNDOFF["bfloat16"])
    return max(LEAST_NOISE, float(np.sqrt(np.mean(np.square(scaled)))))


def judge(
    response: Response,
    scores: Scores,
    sampling: Sampling,
    noise: float,
    convention: str,
    size: Size,
    shift: int = 0,
) -> Evidence:
    """Tests a row.

    sampling: the parameters of `scores`.
    shift: 1: the log-prob of token i is logged for token i + 1; -1: for token i - 1.
    size: of the log.
    """
    differences, rms, logps_fit = None, 0.0, True
    if response.logps is not None:
        differences = difference(response.logps, scores, sampling, convention, shift)
        if len(differences):
            rms = float(np.sqrt(np.mean(np.square(differences))))
            # The root mean square of few tokens scatters more.
            most = MOST_OF_ROW + 6 / math.sqrt(len(differences))
            # The largest difference finds single wrong tokens, the mean small errors everywhere.
            is_small = np.abs(differences).max() <= size.most_of_token * noise
            logps_fit = bool(is_small) and rms <= most * noise
        else:
            logps_fit = False  # a shift has left nothing to compare
    num_outside = int(scores.is_outside.sum())
    log_ratio, z = likelihood_test(scores)
    tokens_fit = not num_outside and log_ratio < ratio_limit(size.rows, len(scores.raw), noise)
    return Evidence(differences, rms, num_outside, log_ratio, z, logps_fit, tokens_fit)


def difference(
    logged: Float32[np.ndarray, " tokens"],
    scores: Scores,
    sampling: Sampling,
    convention: str,
    shift: int = 0,
) -> Float32[np.ndarray, " tokens"]:
    """Returns logged - computed log-probs; 0 between the bounds of a filtered log-prob."""
    # Stacks log greedy tokens at temperature 1, because the sampled log-prob would always be 0.
    if convention == RAW or not sampling.temperature:
        lowest = highest = scores.raw
    elif convention == UNFILTERED:
        lowest = highest = scores.unfiltered
    else:
        lowest, highest = scores.lowest, scores.highest
    # The first or the last token has no partner.
    if shift > 0:
        logged, lowest, highest = logged[1:], lowest[:-1], highest[:-1]
    elif shift < 0:
        logged, lowest, highest = logged[:-1], lowest[1:], highest[1:]
    return logged - np.clip(logged, lowest, highest)


def likelihood_test(scores: Scores) -> tuple[float, float]:
    """Returns the log of the mean likelihood ratio of the alternatives, and z."""
    ratios = scores.tilts.sum(axis=0, dtype=np.float64)
    # The mean of likelihood ratios is one itself, so that one limit covers all alternatives.
    log_ratio = float(np.logaddexp.reduce(ratios) - math.log(len(TILTS)))
    surprise = float(np.sum(scores.filtered - scores.mean, dtype=np.float64))
    deviation = math.sqrt(float(np.sum(scores.variance, dtype=np.float64)))
    # Greedy decoding has neither variance nor surprise.
    return log_ratio, surprise / deviation if deviation > 1e-6 else 0.0


def ratio_limit(num_tests: int, num_tokens: int, noise: float) -> float:
    """Returns the log of the likelihood ratio that rejects a claim.

    Rounding changes the expectation of a token's log ratio by about the noise's square.
    """
    return math.log(num_tests / FALSE_ALARM) + num_tokens * noise**2


def ranks_fit(scores: Scores) -> bool:
    """Returns whether tokens have the ranks that sampling from q would give them.

    The mass of q on more probable tokens, plus a random part of the token's own, is uniform if the
    token is sampled from q. A Kolmogorov-Smirnov test compares its distribution.
    """
    # A fixed seed: the verdict on a log must be the same in every audit.
    share = np.random.default_rng(0).random(len(scores.mass))
    places: Float64[np.ndarray, " N"] = np.sort(scores.mass + share * np.exp(scores.filtered))
    count = len(places)
    steps = np.arange(count + 1) / count
    distance = max(np.max(steps[1:] - places), np.max(places - steps[:-1]))
    return bool(distance * math.sqrt(count) < 2.7)  # p = 2 exp(-2 * 2.7^2) = 1e-6
