r"""Compares a run's metrics with a table of known faults, and names the setting that helps.

`REMARKS` is the table: a function per fault that finds it in the metrics, and the setting that
helps. A run checks its metrics after the steps 1, 3, 10 and then after every tenth step:

    doctor = Doctor(settings)
    for step, metrics, samples in ...:
        for remark in doctor.check(step, metrics, samples):
            print(remark)

    step 3, no_answer: 126 of 128 responses have no answer in \boxed{}; they end in "so it is 7.":
      set task.template, ...

Each remark is made once. `python -m jzero.watch`, `python -m jzero.report` and the summary of a run
show the same remarks, and docs/troubleshooting.md prints the table. This module imports no JAX.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jzero.algorithms import ADVANTAGES, Advantage
from jzero.errors import UserError
from jzero.fields import part_name
from jzero.files import JsonObject, split_commas
from jzero.rewards.rewards import NAMES
from jzero.rollout.rollout_metrics import short_names
from jzero.types import JsonValue

FIRST_CHECKS = (1, 3, 10)  # steps, and every tenth step after them
WINDOW = 3  # steps over which a metric is averaged, so that one odd step is no fault
TREND_STEPS = 10  # steps before a run can have lost its length or its entropy
IDLE_STEPS = 5  # steps without a change of the policy that are a fault
TAIL = 60  # characters of a response that a remark quotes
# How a response marks its answer, by the option `answer_mark` of mathematics.
MARKS = {"boxed": "\\boxed{}", "think_boxed": "\\boxed{} after </think>", "r1": "<answer> tags"}
# Rewards of jzero that are computed from the verdict of the task's grader.
VERDICT_REWARDS = {"accuracy", "length", "cosine", "open_r1_cosine"}
# Terms of the loss and of the score that differ between responses of equal rewards.
FURTHER_TERMS = (
    "kl_reward",
    "kl.coef",
    "entropy_coef",
    "ratio_penalty",
    "environment_coef",
    "cross_entropy.coef",
    "distillation.coef",
    "truncated_penalty",
    "overlong_share",
)
_BY_NAME: dict[str, Advantage] = {part_name(part): found for part, found in ADVANTAGES.items()}


@dataclass(frozen=True)
class Evidence:
    """What the checks of one step can read."""

    step: int
    first: Sequence[Mapping[str, float]]  # the metrics of the first WINDOW steps
    last: Sequence[Mapping[str, float]]  # the metrics of the last IDLE_STEPS steps, in order
    samples: Callable[[], Sequence[JsonObject]]  # reads the step's rows of samples.jsonl
    settings: Mapping[str, JsonValue]  # such as {"rollout.max_new_tokens": 1024}

    def mean(self, name: str, steps: int = WINDOW) -> float | None:
        """Returns the mean of a metric over the last steps that have it; None if none has it."""
        values = [row[name] for row in self.last[-steps:] if name in row]
        return float(np.mean(values)) if values else None

    def first_mean(self, name: str) -> float | None:
        """Returns the mean of a metric over the first steps; None if none has it."""
        values = [row[name] for row in self.first if name in row]
        return float(np.mean(values)) if values else None

    def above(self, name: str, limit: float) -> float | None:
        """Returns the mean of a metric over the last steps if it is above `limit`."""
        value = self.mean(name)
        return value if value is not None and value > limit else None

    def has_steps(self, count: int) -> bool:
        """Returns whether the run has had that many steps."""
        return self.step >= count

    def number(self, name: str) -> float:
        """Returns a setting that is a number; 0 for a setting of another version of jzero."""
        value = self.settings.get(name, 0)
        return float(value) if isinstance(value, int | float) else 0.0

    def text(self, name: str) -> str:
        """Returns a setting that is text; "" for a setting of another version of jzero."""
        value = self.settings.get(name, "")
        return value if isinstance(value, str) else ""

    def option(self, name: str) -> str:
        """Returns an option of the task as text; "" without the option."""
        options = self.settings.get("task.options", ())
        texts = list(map(str, options)) if isinstance(options, list | tuple) else []
        found = [text for text in texts if text.startswith(f"{name}=")]
        return found[-1].removeprefix(f"{name}=") if found else ""

    def responses(self) -> float:
        """Returns the number of responses that were sampled in the last step."""
        rounds = self.mean("rollout/rounds", 1) or 1
        return rounds * self.number("rollout.num_prompts") * self.number("rollout.group_size")

    def turns(self) -> float:
        """Returns the number of turns that were sampled, and graded, in the last step."""
        return self.responses() * (self.mean("turns/mean", 1) or 1.0)

    # What the algorithm and the task use.

    def rewards_success(self) -> bool:
        """Returns whether turns are paid for their verdict, whatever the reward functions return.

        AReaL's rule replaces the score of each turn of a task with several turns.
        """
        has_turns = self.number("rollout.max_turns") > 1
        return has_turns and self.text("task.turn_reward.kind") == "success"

    def functions(self) -> list[str]:
        """Returns the functions of task.reward.functions that have a part in the reward."""
        if self.rewards_success():
            return []
        names = self.settings.get("task.reward.functions", ())
        functions = list(map(str, names)) if isinstance(names, list | tuple) else []
        weights = self.settings.get("task.reward.weights", ())
        if not isinstance(weights, list | tuple) or len(weights) != len(functions):
            return functions
        return [name for name, weight in zip(functions, weights, strict=True) if weight]

    def uses_verdict(self) -> bool:
        """Returns whether the verdict of the task's grader has a part in what is trained."""
        if self.rewards_success() or self.text("algorithm.cross_entropy.tokens") == "correct":
            return True
        # A run of another version of jzero may not have the setting.
        names = {name.partition("(")[0] for name in self.functions()} or {"accuracy"}
        return bool(names & VERDICT_REWARDS)

    def has_users_reward(self) -> bool:
        """Returns whether a user-defined function, or a judge, has a part in the reward."""
        names = [name.partition("(")[0] for name in self.functions()]
        return any(name not in NAMES or name == "judge" for name in names)

    def learns_from_groups_only(self) -> bool:
        """Returns whether groups of equal scores give no gradient at all.

        A critic, the return of a turn, rewards that are normalized one by one, penalties, a
        teacher and further terms of the loss give one.
        """
        advantage = _BY_NAME.get(self.text("algorithm.advantage.kind"))
        if advantage is not None and not advantage.has_group_baseline:
            return False
        if advantage is not None and advantage.needs_parts and len(self.functions()) > 1:
            return False
        return not any(self.number(f"algorithm.{name}") for name in FURTHER_TERMS)


@dataclass(frozen=True)
class Remark:
    """A known fault: how it is found, and what helps."""

    symptom: str  # the condition, for the documentation
    advice: str  # starts with a verb, names settings
    find: Callable[[Evidence], str | None]  # returns a sentence with numbers, or None
    # Returns the advice for a run, where it depends on the run; None if it never does.
    adapt: Callable[[Evidence], str] | None = None


# -- Finding a fault in the metrics ----------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _quoted_tail(text: str) -> str:
    """Returns the end of a response on one line, without control characters."""
    # Four times as much, because joining white space shortens the text.
    words = " ".join(text[-4 * TAIL :].split())
    return "".join(c if c.isprintable() else "\ufffd" for c in words)[-TAIL:]


def _no_answer(evidence: Evidence) -> str | None:
    without, total = evidence.mean("grade/no_answer", 1), evidence.turns()
    if without is None or not total or not evidence.uses_verdict():
        return None
    if evidence.number("rollout.placement.max_staleness"):
        # A step may grade the episodes of later steps, above all the first one.
        if not evidence.has_steps(WINDOW):
            return None
        without = min(row.get("grade/no_answer", 0.0) for row in evidence.last[-WINDOW:])
    if without < 0.9 * total:
        return None
    # A response that is cut has no answer yet: that is the remark `truncated`.
    if _truncated(evidence):
        return None
    mark = evidence.option("answer_mark") or evidence.text("task.template")
    place = f" in {MARKS[mark]}" if mark in MARKS else ""
    kind = "turns" if total > evidence.responses() else "responses"
    sentence = f"{min(without, total):,.0f} of {total:,.0f} {kind} have no answer{place}"
    tails = [row for row in evidence.samples() if row.get("reason") == "no answer"]
    if tails:
        sentence += f'; they end in "{_quoted_tail(str(tails[0].get("response", "")))}"'
    return sentence


def _answer_advice(evidence: Evidence) -> str:
    """Returns how responses of the run's task come to have an answer."""
    mathematics = {"math", "gsm8k", "math_multiturn", "mixed"}
    task = evidence.text("task.name")
    if task in mathematics or not task:
        return REMARKS["no_answer"].advice
    forms = {
        "code": "The answer is the last block of Python.",
        "countdown": "The answer is an equation; `task.template` sets where it is.",
        "environment": "The environment decides what an answer is.",
    }
    form = forms.get(task, "The answer has to have the form that the prompt asks for.")
    return f"Read the responses. {form} Show it in the prompt, or teach it with `warm_start.steps`."


def _no_score(evidence: Evidence) -> str | None:
    share = evidence.above("reward/failed", 0.05)
    if share is None:
        return None
    return f"{_percent(share)} of the responses have no score: a reward function failed on them"


def _reward_none(evidence: Evidence) -> str | None:
    functions = evidence.settings.get("task.reward.functions", ())
    if not isinstance(functions, list | tuple) or not evidence.last:
        return None
    for name in map(str, functions):
        # A metric has the function's folder only if two names of a step are equal without it.
        # reward/accuracy is the grader's verdict, and exists without the function.
        metrics = {f"reward/{short_names([name])[name]}", f"reward/{name.replace(':', '.')}"}
        if name != "accuracy" and not any(metrics & row.keys() for row in evidence.last[-WINDOW:]):
            return f"the reward function {name} has returned None for every response"
    return None


def _is_uniform(evidence: Evidence) -> bool:
    """Returns whether no group of the last three steps, of at least 8 groups, has two scores."""
    steps = evidence.last[-WINDOW:]
    # A group of one response is always uniform, and all groups of one step may be by chance.
    if evidence.number("rollout.group_size") < 2 or not evidence.has_steps(WINDOW):
        return False
    shares = [row.get("reward/zero_variance_groups", 0.0) for row in steps]
    num_groups = len(steps) * evidence.number("rollout.num_prompts")
    # A few groups may be uniform by chance.
    return num_groups >= 8 and min(shares, default=0.0) > 0.999


def _constant_reward(evidence: Evidence) -> str | None:
    # Only a user-defined function can be mended. Other rewards are equal where all are wrong.
    if not evidence.has_users_reward():
        return None
    means = [row.get("reward/mean", 0.0) for row in evidence.last[-WINDOW:]]
    # A reward of 0 says that no response is right, which is another fault; with the reward of all
    # correct answers, the problems are too easy.
    is_verdict = (evidence.mean("reward/accuracy") or 0.0) > 0.99
    if not _is_uniform(evidence) or np.ptp(means) > 1e-9 or not means[0] or is_verdict:
        return None
    return f"every response has the reward {means[0]:.3g}, whatever it says"


def _one_score(evidence: Evidence) -> str | None:
    if not _is_uniform(evidence) or not evidence.learns_from_groups_only():
        return None
    # Other remarks name a cause of uniform groups, so this one would repeat them.
    if _constant_reward(evidence) or _no_answer(evidence) or _truncated(evidence):
        return None
    accuracy = evidence.mean("reward/accuracy") or 0.0
    # Turns are compared with each other: episodes of equal sums may differ in their turns.
    if (evidence.mean("turns/mean") or 1.0) > 1 and accuracy > 0:
        return None
    reason = "too easy" if accuracy > 0.5 else "too hard, or no answer is recognized"
    return (
        f"no group has two different scores, so nothing is learned: accuracy {_percent(accuracy)}, "
        f"the problems are {reason}"
    )


def _truncated(evidence: Evidence) -> str | None:
    share = evidence.above("rollout/truncated", 0.5)
    if share is None:
        return None
    limit = evidence.number("rollout.max_new_tokens")
    sentence = f"{_percent(share)} of the responses are cut at {limit:.0f} tokens"
    rule = evidence.text("algorithm.truncated.kind")
    if rule in ("fixed", "ignore"):
        score = evidence.number("algorithm.truncated.score")
        sentence += f"; algorithm.truncated={rule} gives them the score {score:g}"
    return sentence


def _truncated_advice(evidence: Evidence) -> str:
    """Returns what helps against cut responses, without a rule that the run has already."""
    if evidence.text("algorithm.truncated.kind") == "grade":
        return REMARKS["truncated"].advice
    return "Raise `rollout.max_new_tokens`."


def _has_improved(evidence: Evidence) -> bool:
    last, first = evidence.mean("reward/mean"), evidence.first_mean("reward/mean")
    return last is not None and first is not None and last > first


def _length_collapse(evidence: Evidence) -> str | None:
    last, first = evidence.mean("rollout/length"), evidence.first_mean("rollout/length")
    is_short = last is not None and first is not None and last < 0.3 * first
    if not evidence.has_steps(TREND_STEPS) or not is_short or _has_improved(evidence):
        return None
    return f"responses have become shorter, from {first:.0f} to {last:.0f} tokens, and not better"


def _entropy_collapse(evidence: Evidence) -> str | None:
    last, first = evidence.mean("policy/entropy"), evidence.first_mean("policy/entropy")
    if last is None or first is None or not evidence.has_steps(TREND_STEPS):
        return None
    # A policy that solves its task is certain, too.
    is_solved = (evidence.mean("reward/accuracy") or 0.0) > 0.9
    if not evidence.uses_verdict():
        is_solved = _has_improved(evidence)
    if last > 0.1 * first or last > 0.05 or is_solved:
        return None
    return f"the entropy has fallen from {first:.3g} to {last:.2g} nats: the policy repeats itself"


def _mismatch(evidence: Evidence) -> str | None:
    # On a real model 8-bit weights alone cause a mismatch of 0.05 (int8) or 0.11 (lab/int8.md).
    precisions = (evidence.text("rollout.weights"), evidence.text("rollout.kv_dtype"))
    has_8_bits = not {"int8", "fp8"}.isdisjoint(precisions)
    value = evidence.above("policy/mismatch", 0.2 if has_8_bits else 0.05)
    if value is None:
        return None
    return f"the log-probs of sampler and trainer differ by {value:.2g} nats a token"


def _kl(evidence: Evidence) -> str | None:
    value = evidence.above("policy/kl", 1.0)
    if value is None:
        return None
    return f"the policy is {value:.3g} nats a token away from its reference"


def _padding(evidence: Evidence) -> str | None:
    padding, left_out = evidence.mean("update/padding"), evidence.mean("update/left_out") or 0.0
    if padding is None or left_out >= 1:
        return None
    # The rows of sequences that are left out are empty as well, whatever train.pack is.
    share = 1 - (1 - padding) / (1 - left_out)
    update, step = evidence.mean("time/update"), evidence.mean("time/step")
    # Padding of a short update costs next to nothing.
    is_slow = update is not None and step is not None and update > 0.25 * step
    if share < 0.85 or not is_slow or not evidence.has_steps(WINDOW):
        return None
    return f"{_percent(padding)} of the rows of an update are padding"


def _nothing_trained(evidence: Evidence) -> str | None:
    steps = evidence.last[-IDLE_STEPS:]
    if len(steps) < IDLE_STEPS or not any("update/left_out" in row for row in steps):
        return None
    for row in steps:
        has_gradient = row.get("optimizer/grad_norm", 0.0) > 0
        if has_gradient and row.get("optimizer/skipped", 0.0) < 1:
            return None
    cause = "every gradient is 0"
    if any(row.get("optimizer/skipped", 0.0) >= 1 for row in steps):
        skip_norm = evidence.number("optimizer.skip_norm")
        cause = f"every gradient is 0 or exceeds optimizer.skip_norm={skip_norm:g}"
    return f"nothing was trained in the last {IDLE_STEPS} steps: {cause}"


def _sampler_idle(evidence: Evidence) -> str | None:
    used = evidence.mean("rollout/slot_utilization")
    sample, step = evidence.mean("time/sample"), evidence.mean("time/step")
    if used is None or sample is None or step is None or not evidence.has_steps(WINDOW):
        return None
    if used > 0.15 or step <= 0 or sample < 0.5 * step:
        return None
    return (
        f"the decoder uses {_percent(used)} of its slots, and sampling takes "
        f"{_percent(sample / step)} of a step"
    )


def _grading_slow(evidence: Evidence) -> str | None:
    grade, step = evidence.mean("time/grade"), evidence.mean("time/step")
    # In a step of a few seconds a large share is still a short wait.
    if grade is None or step is None or grade < 5 or grade < 0.3 * step:
        return None
    return f"sampling waits {grade:.0f} of {step:.0f} seconds of a step for the graders"


def _preempted(evidence: Evidence) -> str | None:
    count, total = evidence.mean("rollout/preempted"), evidence.responses()
    if count is None or not total or count < 0.25 * total:
        return None
    return f"{count:.0f} of {total:.0f} sequences gave up their KV pages and are prefilled again"


def _compiling(evidence: Evidence) -> str | None:
    steps = evidence.last[-WINDOW:]
    compiling = sum(row.get("compile/seconds", 0.0) for row in steps)
    total = sum(row.get("time/step", 0.0) for row in steps)
    # Every run compiles in its first steps.
    if not evidence.has_steps(TREND_STEPS) or compiling < 0.3 * total or not total:
        return None
    # A length that comes up for the first time compiles once.
    if sum(row.get("compile/seconds", 0.0) > 0 for row in steps) < WINDOW - 1:
        return None
    return f"after {evidence.step} steps, {_percent(compiling / total)} of a step is compilation"


# One row for each fault. A name is a value of `train.stop_on`.
REMARKS: dict[str, Remark] = {
    "no_answer": Remark(
        "`grade/no_answer` is at least 90 % of the turns, the task's verdict has a part in the "
        "reward, and few responses are cut.",
        "Read the responses. Base models need `task.template=qwen_math` or `r1`; "
        "`task.options=answer_mark=...` sets where the answer is.",
        _no_answer,
        _answer_advice,
    ),
    "no_score": Remark(
        "`reward/failed` is above 5 %.",
        "Fix the function: the terminal shows the first traceback of each kind. A slow one needs "
        "a larger `task.reward.seconds`.",
        _no_score,
    ),
    "reward_none": Remark(
        "A function of `task.reward.functions` has returned no number.",
        "Return a number, or take the function out of `task.reward.functions`.",
        _reward_none,
    ),
    "constant_reward": Remark(
        "`reward/mean` is the same in three steps, `reward/zero_variance_groups` is 1, and a "
        "user-defined function has a part in the reward.",
        "Fix the function in `task.reward.functions`: a reward has to differ between better and "
        "worse responses.",
        _constant_reward,
    ),
    "one_score": Remark(
        "`reward/zero_variance_groups` is 1 for three steps, no group has two different scores, "
        "and the algorithm learns from differences within groups only.",
        "Filter the problems with `python -m jzero.filter`, choose them with `task.data.level_min` "
        "and `task.data.level_max`, raise `rollout.group_size`, or set "
        "`algorithm.dynamic_sampling_rounds`.",
        _one_score,
    ),
    "truncated": Remark(
        "`rollout/truncated` is above 50 %.",
        "Raise `rollout.max_new_tokens`. Or penalize long responses with "
        "`algorithm.overlong_share`, or exclude them with `algorithm.truncated=mask`.",
        _truncated,
        _truncated_advice,
    ),
    "length_collapse": Remark(
        "`rollout/length` falls below 30 % of its first value, and `reward/mean` has not risen.",
        "Lower `optimizer.lr`, or look for a reward that short responses get for nothing.",
        _length_collapse,
    ),
    "entropy_collapse": Remark(
        "`policy/entropy` falls below 0.05 nats and a tenth of its first value, before the "
        "problems are solved.",
        "Lower `optimizer.lr`, set `algorithm.surrogate.high=0.28`, or set "
        "`algorithm.entropy_coef`.",
        _entropy_collapse,
    ),
    "mismatch": Remark(
        "`policy/mismatch` is above 0.05, or above 0.2 with a sampler in 8 bits.",
        "Set `model.dtype=float32` and `rollout.kv_dtype=float32`, or correct the difference with "
        "`algorithm.correction=token_truncate`. An MoE model needs `rollout.routing_replay=True`.",
        _mismatch,
    ),
    "kl": Remark(
        "`policy/kl` is above 1 nat.",
        "Lower `optimizer.lr`, or raise `algorithm.kl.coef`.",
        _kl,
    ),
    "nothing_trained": Remark(
        "`optimizer/grad_norm` is 0, or `optimizer/skipped` is 1, in five steps.",
        "Read the remarks about rewards first. Raise `optimizer.skip_norm` if steps are skipped.",
        _nothing_trained,
    ),
    "padding": Remark(
        "`update/padding` is above 85 %, also without the sequences of `update/left_out`, and "
        "`time/update` is above a quarter of a step.",
        "Choose `train.pack` by `python -m jzero.plan --packs WORKDIR`, or lower "
        "`train.microbatch_tokens`.",
        _padding,
    ),
    "sampler_idle": Remark(
        "`rollout/slot_utilization` is below 15 %, and `time/sample` is above half of a step.",
        "Set `rollout.placement.max_staleness=1`, or lower `rollout.num_slots`.",
        _sampler_idle,
    ),
    "grading_slow": Remark(
        "`time/grade` is above 5 seconds and 30 % of a step.",
        "Raise `task.grade_workers`, or set `task.verifier=fast`.",
        _grading_slow,
    ),
    "preempted": Remark(
        "`rollout/preempted` is above a quarter of the responses.",
        "Lower `rollout.num_slots`, raise `rollout.num_pages`, or set `rollout.kv_dtype=int8`.",
        _preempted,
    ),
    "compiling": Remark(
        "`compile/seconds` is above 30 % of three steps, two of which compile, after ten steps.",
        "Raise `train.microbatch_tokens`, or set `train.pack=longest`, so that shapes repeat.",
        _compiling,
    ),
}


# -- The doctor of one run -------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A remark about one run."""

    step: int
    name: str  # a key of REMARKS
    sentence: str
    advice: str  # what helps, as plain text

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}: {self.sentence}.\n  {self.advice}"

    def to_json(self) -> JsonObject:
        return {
            "step": self.step,
            "name": self.name,
            "sentence": self.sentence,
            "advice": self.advice,
        }


@dataclass
class Doctor:
    """Collects the metrics of a run's steps in order, and makes each remark once."""

    settings: Mapping[str, JsonValue]  # of the run, as `config.flatten` returns them
    findings: list[Finding] = field(default_factory=list)
    _first: list[Mapping[str, float]] = field(default_factory=list)
    # The longest window of any remark.
    _last: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=IDLE_STEPS))

    def check(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Callable[[], Sequence[JsonObject]] = list,
        *,
        is_last: bool = False,
    ) -> list[Finding]:
        """Adds the metrics of a step, and returns the new remarks.

        `samples` returns the step's rows of samples.jsonl. `is_last` checks the step in any case.
        """
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._last.append(metrics)
        if not is_last and step not in FIRST_CHECKS and step % FIRST_CHECKS[-1]:
            return []

        evidence = Evidence(step, self._first, list(self._last), samples, self.settings)
        known = {finding.name for finding in self.findings}
        new = []
        for name, remark in REMARKS.items():
            if name not in known and (sentence := remark.find(evidence)):
                advice = remark.adapt(evidence) if remark.adapt else remark.advice
                new.append(Finding(step, name, sentence, advice.replace("`", "")))
        self.findings += new
        return new


def stop_names(stop_on: str) -> list[str]:
    """Returns the remarks in the setting `train.stop_on`. Raises UserError for an unknown name."""
    names = split_commas(stop_on)
    for name in names:
        if name not in REMARKS:
            raise UserError(
                f"train.stop_on={stop_on}: there is no remark {name}; choose from "
                f"{', '.join(REMARKS)}"
            )
    return names


def markdown_table() -> str:
    """Returns the table of docs/troubleshooting.md."""
    lines = ["| remark | appears when | what helps |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.symptom} | {row.advice} |" for name, row in REMARKS.items()]
    return "\n".join(lines)
