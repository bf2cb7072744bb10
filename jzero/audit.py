"""Checks which responses of a rollout log a model cannot have sampled, and finds the cause.

    python -m jzero.audit LOG.jsonl --model DIR_OR_ID [--adapter DIR] [--also NAME=DIR ...]
        [--dtype float32|float16|bfloat16] [--logprobs sampled|unfiltered|raw] [--limit N]

The log may be of any stack. A row is one response, a JSON object with `prompt_ids` and
`response_ids`, and optionally `logprobs` (of the sampler, one per response token), `temperature`,
`top_p`, `top_k` and `version`; the names of vLLM's and TRL's outputs are read as well.

The claim is that --model, with --adapter, sampled the responses in --dtype with these parameters.
The model scores every response again. Rows whose log-probs differ by more than the rounding of the
dtype, tokens outside of top-k or top-p, and tokens that are too improbable reject the claim. Other
hypotheses are then scored, and those that explain the rejected rows are printed: the base without
its adapter, another scale of it, weights given with --also, other sampling parameters, suppressed
end tokens, log-probs of another kind or position, a cut prompt, a BOS more or less, the tokens of a
neighbor, another dtype. A row with tokens after an end token (--ends) is rejected, too.

The exit status is 0 if nothing is rejected, 1 if something is, and 2 if an argument is wrong.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from jzero import cli, command_flags, terminal
from jzero.audits import causes, evidence
from jzero.audits.causes import Candidate, Claim, Finding
from jzero.audits.evidence import SAMPLED, Evidence, Size
from jzero.audits.log import Response, Sampling, read_log
from jzero.audits.scores import Model, Scores, concatenate, hidden_states
from jzero.blueprint import describe_on_one_device
from jzero.errors import UserError, shown
from jzero.files import JsonObject, write_atomic
from jzero.model import adapters, end_tokens, huggingface, peft
from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import window_of
from jzero.service.weights import load, load_adapter

PART_TOKENS = 1 << 14  # responses of about this many tokens are scored before progress is shown
SCALES = (0.0625, 0.25, 0.5, 2.0, 4.0, 16.0)  # of an adapter, relative to alpha / rank
SHOWN_LINES = 8
NO_ENDS = "none"  # value of --ends
MOST_GROUPS = 8  # of versions whose rows are tested together


# -- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The claimed weights: a base, and its adapter if it has one."""

    config: QwenConfig
    base: Params
    adapter: Params | None
    scale: float  # alpha / rank
    rank: int

    def model(self, factor: float = 1.0) -> Model:
        """Returns the model with `factor` times the scale of the adapter; 0: the base."""
        if self.adapter is None or not factor:
            return Model(self.config, self.base)
        # A product of the arrays, because another scale would be compiled again.
        changed = {
            name: {"a": factors["a"], "b": factors["b"] * factor}
            for name, factors in adapters.factors_of(self.adapter).items()
        }
        adapter = adapters.tree_of(changed)
        return Model(self.config, adapters.join(self.base, adapter, self.scale))


def read_weights(directory: Path, config: QwenConfig, adapter: str | None) -> Weights:
    blueprint = describe_on_one_device(config)
    base = load(blueprint, directory)
    if adapter is None:
        return Weights(config, base, None, 1.0, 0)
    path = peft.resolve(adapter)
    settings = peft.read_settings(path, config)
    factors = load_adapter(blueprint, settings, path, directory)
    return Weights(config, base, factors, settings.scale, settings.rank)


def find_candidates(
    weights: Weights,
    also: Sequence[tuple[str, str]],
    responses: Sequence[Response],
) -> list[Candidate]:
    """Returns the other weights that may have sampled. They are read when they are needed."""
    found = []
    for name, path in also:
        cause = f"sampled by {name}"
        adapter = Path(path).expanduser()
        if (adapter / peft.CONFIG).exists():
            # Read now, so that a wrong adapter is reported before the log is scored.
            peft.read_settings(adapter, weights.config)
            found.append(Candidate(cause, partial(with_adapter, weights, adapter)))
        else:
            directory = huggingface.resolve(path)
            config, hf_config = huggingface.load_config(directory)
            check_window(f"--also {name}={path}", hf_config, responses)
            # A larger vocabulary has padding; a smaller one lacks tokens that the log may contain.
            if config.vocab_size < weights.config.vocab_size:
                raise UserError(
                    f"--also {name}={path} has {config.vocab_size} tokens, and --model "
                    f"{weights.config.vocab_size}: give weights with the same tokenizer"
                )
            found.append(Candidate(cause, partial(read_model, directory, config)))
    if weights.adapter is not None:
        found.append(Candidate("the adapter was not applied", partial(weights.model, 0.0)))
        # A scale of 1, of alpha, and of alpha / sqrt(rank), which is rsLoRA's.
        scales = {1 / weights.scale, float(weights.rank), float(np.sqrt(weights.rank))}
        for factor in sorted({round(scale, 6) for scale in (*scales, *SCALES)} - {1.0}):
            cause = f"the adapter was applied at {factor:g} times its scale"
            found.append(Candidate(cause, partial(weights.model, factor)))
    return found


def with_adapter(weights: Weights, path: Path) -> Model:
    settings = peft.read_settings(path, weights.config)
    factors = load_adapter(describe_on_one_device(weights.config), settings, path)
    return Model(weights.config, adapters.join(weights.base, factors, settings.scale))


def read_model(directory: Path, config: QwenConfig) -> Model:
    return Model(config, load(describe_on_one_device(config), directory))


# -- the audit -------------------------------------------------------------------------------------


def measure_rounding(
    model: Model,
    responses: Sequence[Response],
    convention: str,
) -> list[Float32[np.ndarray, " tokens"]]:
    """Returns the rounding errors of bfloat16 in every response, in nats."""
    contexts = [causes.plain_context(response) for response in responses]
    # Rounding itself is measured here, so that nothing is allowed for it: margin=0.
    wide, narrow = (
        causes.score_rows(
            model,
            responses,
            [response.sampling for response in responses],
            hidden_states(model, contexts, kind),
            margin=0.0,
            dtype=kind,
        )
        for kind in ("float32", "bfloat16")
    )
    pairs = zip(narrow, wide, strict=True)
    return [evidence.rounding_errors(low, high, convention) for low, high in pairs]


def score_log(claim: Claim, responses: Sequence[Response]) -> list[Scores]:
    """Returns the scores of all responses under the claim."""
    scores: list[Scores] = []
    with terminal.phase("score", total=len(responses), unit="responses") as phase:
        while len(scores) < len(responses):
            end, num_tokens = len(scores), 0
            # At least one response, however long it is.
            while end < len(responses) and (not num_tokens or num_tokens < PART_TOKENS):
                num_tokens += len(responses[end].prompt) + len(responses[end].tokens)
                end += 1
            part = responses[len(scores) : end]
            contexts = [causes.plain_context(response) for response in part]
            hidden = hidden_states(claim.model, contexts, "float32")
            samplings = [response.sampling for response in part]
            scores += causes.score_rows(claim.model, part, samplings, hidden, claim.margin)
            phase.advance(len(part))
    return scores


def reject(
    claim: Claim,
    responses: Sequence[Response],
    scores: Sequence[Scores],
) -> tuple[list[Evidence], list[int], list[int]]:
    """Returns the tests of all rows, and the rows with wrong log-probs and with wrong tokens."""

    def test(place: int, noise: float) -> Evidence:
        response = responses[place]
        return evidence.judge(
            response, scores[place], response.sampling, noise, claim.convention, claim.size
        )

    found = [test(place, claim.noise) for place in range(len(responses))]
    suspects = [place for place, tests in enumerate(found) if not tests.fits]
    if suspects and claim.noise > evidence.LEAST_NOISE:
        # Some prompts round worse than others: suspects are tested with their own noise.
        chosen = [responses[place] for place in suspects]
        rounding = measure_rounding(claim.model, chosen, claim.convention)
        for place, errors in zip(suspects, rounding, strict=True):
            noise = evidence.noise_of(errors, claim.dtype)
            found[place] = test(place, max(noise, claim.noise))
    wrong_logps = [place for place, tests in enumerate(found) if not tests.logps_fit]
    # Tokens of a row with wrong log-probs are explained together with its log-probs.
    wrong_tokens = [
        place for place, tests in enumerate(found) if tests.logps_fit and not tests.tokens_fit
    ]
    return found, wrong_logps, wrong_tokens


def audit(claim: Claim, responses: Sequence[Response]) -> tuple[list[Evidence], list[Finding]]:
    """Tests all rows, and explains those that are rejected. Findings have places in the log."""
    scores = score_log(claim, responses)
    found, wrong_logps, wrong_tokens = reject(claim, responses, scores)
    findings = past_the_end(claim, responses)
    if wrong_logps:
        findings += explain(claim, responses, wrong_logps, causes.explain_logps)
    groups = version_groups(responses)
    for group in groups:
        rejected = sorted(set(group) & set(wrong_tokens))
        others = [place for place in group if found[place].fits]
        # Rows that pass by themselves may be rejected together: small deviations add up.
        if others and is_rejected(claim, [scores[i] for i in others], len(groups)):
            rejected = sorted(rejected + others)
        if rejected:
            findings += explain(claim, responses, rejected, causes.explain_tokens)
        elif without := [place for place in others if responses[place].logps is None]:
            # Without log-probs only a comparison tells similar weights apart.
            findings += explain(claim, responses, without, causes.explain_likelier)
    return found, findings


def past_the_end(claim: Claim, responses: Sequence[Response]) -> list[Finding]:
    """Returns the rows that have tokens after an end token, as no sampler that stops there has."""
    ends = [end_of(claim, response) for response in responses]
    places = [place for place, end in enumerate(ends) if end is not None]
    if not places:
        return []
    first, end = responses[places[0]], ends[places[0]]
    assert end is not None
    num_further = len(first.tokens) - end - 1
    numbers = f"{num_further} tokens after end token {first.tokens[end]}; --ends names other tokens"
    return [Finding(causes.PAST_THE_END, places, numbers)]


def end_of(claim: Claim, response: Response) -> int | None:
    """Returns the position of the first end token that is not the last token, or None."""
    is_end = np.isin(response.tokens[:-1], claim.ends)
    return int(np.argmax(is_end)) if is_end.any() else None


def version_groups(responses: Sequence[Response]) -> list[list[int]]:
    """Returns the rows of every version; many versions are at most MOST_GROUPS ranges.

    Every group may be scored under all hypotheses.
    """
    # Versions are texts of numbers: shorter ones are smaller, so 9 comes before 10.
    versions = sorted({row.version for row in responses}, key=lambda text: (len(text), text))
    count = min(MOST_GROUPS, len(versions))
    group_of = {version: i * count // len(versions) for i, version in enumerate(versions)}
    groups: list[list[int]] = [[] for _ in range(count)]
    for place, response in enumerate(responses):
        groups[group_of[response.version]].append(place)
    return groups


def is_rejected(claim: Claim, scores: Sequence[Scores], num_tests: int) -> bool:
    """Returns whether rows that pass their own tests are rejected together."""
    joined = concatenate(scores)
    log_ratio, _ = evidence.likelihood_test(joined)
    return log_ratio > evidence.ratio_limit(num_tests, len(joined.raw), claim.noise)


def explain(
    claim: Claim,
    responses: Sequence[Response],
    places: list[int],
    explain_sample: causes.Explain,
) -> list[Finding]:
    """Explains rows by a sample of them. A cause of all of the sample is one of all rows."""
    lengths = [len(response.tokens) for response in responses]
    sample = causes.choose_sample(places, lengths)
    rows = [responses[place] for place in sample]
    # Packing puts rows next to each other in the order of the log.
    neighbors = [responses[place - 1] if place else None for place in sample]
    with terminal.phase("explain"):
        trials = list(causes.make_trials(claim, rows, neighbors))
        found = explain_sample(claim, rows, trials)
    findings = []
    for cause, explained, numbers in found:
        covers_all = len(explained) == len(rows)
        in_log = places if covers_all else [sample[place] for place in explained]
        if not covers_all and len(rows) < len(places):
            numbers += f"; {len(explained)} of {len(rows)} examined"
        findings.append(Finding(cause, in_log, numbers))
    return findings


# -- the report ------------------------------------------------------------------------------------


def worst_token(found: Evidence, scores: Scores) -> int:
    """Returns the position of the token that speaks most clearly against the claim."""
    if found.differences is not None and not found.logps_fit:
        return int(np.argmax(np.abs(found.differences)))
    if scores.is_outside.any():
        return int(np.argmax(scores.is_outside))
    # Relative to what the model expects: where it is unsure, every token is improbable.
    return int(np.argmin(scores.filtered - scores.mean))


def describe(
    claim: Claim,
    finding: Finding,
    responses: Sequence[Response],
    found: Sequence[Evidence],
) -> JsonObject:
    """Returns a finding as JSON, with an example."""
    place = finding.places[0]
    response = responses[place]
    contexts = [causes.plain_context(response)]
    hidden = hidden_states(claim.model, contexts, "float32")
    [scores] = causes.score_rows(claim.model, [response], [response.sampling], hidden, claim.margin)
    position = worst_token(found[place], scores)
    if finding.cause == causes.PAST_THE_END:
        end = end_of(claim, response)
        assert end is not None
        position = end + 1
    example: JsonObject = {
        "line": response.line,
        "position": position,
        "token": int(response.tokens[position]),
        "rank": int(scores.rank[position]),
        "outside": bool(scores.is_outside[position]),
        "computed": round(float(computed(scores, response, claim.convention)[position]), 4),
    }
    if response.logps is not None:
        example["logged"] = round(float(response.logps[position]), 4)
    return {
        "cause": finding.cause,
        "lines": [responses[place].line for place in finding.places],
        "versions": sorted({responses[place].version for place in finding.places} - {""}),
        "numbers": finding.numbers,
        "example": example,
    }


def computed(scores: Scores, response: Response, convention: str) -> np.ndarray:
    """Returns the log-probs that an honest log would have."""
    if convention == SAMPLED and response.sampling.temperature:
        return scores.filtered
    is_raw = convention == evidence.RAW or not response.sampling.temperature
    return scores.raw if is_raw else scores.unfiltered


def write_text(report: JsonObject) -> None:
    """Prints a report."""
    terminal.say(
        f"{report['responses']:,} responses with {report['tokens']:,} tokens, "
        f"{report['with_logprobs']:,} with log-probs; {report['rejected']:,} rejected; "
        f"rounding of {report['dtype']}: {report['noise']:.2g} nats"
    )
    for finding in report["findings"]:
        lines, example = finding["lines"], finding["example"]
        terminal.say("")
        terminal.say(f"{len(lines):,} of {report['responses']:,} responses: {finding['cause']}")
        shown = ", ".join(map(str, lines[:SHOWN_LINES]))
        more = ", ..." if len(lines) > SHOWN_LINES else ""
        terminal.say(f"  lines {shown}{more}")
        if finding["versions"]:
            terminal.say(f"  versions {', '.join(finding['versions'][:SHOWN_LINES])}")
        logged = f"logged {example['logged']}, " if "logged" in example else ""
        outside = ", outside of the filters" if example["outside"] else ""
        terminal.say(
            f"  line {example['line']}, position {example['position']}: token {example['token']} "
            f"of rank {example['rank']}{outside}; {logged}computed {example['computed']}"
        )
        terminal.say(f"  {finding['numbers']}")
    if not report["findings"]:
        terminal.say("nothing is rejected: the log fits the claim")


# -- the command -----------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_flags.audit(__doc__)
    return parser.parse_args(arguments)


def read_also(flags: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the names and the directories of --also."""
    also = []
    for flag in flags:
        name, equals, path = flag.partition("=")
        if not (name and equals and path):
            raise UserError(f"--also {flag}: write --also NAME=DIR, such as --also step100=DIR")
        also.append((name, path))
    return also


def read_claim(options: argparse.Namespace) -> tuple[Claim, list[Response]]:
    """Reads the log and the weights, and measures the rounding."""
    if not (0 <= options.temperature <= 100 and 0 < options.top_p <= 1 and options.top_k >= 0):
        raise UserError(
            "--temperature has to be from 0 to 100, --top_p above 0 and at most 1, --top_k from 0"
        )
    # Arguments are checked before the weights are read, which takes minutes.
    also = read_also(options.also)
    directory = huggingface.resolve(options.model)
    config, hf_config = huggingface.load_config(directory)
    defaults = Sampling(options.temperature, options.top_k, options.top_p)
    responses = read_log(options.log, config.vocab_size, defaults, options.limit)
    check_window(options.model, hf_config, responses)
    ends = read_ends(options.ends, directory, config.vocab_size)
    weights = read_weights(directory, config, options.adapter)
    candidates = find_candidates(weights, also, responses)
    model = weights.model()
    lengths = [len(response.tokens) for response in responses]
    sample = causes.choose_sample(range(len(responses)), lengths)
    some = [responses[place] for place in sample]
    rounding = measure_rounding(model, some, options.logprobs)
    bos = hf_config.get("bos_token_id")
    claim = Claim(
        model=model,
        dtype=options.dtype,
        convention=options.logprobs,
        noise=mean_noise(rounding, options.dtype),
        bfloat16_noise=mean_noise(rounding, "bfloat16"),
        size=Size(len(responses), sum(lengths)),
        bos=bos if type(bos) is int and 0 <= bos < config.vocab_size else None,
        candidates=candidates,
        ends=ends,
    )
    return claim, responses


def check_window(name: str, hf_config: JsonObject, responses: Sequence[Response]) -> None:
    """Raises UserError if a row is longer than the attention window of a model.

    jzero attends to all tokens. The last token of a row predicts nothing and is not read.
    """
    window = window_of(hf_config)
    for row in responses:
        num_read = len(row.prompt) + len(row.tokens) - 1
        if window is not None and num_read > window:
            raise UserError(
                f"{name} has sliding_window={window}, and line {row.line} of the log has "
                f"{num_read + 1} tokens: jzero attends to all tokens, so only rows of at most "
                f"{window + 1} tokens can be audited with this model"
            )


def read_ends(text: str, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the end tokens of --ends, or those of the model's files without this flag.

    generation_config.json takes precedence over config.json.
    """
    if text == NO_ENDS:
        return ()
    if text:
        parts = text.split(",")
        if not all(part.isdecimal() and int(part) < vocab_size for part in parts):
            raise UserError(
                f"--ends {shown(text)}: write token ids below {vocab_size} with commas, or "
                f"{NO_ENDS}"
            )
        return tuple(int(part) for part in parts)
    _, ids = end_tokens.named_eos_ids(directory)
    return tuple(token for token in ids if token < vocab_size)


def mean_noise(rounding: Sequence[Float32[np.ndarray, " tokens"]], dtype: str) -> float:
    noises = [evidence.noise_of(errors, dtype) for errors in rounding]
    return float(np.sqrt(np.mean(np.square(noises))))


def main() -> None:
    """Runs the command."""
    options = parse(cli.start_jax(sys.argv[1:]))
    with cli.user_errors():
        claim, responses = read_claim(options)
        found, findings = audit(claim, responses)
        rejected_alone = {place for place, tests in enumerate(found) if not tests.fits}
        report: JsonObject = {
            "responses": len(responses),
            "tokens": sum(len(response.tokens) for response in responses),
            "with_logprobs": sum(response.logps is not None for response in responses),
            "rejected": len(rejected_alone.union(*(finding.places for finding in findings))),
            "dtype": claim.dtype,
            "noise": claim.noise,
            "findings": [describe(claim, finding, responses, found) for finding in findings],
        }
        write_text(report)
        if options.json:
            write_atomic(options.json, json.dumps(report, indent=2) + "\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    terminal.run_command(main)
