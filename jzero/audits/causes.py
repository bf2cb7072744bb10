"""What explains a log that the claimed model cannot have sampled.

Every hypothesis is scored on a sample of the rejected rows. It explains a row if the row passes all
tests of `evidence.py` under it, as an honest row passes them under the claim. The hypothesis that
explains most rows is named, then the next one among the remaining rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jzero.audits import evidence
from jzero.audits.evidence import CONVENTIONS, RAW, UNFILTERED, Evidence, Size, judge
from jzero.audits.log import Response, Sampling
from jzero.audits.scores import Context, Model, Scores, concatenate, hidden_states, measure

MOST_ROWS, MOST_TOKENS = 64, 4096  # of the sample
LEAST_TOKENS = 8  # that a cause has to explain
SEARCH_TOKENS = 1024  # for the search of a temperature

CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # missing tokens of a prompt
TOP_K = (1, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TEMPERATURES = np.geomspace(0.2, 4.0, 25)

OTHER_MODEL = (
    "another model, other tokens than the model has seen, or a sampler that changes the logits "
    "(a penalty, a bias, a coarser KV cache): nothing here explains it"
)
PAST_THE_END = "sampling went on after an end token"
SUPPRESSED = "end tokens were suppressed (a bias, a minimum length, or ends that are ignored)"
SMALL = "small differences of unknown cause"
CORRELATED = 5.0  # standard deviations of a correlation that is no chance
MOST_DECIMALS = 3  # fewer than of LEAST_NOISE


class Candidate(NamedTuple):
    """Other weights that may have sampled."""

    cause: str
    load: Callable[[], Model]


@dataclass(frozen=True)
class Claim:
    """The claim, and what rounding does to it."""

    model: Model
    dtype: str
    convention: str
    noise: float
    bfloat16_noise: float
    size: Size
    bos: int | None
    candidates: Sequence[Candidate] = ()
    ends: tuple[int, ...] = ()  # tokens after which a response has no further token

    @property
    def margin(self) -> float:
        """By how much rounding may change the difference of two log-probs."""
        return self.size.most_of_token * self.noise


class Trial(NamedTuple):
    """A hypothesis with its scores of every row of the sample."""

    cause: str
    scores: Sequence[Scores]
    samplings: Sequence[Sampling]
    convention: str
    noise: float
    size: Size
    shift: int = 0
    is_fitted: bool = False  # a parameter was fitted to the sample

    def judge(self, responses: Sequence[Response], place: int) -> Evidence:
        return judge(
            responses[place],
            self.scores[place],
            self.samplings[place],
            self.noise,
            self.convention,
            self.size,
            self.shift,
        )


class Finding(NamedTuple):
    """A cause with its rows, as places in the sample."""

    cause: str
    places: list[int]
    numbers: str


def choose_sample(places: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns at most MOST_ROWS of the places, evenly spaced, with about MOST_TOKENS tokens."""
    count = min(MOST_ROWS, len(places))
    chosen = [places[i * len(places) // count] for i in range(count)]
    total = np.cumsum([lengths[place] for place in chosen])
    # At least one row, however long it is.
    return chosen[: max(1, int(np.searchsorted(total, MOST_TOKENS, side="right")))]


# -- contexts --------------------------------------------------------------------------------------


def plain_context(response: Response) -> Context:
    return Context(np.concatenate([response.prompt, response.tokens]), len(response.prompt))


def other_contexts(
    rows: Sequence[Response],
    neighbors: Sequence[Response | None],
    bos: int | None,
) -> Iterator[tuple[str, list[Context]]]:
    """Yields causes with the contexts that the model would then have seen.

    neighbors: the row before each row in the log.
    """
    longest = max(len(row.prompt) for row in rows)
    if bos is not None:
        # If most prompts begin with BOS, one more is a second one.
        has_bos = sum(int(row.prompt[0]) == bos for row in rows) * 2 > len(rows)
        cause = "BOS stood twice before the prompt" if has_bos else "BOS stood before the prompt"
        yield cause, [put_before(row, np.array([bos], np.int32)) for row in rows]
    for cut in (cut for cut in CUTS if cut < longest):
        starts_with_bos = cut == 1 and all(int(row.prompt[0]) == bos for row in rows)
        cause = f"the prompt was cut: its first {cut} tokens were missing".replace(
            "first 1 tokens were", "first token was"
        )
        yield (
            "BOS was missing" if starts_with_bos else cause,
            # The first response token needs one token before it.
            [cut_before(row, min(cut, len(row.prompt) - 1)) for row in rows],
        )
    # A limit on the length of prompts leaves as many tokens of each.
    for kept in (kept for kept in (1, *CUTS) if kept < longest):
        yield (
            f"the prompt was cut: only its last {kept} tokens were there",
            [cut_before(row, max(0, len(row.prompt) - kept)) for row in rows],
        )
    if any(neighbor is not None for neighbor in neighbors):
        # Packed rows count positions through, or from 0 again for each text.
        for restarts, note in ((False, ""), (True, ", with positions from 0")):
            contexts = []
            for row, neighbor in zip(rows, neighbors, strict=True):
                if neighbor is None:
                    contexts.append(plain_context(row))
                    continue
                before = np.concatenate([neighbor.prompt, neighbor.tokens])
                context = put_before(row, before)
                contexts.append(context._replace(restart=len(before) if restarts else 0))
            yield (
                f"the tokens of the row before were visible (a leak in packed rows){note}",
                contexts,
            )


def put_before(row: Response, tokens: np.ndarray) -> Context:
    plain = plain_context(row)
    return Context(np.concatenate([tokens, plain.tokens]), plain.start + len(tokens))


def cut_before(row: Response, cut: int) -> Context:
    plain = plain_context(row)
    return Context(plain.tokens[cut:], plain.start - cut)


# -- trials ----------------------------------------------------------------------------------------


def score_rows(
    model: Model,
    rows: Sequence[Response],
    samplings: Sequence[Sampling],
    hidden: np.ndarray,
    margin: float,
    dtype: str = "float32",
) -> list[Scores]:
    """Returns the scores of every row from its hidden states. margin, dtype: as in `measure`."""
    lengths = [len(row.tokens) for row in rows]
    tokens = np.concatenate([row.tokens for row in rows])
    samplings_of_tokens: list[Sampling] = []
    for sampling, length in zip(samplings, lengths, strict=True):
        samplings_of_tokens += [sampling] * length
    return measure(model, hidden, tokens, samplings_of_tokens, margin, dtype).rows(lengths)


def make_trials(
    claim: Claim,
    rows: Sequence[Response],
    neighbors: Sequence[Response | None],
) -> Iterator[Trial]:
    """Yields every hypothesis with its scores. The first one is the claim itself."""
    samplings = [row.sampling for row in rows]
    plain = [plain_context(row) for row in rows]
    # They depend on the contexts only, so that other parameters need just the head again.
    hidden = hidden_states(claim.model, plain, "float32")

    def score(changed: Sequence[Sampling]) -> list[Scores]:
        return score_rows(claim.model, rows, changed, hidden, claim.margin)

    def trial(cause: str, scores: Sequence[Scores]) -> Trial:
        return Trial(cause, scores, samplings, claim.convention, claim.noise, claim.size)

    claimed = trial("", score(samplings))
    yield claimed
    has_logps = any(row.logps is not None for row in rows)
    if has_logps:
        yield from logging_mistakes(claim, claimed)
        yield from suppressed_ends(claim, rows, claimed, hidden)
    for candidate in claim.candidates:
        model = candidate.load()
        states = hidden_states(model, plain, "float32")
        yield trial(candidate.cause, score_rows(model, rows, samplings, states, claim.margin))
        # One set of other weights at a time: two may not fit.
        del model, states
    yield from other_samplings(claimed, score)
    yield from temperatures(claim, rows, claimed, hidden, score)
    for cause, contexts in other_contexts(rows, neighbors, claim.bos):
        states = hidden_states(claim.model, contexts, "float32")
        yield trial(cause, score_rows(claim.model, rows, samplings, states, claim.margin))


def logging_mistakes(claim: Claim, claimed: Trial) -> Iterator[Trial]:
    """Yields hypotheses about the log-probs only: the tokens are as claimed."""
    notes = {
        RAW: "log-probs are at temperature 1, before temperature and filters",
        UNFILTERED: "log-probs are before the filters",
    }
    for convention in CONVENTIONS:
        if convention != claim.convention:
            note = notes.get(convention, "log-probs are after temperature and filters")
            cause = f"{note}: --logprobs={convention}, if they should be"
            yield claimed._replace(cause=cause, convention=convention)
    for shift, neighbor in ((1, "previous"), (-1, "next")):
        cause = f"log-probs are shifted by one position: each is of the {neighbor} token"
        yield claimed._replace(cause=cause, shift=shift)


def suppressed_ends(
    claim: Claim, rows: Sequence[Response], claimed: Trial, hidden: np.ndarray
) -> Iterator[Trial]:
    """Yields the hypothesis that the sampler excluded the end tokens, if there are no filters.

    The probabilities of all other tokens are then divided by 1 - p(end).
    """
    if not claim.ends or any(sampling.has_filters for sampling in claimed.samplings):
        return
    claimed_scores = concatenate(claimed.scores)
    # The probability of all end tokens, at temperature 1 and at the temperature of the row.
    mass_at_one = np.zeros(len(claimed_scores.raw))
    mass = np.zeros(len(claimed_scores.raw))
    for end in claim.ends:
        end_rows = [replace(row, tokens=np.full_like(row.tokens, end)) for row in rows]
        scores = concatenate(
            score_rows(claim.model, end_rows, claimed.samplings, hidden, claim.margin)
        )
        mass_at_one += np.exp(scores.raw, dtype=np.float64)
        mass += np.exp(scores.unfiltered, dtype=np.float64)

    def gain(mass: np.ndarray) -> np.ndarray:
        return -np.log1p(-np.minimum(mass, 1 - 1e-7)).astype(np.float32)

    changed = claimed_scores._replace(
        raw=claimed_scores.raw + gain(mass_at_one),
        unfiltered=claimed_scores.unfiltered + gain(mass),
        filtered=claimed_scores.filtered + gain(mass),
        lowest=claimed_scores.lowest + gain(mass),
        highest=claimed_scores.highest + gain(mass),
    )
    yield claimed._replace(cause=SUPPRESSED, scores=changed.rows([len(row.tokens) for row in rows]))


def other_samplings(
    claimed: Trial,
    score: Callable[[Sequence[Sampling]], list[Scores]],
) -> Iterator[Trial]:
    """Yields other filters at the claimed temperature."""
    samplings = claimed.samplings
    changes: list[tuple[str, list[Sampling]]] = []
    # No filter at all: the only change without a number to try.
    without = [s._replace(top_k=0, top_p=1.0) for s in samplings]
    changes.append(("top-k and top-p were not applied", without))
    for top_k in TOP_K:
        cause = f"top_k={top_k} was applied" if top_k > 1 else "decoding was greedy"
        changes.append((cause, [s._replace(top_k=top_k) for s in samplings]))
    for top_p in TOP_P:
        changed = [s._replace(top_p=top_p) for s in samplings]
        changes.append((f"top_p={top_p:g} was applied", changed))
    for cause, changed in changes:
        if changed != list(samplings):
            yield claimed._replace(cause=cause, scores=score(changed), samplings=changed)


def temperatures(
    claim: Claim,
    rows: Sequence[Response],
    claimed: Trial,
    hidden: np.ndarray,
    score: Callable[[Sequence[Sampling]], list[Scores]],
) -> Iterator[Trial]:
    """Yields the temperature that fits the log-probs best, and the one that fits the tokens best.

    The filters are as claimed.
    """
    # The first rows are enough for the search.
    total = np.cumsum([len(row.tokens) for row in rows])
    few = rows[: max(1, int(np.searchsorted(total, SEARCH_TOKENS, side="right")))]
    first = hidden[: total[len(few) - 1]]

    def at(temperature: float, some: Sequence[Response]) -> list[Sampling]:
        return [row.sampling._replace(temperature=temperature) for row in some]

    def fitted(loss: Callable[[list[Scores], list[Sampling]], float]) -> float:
        def value(temperature: float) -> float:
            samplings = at(temperature, few)
            return loss(score_rows(claim.model, few, samplings, first, claim.margin), samplings)

        # The grid finds a bracket with one minimum, which golden section needs.
        best = min(range(len(TEMPERATURES)), key=lambda i: value(float(TEMPERATURES[i])))
        low = float(TEMPERATURES[max(0, best - 1)])
        high = float(TEMPERATURES[min(len(TEMPERATURES) - 1, best + 1)])
        found = golden_section(value, low, high)
        # People choose temperatures with two decimals, and the cause names what they chose.
        rounded = round(found, 2)
        return rounded if value(rounded) <= value(found) + 1e-3 else found

    def median_difference(scores: list[Scores], samplings: list[Sampling]) -> float:
        parts = [
            np.abs(evidence.difference(row.logps, row_scores, sampling, claim.convention))
            for row, row_scores, sampling in zip(few, scores, samplings, strict=True)
            if row.logps is not None
        ]
        # A bound on each difference, so that a few edited tokens do not decide.
        return float(np.mean(np.minimum(np.concatenate(parts), 1.0)))

    def surprise(scores: list[Scores], samplings: list[Sampling]) -> float:
        every = concatenate(scores)
        # Tokens outside of the filters would make the loss infinite at every temperature.
        return float(-np.mean(np.where(every.is_outside, -20.0, every.filtered)))

    losses = [surprise]
    # Raw log-probs do not depend on the temperature.
    if any(row.logps is not None for row in few) and claim.convention != RAW:
        losses.append(median_difference)
    for loss in losses:
        temperature = fitted(loss)
        samplings = at(temperature, rows)
        cause = f"sampled at temperature {temperature:.3g}"
        scores = score(samplings)
        yield claimed._replace(cause=cause, scores=scores, samplings=samplings, is_fitted=True)


def golden_section(
    value: Callable[[float], float],
    low: float,
    high: float,
    steps: int = 24,
) -> float:
    """Returns about where a function with one minimum between `low` and `high` has it."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = value(right)
    return (low + high) / 2


# -- explanations ----------------------------------------------------------------------------------


def explain_logps(claim: Claim, rows: Sequence[Response], trials: Sequence[Trial]) -> list[Finding]:
    """Explains rows whose log-probs do not fit the claim."""
    claimed = trials[0]
    places = range(len(rows))
    judged = [
        (trial, {place: trial.judge(rows, place) for place in places}) for trial in trials[1:]
    ]
    findings = []
    remaining = set(places)
    while remaining:
        best: tuple[tuple[int, float], str, list[int]] | None = None
        for trial, evidences in judged:
            explained = [place for place in sorted(remaining) if evidences[place].fits]
            # A few tokens may fit anything.
            if sum(len(rows[place].tokens) for place in explained) < LEAST_TOKENS:
                continue
            rms = float(np.mean([evidences[place].rms for place in explained]))
            key = len(explained), -rms
            # A tie goes to the earlier hypothesis: the simpler ones come first.
            if best is None or key > best[0]:
                best = key, trial.cause, explained
        if best is None:
            break
        (_, negative_rms), cause, explained = best
        before = np.mean([claimed.judge(rows, place).rms for place in explained])
        numbers = f"rms difference {before:.2g} nats by the claim, {-negative_rms:.2g} by this"
        findings.append(Finding(cause, explained, numbers))
        remaining -= set(explained)
    return findings + explain_parts(claim, rows, claimed, sorted(remaining))


def explain_parts(
    claim: Claim,
    rows: Sequence[Response],
    claimed: Trial,
    places: list[int],
) -> list[Finding]:
    """Explains rows by rounding, by single tokens, or by their first part; or not at all."""
    by_cause: dict[str, list[int]] = {}
    most_rms: dict[str, list[float]] = {}
    small = small_differences(claim, rows, claimed, places)
    for place in places:
        found = claimed.judge(rows, place)
        assert found.differences is not None
        is_wrong = np.abs(found.differences) > claim.margin
        first = int(np.argmax(is_wrong)) if is_wrong.any() else 0
        if place in small:
            cause = small[place]
        # More than a tenth would be no matter of single tokens.
        elif found.tokens_fit and 0 < is_wrong.sum() <= max(1, len(is_wrong) // 10):
            cause = "single log-probs differ, and all others fit"
        # A few right tokens at the start may be chance; after an edit most tokens are wrong.
        elif first >= 8 and is_wrong[first:].mean() > 0.5:
            cause = (
                "fits up to a position and not after it: the response was edited, or the "
                "weights or the sampler changed"
            )
        else:
            cause = OTHER_MODEL
        by_cause.setdefault(cause, []).append(place)
        most_rms.setdefault(cause, []).append(found.rms)
    return [
        Finding(cause, found, f"rms difference {np.mean(most_rms[cause]):.2g} nats by the claim")
        for cause, found in by_cause.items()
    ]


def small_differences(
    claim: Claim,
    rows: Sequence[Response],
    claimed: Trial,
    places: Sequence[int],
) -> dict[int, str]:
    """Returns the cause of the rows that differ by no more than rounding would.

    Their size says only that rounding is possible. Log-probs with few decimals are recognized as
    such. bfloat16 is named if the differences go along with the rounding errors that this model has
    in bfloat16: two programs round in other places, but they round the same weights.
    """
    causes: dict[int, str] = {}
    # Judged with the noise of bfloat16, by the same scores.
    narrow = claimed._replace(noise=max(claim.noise, claim.bfloat16_noise))
    possible = []
    for place in places:
        found = claimed.judge(rows, place)
        decimals = decimals_of(rows[place], found, claim.margin)
        if decimals is not None:
            causes[place] = f"log-probs are rounded to {decimals} decimals"
        elif claim.dtype != "bfloat16" and narrow.judge(rows, place).fits:
            possible.append(place)
    if not possible:
        return causes
    chosen = [rows[place] for place in possible]
    contexts = [plain_context(row) for row in chosen]
    in_bfloat16 = score_rows(
        claim.model,
        chosen,
        [row.sampling for row in chosen],
        hidden_states(claim.model, contexts, "bfloat16"),
        margin=0.0,
        dtype="bfloat16",
    )
    differences, errors = [], []
    for place, scores in zip(possible, in_bfloat16, strict=True):
        found = claimed.judge(rows, place).differences
        assert found is not None
        wide = claimed.scores[place]
        is_raw = claim.convention == RAW or not claimed.samplings[place].temperature
        errors.append(scores.raw - wide.raw if is_raw else scores.unfiltered - wide.unfiltered)
        differences.append(found)
    # A row has few tokens: all rows decide, and then each row that disagrees.
    all_agree = correlation(np.concatenate(differences), np.concatenate(errors)) > CORRELATED
    for place, found, error in zip(possible, differences, errors, strict=True):
        disagrees = correlation(found, error) < -1.0
        is_explained = all_agree and not disagrees
        causes[place] = f"computed in bfloat16, not in {claim.dtype}" if is_explained else SMALL
    return causes


def correlation(
    differences: Float32[np.ndarray, " tokens"], errors: Float32[np.ndarray, " tokens"]
) -> float:
    """Returns the correlation with the rounding errors in standard deviations; 0 without any."""
    scale = float(np.sqrt(np.sum(np.square(differences)) * np.sum(np.square(errors))))
    # Not centered: a difference of one sign is no rounding.
    return float(np.sum(differences * errors)) / scale * math.sqrt(len(errors)) if scale else 0.0


def decimals_of(row: Response, found: Evidence, margin: float) -> int | None:
    """Returns the number of decimals to which the log-probs of a row are rounded, or None."""
    if row.logps is None or found.differences is None or len(row.logps) < LEAST_TOKENS:
        return None
    for decimals in range(1, MOST_DECIMALS + 1):
        scaled = row.logps.astype(np.float64) * 10**decimals
        is_rounded = np.abs(scaled - np.round(scaled)).max() < 1e-3
        half = 0.5 * 10**-decimals
        if is_rounded and np.abs(found.differences).max() <= half + margin and found.tokens_fit:
            return decimals
    return None


def explain_tokens(
    claim: Claim,
    rows: Sequence[Response],
    trials: Sequence[Trial],
) -> list[Finding]:
    """Explains tokens that the claimed model has not sampled, without log-probs.

    All rows get one cause: the tokens of a single row are too little evidence.
    """
    places = list(range(len(rows)))
    claimed = concatenate(trials[0].scores)
    limit = evidence.ratio_limit(len(trials), len(claimed.raw), claim.noise)
    best: tuple[float, Trial] | None = None
    for trial in trials[1:]:
        scores = concatenate(trial.scores)
        # A hypothesis has to pass the tests that the claim fails.
        is_possible = not scores.is_outside.any()
        if not (is_possible and evidence.ranks_fit(scores)):
            continue
        if evidence.likelihood_test(scores)[0] > limit:
            continue
        # A fitted parameter gains half a nat by chance; three leave no doubt.
        total = float(np.sum(scores.filtered, dtype=np.float64)) - 3 * trial.is_fitted
        if best is None or total > best[0]:
            best = total, trial
    log_ratio, z = evidence.likelihood_test(claimed)
    num_outside = int(claimed.is_outside.sum())
    numbers = f"z={z:.1f}, log ratio {log_ratio:.1f}"
    if num_outside:
        numbers += f", {num_outside} tokens outside of top-k or top-p"
    if best is not None:
        gain = best[0] - float(np.sum(claimed.filtered, dtype=np.float64))
        if gain > limit or num_outside:
            cause = best[1].cause
            if any(not best[1].judge(rows, place).logps_fit for place in places):
                # Trainers compute log-probs again, with their own weights and temperature.
                cause += "; the log-probs were computed again, as claimed"
            explained = "" if num_outside else f"; {gain:.1f} nats likelier by this"
            return [Finding(cause, places, numbers + explained)]
    return [Finding(OTHER_MODEL, places, numbers)]


def explain_likelier(
    claim: Claim,
    rows: Sequence[Response],
    trials: Sequence[Trial],
) -> list[Finding]:
    """Explains rows that pass all tests, but are far likelier under another hypothesis.

    Only hypotheses without a fitted parameter count, as the ratio's bound requires.
    """
    claimed = concatenate(trials[0].scores)
    limit = evidence.ratio_limit(len(trials), len(claimed.raw), claim.noise)
    fixed = [trial for trial in trials if not trial.is_fitted]
    totals = []
    for trial in fixed[1:]:
        scores = concatenate(trial.scores)
        total = float(np.sum(scores.filtered - claimed.filtered, dtype=np.float64))
        # A hypothesis that excludes a logged token is impossible.
        totals.append(-math.inf if scores.is_outside.any() else total)
    if max(totals) > limit:
        return explain_tokens(claim, rows, trials)
    return []


Explain = Callable[[Claim, Sequence[Response], Sequence[Trial]], list[Finding]]
