"""Defines the metrics that a run can write, and the columns of the terminal's table.

The metrics of the loss are defined with the loss (`jzero.algorithms.metrics`), all others here, and
docs/reference/metrics.md prints both. A metric that neither has, such as one of a user-defined
loss, is written like the others. Names are flat, `group/name`. In a name, `<word>` matches any
text, and `[...]` marks an optional part: `eval[/<suite>]/pass@<k>` describes `eval/pass@4` and
`eval/math500/pass@4`.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jzero.algorithms.metrics import metrics_of_the_loss


@dataclass(frozen=True)
class Metric:
    """The meaning of a number."""

    meaning: str  # a sentence
    unit: str  # "" for a number without a unit


@dataclass(frozen=True)
class Column:
    """How the terminal's table shows a metric."""

    label: str
    format: str  # format spec of the number


METRICS: dict[str, Metric] = {
    # -- The rewards of a step's rollouts, before dynamic sampling replaces uniform groups.
    "reward/mean": Metric(
        "Mean score of the rollouts that have one. Truncated ones have the score that "
        "algorithm.truncated=fixed or ignore gives them.",
        "",
    ),
    "reward/accuracy": Metric(
        "Share of rollouts that the grader calls correct.",
        "share",
    ),
    "reward/zero_variance_groups": Metric(
        "Share of groups whose rollouts all have the same score; most algorithms learn nothing "
        "from them.",
        "share",
    ),
    "reward/failed": Metric(
        "Share of rollouts without a score, because a user-defined function failed on them; they "
        "are not trained on.",
        "share",
    ),
    "reward/parts_left_out": Metric(
        "Names of rewards and of their parts that the step has beyond 256; they are in no metric.",
        "names",
    ),
    "reward/<function>": Metric(
        "Mean of one function of `task.reward.functions`; a colon in its name becomes a dot.",
        "",
    ),
    # -- Sampling.
    "rollout/length": Metric(
        "Mean length of a response; environment replies between its turns count.",
        "tokens",
    ),
    "rollout/length_max": Metric("Length of the longest response.", "tokens"),
    "rollout/truncated": Metric(
        "Share of rollouts whose last turn ran into the token limit.",
        "share",
    ),
    "rollout/tokens": Metric("Sum of the lengths of all responses.", "tokens"),
    "rollout/tokens_per_second": Metric(
        "Tokens that the policy sampled divided by `time/sample`.",
        "tokens/s",
    ),
    "rollout/dropped_prompts": Metric(
        "Problems dropped because their prompt exceeds `rollout.max_prompt_tokens`.", "problems"
    ),
    "rollout/rounds": Metric(
        "Rounds of sampling that the step needed (`algorithm.dynamic_sampling_rounds` > 0).",
        "rounds",
    ),
    "rollout/preempted": Metric(
        "Sequences that gave up their KV pages for a while because the pages ran out.", "sequences"
    ),
    "rollout/slot_utilization": Metric(
        "Decoded tokens divided by the slots times decode steps that were computed for them; with "
        "`rollout.draft` the slots that a pass needed, divided by all slots of the passes.",
        "share",
    ),
    "rollout/drafts_accepted": Metric(
        "Share of the drafted tokens that were accepted (`rollout.draft`).", "share"
    ),
    "rollout/tokens_per_pass": Metric(
        "Tokens of a sequence in one pass of the model, on average (`rollout.draft`).", "tokens"
    ),
    "rollout/prefix_cache_hits": Metric(
        "Share of the tokens to prefill whose KV was cached (`rollout.prefix_cache=on`).", "share"
    ),
    # -- Episodes of several turns.
    "turns/mean": Metric("Mean number of turns of an episode.", "turns"),
    "turns/sampled_tokens": Metric(
        "Tokens that the policy sampled: `rollout/tokens` without the environment's replies.",
        "tokens",
    ),
    "turns/first_try": Metric("Share of episodes whose first turn is correct.", "share"),
    # -- The same metrics for the rows of one task (`task.name=mixed`), such as `reward/mean/code`.
    "reward/mean/<task>": Metric("As `reward/mean`, of the rows of one task.", ""),
    "reward/accuracy/<task>": Metric("As `reward/accuracy`, of the rows of one task.", "share"),
    "rollout/count/<task>": Metric("Rollouts of the rows of one task.", "rollouts"),
    "rollout/length/<task>": Metric("As `rollout/length`, of the rows of one task.", "tokens"),
    "turns/mean/<task>": Metric("As `turns/mean`, of the rows of one task.", "turns"),
    "turns/first_try/<task>": Metric("As `turns/first_try`, of the rows of one task.", "share"),
    # -- Asynchronous rollouts (`rollout.placement.max_staleness` > 0).
    "async/staleness": Metric(
        "Mean staleness of the sampled tokens: how many policy versions ago each was sampled.",
        "versions",
    ),
    "async/staleness_<n>": Metric("Share of sampled tokens that are n versions old.", "share"),
    "async/carried_tokens": Metric(
        "Tokens of unfinished episodes that continue in the next step.", "tokens"
    ),
    "async/ready_groups": Metric(
        "Groups that are finished and wait for the step that trains on them.", "groups"
    ),
    "async/wasted_tokens": Metric("Tokens decoded after the end of their sequence.", "tokens"),
    "async/overlap": Metric(
        "Share of the time spent decoding that training did not wait for, since the process began "
        "(`rollout.placement=apart`).",
        "share",
    ),
    # -- Separate jobs (`rollout.placement=jobs`).
    "jobs/wait_seconds": Metric(
        "Time that the trainer waited for the rollouts of the step.", "seconds"
    ),
    "jobs/refused_results": Metric("Results of samplers that failed validation.", "results"),
    "jobs/given_again": Metric(
        "Requests that a second sampler may take because the first one is slow.", "requests"
    ),
    "jobs/continued_tokens": Metric(
        "Tokens of the step that a sampler handed over, and another one did not sample again.",
        "tokens",
    ),
    "jobs/snapshot_bytes": Metric("Bytes of the snapshot of the weights in the store.", "bytes"),
    # -- Grading of the step's responses.
    "grade/no_answer": Metric("Responses in which no answer was found.", "responses"),
    "grade/unparsed": Metric("Responses whose answer could not be parsed.", "responses"),
    "grade/echo": Metric("Responses that repeat the problem as their answer.", "responses"),
    "grade/errors": Metric(
        "Responses on which the grader or a user-defined function failed.", "responses"
    ),
    "grade/timeouts": Metric(
        "Times that grading or a user-defined function exceeded its limit.", "responses"
    ),
    "grade/killed": Metric(
        "Times that a worker process died while it graded, or an environment lost its connection.",
        "responses",
    ),
    "grade/restarted": Metric("Worker processes that were replaced.", "processes"),
    # -- The tools that the policy called (`task.tools.names`). A step without tool calls has none
    # of these metrics.
    "tools/calls": Metric("Calls of an episode, on average.", "calls"),
    "tools/failed": Metric(
        "Calls of an episode that were answered with an error, on average.", "calls"
    ),
    "tools/seconds": Metric(
        "Time that the calls of an episode took, on average. Others are sampled meanwhile.",
        "seconds",
    ),
    # -- The requests of agents (`task.name=agent`).
    "agent/responses": Metric("Responses that the agents of a step have received.", "responses"),
    "agent/branches": Metric(
        "Sequences of the episodes: one for each episode whose requests continue one another.",
        "sequences",
    ),
    "agent/refused": Metric("Requests of agents that were answered with an error.", "requests"),
    "agent/unread_tokens": Metric(
        "Sampled tokens that no agent has received, because it has ended; they are not trained on.",
        "tokens",
    ),
    "agent/repeated_tokens": Metric(
        "Sampled tokens that several sequences train; it is always 0.", "tokens"
    ),
    # -- The sandbox that runs the programs in responses (`task.name=code`, the tool `python`).
    "sandbox/level": Metric(
        "Protection from programs: 3 namespaces, 2 landlock, 1 seccomp, 0 none; -1 on a server "
        "elsewhere.",
        "",
    ),
    "sandbox/seconds": Metric(
        "Time that the programs of the step ran for, summed over the grader processes. Programs "
        "run while others are still sampled.",
        "seconds",
    ),
    # -- MoE routing (`model_type=qwen3_moe`) in the update, for the tokens of responses and
    # prompts.
    "experts/violation": Metric(
        "Load of a layer's busiest expert divided by the mean load, minus 1; the mean over layers.",
        "",
    ),
    "experts/violation_max": Metric("The same of the layer in which it is largest.", ""),
    "experts/largest_load": Metric(
        "Largest share of a layer's choices that went to one expert.", "share"
    ),
    "experts/unused": Metric("Share of experts that no token went to.", "share"),
    # -- The head for drafts (`rollout.draft=mtp`), on the tokens that it is trained on.
    "mtp/accuracy": Metric(
        "Share of the sampled tokens that the head predicts: they are its most probable ones.",
        "share",
    ),
    "mtp/nll": Metric("Mean negative log-likelihood of the sampled tokens under the head.", "nats"),
    # -- The policy on the trained tokens. Means are over the tokens of all optimizer steps, except
    # sequences counted by `update/left_out`. A step that trains on no token has none of these
    # metrics.
    "policy/exact_tokens": Metric(
        "Tokens of the first optimizer step whose log-probability was compared with the sampler's "
        "and has the same bits (`model.exact`).",
        "tokens",
    ),
    # -- The teacher of on-policy distillation. Means are over the sampled tokens that it scored,
    #    before the first optimizer step.
    "distill/kl": Metric(
        "Mean of log pi_old - log pi_teacher: the estimate k1 of the KL from the policy to the "
        "teacher, which distillation lowers.",
        "nats",
    ),
    "distill/teacher_nll": Metric("Mean of -log pi_teacher of the sampled tokens.", "nats"),
    "distill/dropped": Metric(
        "Share of sequences that the teacher has not scored, because its own prompt exceeds "
        "`teacher.max_prompt_tokens`; it adds nothing to their advantages.",
        "share",
    ),
    # -- The optimizer and the critic. Means are over the optimizer steps of a step.
    "optimizer/loss": Metric("Mean loss.", ""),
    "optimizer/grad_norm": Metric(
        "Mean global norm of the gradient, before it is clipped.",
        "",
    ),
    "optimizer/lr": Metric("Learning rate of the last optimizer step.", ""),
    "optimizer/skipped": Metric(
        "Share of optimizer steps skipped because the norm exceeds `optimizer.skip_norm`.",
        "share",
    ),
    "critic/grad_norm": Metric("As `optimizer/grad_norm`, of the critic.", ""),
    "critic/skipped": Metric("As `optimizer/skipped`, of the critic.", "share"),
    # -- Packed batches.
    "update/left_out": Metric(
        "Share of sequences that are not packed, because they add exactly nothing to the gradient: "
        "all their advantages are 0, or none of their tokens is trained. At 1 the model is not "
        "computed, and only the moments of earlier steps change the weights.",
        "share",
    ),
    "update/tokens": Metric("Tokens in the packed rows that are not padding.", "tokens"),
    "update/padding": Metric("Share of the packed rows that is padding.", "share"),
    "update/tokens_per_second": Metric(
        "Tokens that are not padding divided by `time/update`.",
        "tokens/s",
    ),
    "publish/bytes": Metric(
        "Size on one device of the weights that the step handed to the decoder: the model's, or "
        "only an adapter's.",
        "bytes",
    ),
    # -- Memory of the devices, after the step.
    "memory/live_gib": Metric(
        "Bytes of the live arrays on the device of the first host that holds the most.", "GiB"
    ),
    "memory/peak_gib": Metric(
        "Most bytes that were in use on a device since the process began; on a CPU the most of "
        "`memory/live_gib`.",
        "GiB",
    ),
    "memory/planned_gib": Metric(
        "What the planner counted for the largest phase, where the memory was checked "
        "(`memory.check`).",
        "GiB",
    ),
    # -- Supervised fine-tuning.
    "sft/loss": Metric(
        "Mean negative log-likelihood of the trained tokens.",
        "nats",
    ),
    "sft/tokens": Metric("Tokens that are trained on.", "tokens"),
    "sft/epoch": Metric("Passes over the data so far.", "epochs"),
    "sft/dropped": Metric(
        "Examples of the batch that were dropped because they exceed `sft.pack_length`.", "examples"
    ),
    # -- Evaluation on held-out problems. A suite of `eval.suites` has its name in the metric.
    "eval/loss": Metric(
        "Mean negative log-likelihood of the held-out examples (SFT).",
        "nats",
    ),
    "eval[/<suite>]/accuracy": Metric(
        "Mean accuracy over `eval.samples` samples a problem, at `eval.temperature`.", "share"
    ),
    "eval[/<suite>]/accuracy_by/<verifier>": Metric(
        "The same by a verifier of `eval.verifiers`, for the same responses.", "share"
    ),
    "eval[/<suite>]/score": Metric(
        "Mean score of the responses that have one, if all of `task.reward.functions` were called.",
        "",
    ),
    "eval[/<suite>]/reward/<function>": Metric(
        "Mean of one function of `task.reward.functions` (`eval.rewards`).", ""
    ),
    "eval[/<suite>]/failed": Metric(
        "Share of responses without a score, because a reward function failed on them; there if it "
        "is above 0.",
        "share",
    ),
    "eval[/<suite>]/problems": Metric("Problems of the evaluation.", "problems"),
    "eval[/<suite>]/stderr": Metric(
        "Standard error of the accuracy over problems; absent for one problem.", "share"
    ),
    "eval[/<suite>]/length": Metric("Mean length of a response.", "tokens"),
    "eval[/<suite>]/truncated": Metric(
        "Share of responses whose last turn ran into the token limit.", "share"
    ),
    "eval[/<suite>]/pass@<k>": Metric(
        "Probability that one of k samples is correct (Chen et al. 2021, arXiv:2107.03374).",
        "share",
    ),
    "eval[/<suite>]/maj@<k>": Metric(
        "Probability that the most frequent of k answers is correct, where answers that the grader "
        "finds equal are one; ties are broken evenly.",
        "share",
    ),
    "eval[/<suite>]/accuracy/<task>": Metric(
        "Accuracy of the rows that name one task (`task.name=mixed`).", "share"
    ),
    "eval[/<suite>]/length/<task>": Metric("Mean length of their responses.", "tokens"),
    "eval[/<suite>]/truncated/<task>": Metric(
        "Share of their responses that ran into the limit.", "share"
    ),
    "eval/average": Metric(
        "Mean of the suites' accuracies, where there are two or more; each has the same weight.",
        "share",
    ),
    "eval/average/score": Metric("Mean of the suites' scores.", ""),
    "eval/average/length": Metric("Mean of the suites' lengths.", "tokens"),
    "eval_greedy[/<suite>]/accuracy": Metric("Accuracy of greedy responses.", "share"),
    "eval_greedy[/<suite>]/accuracy_by/<verifier>": Metric(
        "The same by a verifier of `eval.verifiers`.", "share"
    ),
    "eval_greedy[/<suite>]/score": Metric("Mean score of greedy responses.", ""),
    "eval_greedy[/<suite>]/reward/<function>": Metric(
        "Mean of one reward function over greedy responses.", ""
    ),
    "eval_greedy[/<suite>]/failed": Metric("Share of greedy responses without a score.", "share"),
    "eval_greedy[/<suite>]/problems": Metric("Problems of the greedy evaluation.", "problems"),
    "eval_greedy[/<suite>]/stderr": Metric("Standard error of the greedy accuracy.", "share"),
    "eval_greedy[/<suite>]/length": Metric("Mean length of a greedy response.", "tokens"),
    "eval_greedy[/<suite>]/truncated": Metric(
        "Share of greedy responses whose last turn ran into the token limit.", "share"
    ),
    "eval_greedy[/<suite>]/accuracy/<task>": Metric(
        "Greedy accuracy of the rows that name one task (`task.name=mixed`).", "share"
    ),
    "eval_greedy[/<suite>]/length/<task>": Metric(
        "Mean length of their greedy responses.", "tokens"
    ),
    "eval_greedy[/<suite>]/truncated/<task>": Metric(
        "Share of their greedy responses that ran into the limit.", "share"
    ),
    "eval_greedy/average": Metric(
        "Mean of the suites' greedy accuracies, where there are two or more.", "share"
    ),
    "eval_greedy/average/score": Metric("Mean of the suites' greedy scores.", ""),
    "eval_greedy/average/length": Metric("Mean of the suites' greedy lengths.", "tokens"),
    # -- Time. Evaluations, exports and checkpoints run after the measurement of a step ends.
    "time/step": Metric(
        "Wall time of the step, without its evaluation, export and checkpoint.",
        "seconds",
    ),
    "time/<phase>": Metric(
        "Wall time of one phase of the step: publish, sample, grade, pack, score, teacher or "
        "update.",
        "seconds",
    ),
    "compile/programs": Metric(
        "Programs that XLA compiled during the step; 0 in a steady run.", "programs"
    ),
    "compile/seconds": Metric("Time that compiling them took.", "seconds"),
}

# The main metrics of a step, in the order of the terminal's table (`jzero.run.step_table`).
STEP_LINE: dict[str, Column] = {
    "reward/mean": Column("reward", ".3f"),
    "reward/accuracy": Column("accuracy", ".1%"),
    "sft/loss": Column("loss", ".4f"),
    "eval/loss": Column("held-out loss", ".4f"),
    "rollout/length": Column("length", ".0f"),
    "rollout/truncated": Column("cut", ".2f"),
    "policy/kl": Column("kl", ".4f"),
    "distill/kl": Column("teacher kl", ".4f"),
    "policy/mismatch": Column("mismatch", ".1e"),
    "policy/entropy": Column("entropy", ".3f"),
    "optimizer/grad_norm": Column("grad", ".3f"),
    "rollout/tokens_per_second": Column("tok/s", ".0f"),
    "update/tokens_per_second": Column("update/s", ".0f"),
    "time/step": Column("seconds", ".1f"),
}


def all_metrics() -> dict[str, Metric]:
    """Returns the definitions of all metrics, by their names."""
    of_the_loss = metrics_of_the_loss().values()
    return METRICS | {metric.name: Metric(metric.meaning, metric.unit) for metric in of_the_loss}


@functools.lru_cache(4096)
def find_metric(name: str) -> Metric | None:
    """Returns the definition of the metric `name`, or None if it is not defined."""
    if name in all_metrics():
        return all_metrics()[name]
    matching = [entry for entry in METRICS if re.fullmatch(_entry_pattern(entry), name)]
    # If several entries match, such as `reward/<function>` and `reward/mean/<task>`, the longest is
    # the most specific.
    return METRICS[max(matching, key=len)] if matching else None


def _entry_pattern(entry: str) -> str:
    """Returns an entry as a regular expression: `<word>` matches any text, `[...]` is optional."""
    pattern = re.escape(entry).replace(r"\[", "(?:").replace(r"\]", ")?")
    return re.sub("<[a-z]+>", ".+", pattern)


def nonfinite(values: Mapping[str, float]) -> list[str]:
    """Returns the names of the metrics that are infinite or NaN."""
    return [name for name, value in values.items() if not math.isfinite(value)]
