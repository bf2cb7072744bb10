"""What the terminal shows of a run's evaluations, and the box at its end.

eval after: accuracy 34.4 ± 8.5 % (+21.9), length 21, cut 0.06

── countdown-tiny: 14 steps in 1:12 ────────────────────────────────────────
  accuracy  12.5 ± 5.9 % -> 34.4 ± 8.5 % (+21.9), 32 problems
  model     runs/tiny/export-14
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from jzero.errors import counted
from jzero.run.accuracy import accuracy_text, points
from jzero.run.record import RunRecord, step_of
from jzero.terminal import WIDTH, duration

# Evaluation name -> metrics, as in `RunRecord.evaluations`.
Evaluations = Mapping[str, Mapping[str, float]]

LOSS = "eval/loss"  # of held-out examples, in fine-tuning


def evaluation_lines(
    name: str,
    values: Mapping[str, float],
    before: Mapping[str, float],
    *,
    has_answers: bool = True,
) -> list[str]:
    """Returns a line for the loss and for each problem set of the evaluation `name`.

    before: the metrics of the evaluation before training; the lines show the differences.
    has_answers: False if only user-defined rewards score the problems of the task.
    """
    title = f"eval {name.replace('_', ' ')}"
    lines = []
    if LOSS in values:
        lines.append(f"{title}: loss {values[LOSS]:.4f}{_difference(values, before, LOSS, '.4f')}")
    for prefix in _prefixes(values):
        label = _label(prefix)
        parts = []
        if _has_accuracy(values, prefix, has_answers):
            gain = _gain(values, before, prefix)
            parts.append(f"accuracy {_accuracy(values, prefix)}{gain}")
        if _has_score(values, prefix):
            difference = _difference(values, before, f"{prefix}/score", ".3f")
            parts.append(f"score {values[f'{prefix}/score']:.3f}{difference}")
        parts.append(f"length {values[f'{prefix}/length']:,.0f}")
        parts.append(f"cut {values[f'{prefix}/truncated']:.2f}")
        first = f"{title}, {label}: " if label else f"{title}: "
        lines += _wrapped(first, parts)
    return lines


def _wrapped(first: str, parts: list[str]) -> list[str]:
    """Returns `first` and the parts, with commas, on a line, or on more lines if it has no room."""
    lines = [first + parts[0]]
    for part in parts[1:]:
        if len(f"{lines[-1]}, {part}") <= WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(f"  {part}")
    return lines


def closing_lines(
    name: str,
    workdir: Path,
    record: RunRecord,
    last_step: int,
    *,
    has_answers: bool = True,
) -> list[str]:
    """Returns the box at the end of a process: what was reached, where it is, and what is next.

    has_answers: as in `evaluation_lines`.

    Paths and commands are never broken, so that they can be copied; they may exceed the width.
    """
    is_complete = record.step >= last_step
    steps = f"{record.step} steps" if is_complete else f"stopped after step {record.step}"
    limit = "" if is_complete else f" of {last_step}"
    title = f"\u2500\u2500 {name}: {steps}{limit} in {duration(record.seconds)} "

    rows = _results(record, has_answers)
    export = workdir / f"export-{record.step}"
    if (best := _best(record, workdir, has_answers)) is not None:
        rows.append(("best", best))
    if export.is_dir():
        rows.append(("model", str(export)))
    rows.append(("metrics", str(workdir / "metrics.jsonl")))
    # Fine-tuning samples nothing.
    if (workdir / "samples.jsonl").exists() and (workdir / "samples.jsonl").stat().st_size:
        rows.append(("samples", str(workdir / "samples.jsonl")))
    run = shlex.quote(str(workdir))
    rows.append(("watch", f"jzero watch {run}"))
    if not is_complete:
        rows.append(("continue", "the same command continues from the last checkpoint"))
    elif export.is_dir():
        rows.append(("chat", f"jzero chat {run}"))

    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in rows]
    return [title.ljust(WIDTH, "\u2500"), *lines, "\u2500" * WIDTH]


def _results(record: RunRecord, has_answers: bool) -> list[tuple[str, str]]:
    """Returns a row for each measure of the last evaluation, with its value before training."""
    evaluations = record.evaluations
    if not evaluations:
        return []
    last_name, last = list(evaluations.items())[-1]
    before = evaluations.get("before", {}) if last_name != "before" else {}
    rows = []
    if LOSS in last:
        earlier = f"{before[LOSS]:.4f} -> " if LOSS in before else ""
        difference = _difference(last, before, LOSS, ".4f")
        rows.append(("loss", f"{earlier}{last[LOSS]:.4f}{difference}"))
    for prefix in _prefixes(last):
        problems = f", {counted(last[f'{prefix}/problems'], 'problem')}"
        if _has_accuracy(last, prefix, has_answers):
            earlier = ""
            if f"{prefix}/accuracy" in before:
                earlier = f"{_accuracy(before, prefix)} -> "
            text = f"{earlier}{_accuracy(last, prefix)}{_gain(last, before, prefix)}{problems}"
            rows.append((f"{_label(prefix)} accuracy".strip(), text))
            problems = ""
        if _has_score(last, prefix):
            score = f"{prefix}/score"
            earlier = f"{before[score]:.3f} -> " if score in before else ""
            difference = _difference(last, before, score, ".3f")
            text = f"{earlier}{last[score]:.3f}{difference}{problems}"
            rows.append((f"{_label(prefix)} score".strip(), text))
    return rows


def _best(record: RunRecord, workdir: Path, has_answers: bool) -> str | None:
    """Returns the step with the best evaluation, and what is left of it; None with one evaluation.

    The first accuracy decides; without answers the score, and without samples the loss.
    """
    by_step: dict[int, Mapping[str, float]] = {}
    for name, values in record.evaluations.items():
        step = step_of(name, record.step)
        if step is not None:
            by_step[step] = values
    if len(by_step) < 2:
        return None
    last = by_step[max(by_step)]
    prefixes = _prefixes(last)
    metric, form = LOSS, ".4f"
    if prefixes and _has_accuracy(last, prefixes[0], has_answers):
        metric, form = f"{prefixes[0]}/accuracy", ".1%"
    elif prefixes:
        metric, form = f"{prefixes[0]}/score", ".3f"
    measured = {step: values[metric] for step, values in by_step.items() if metric in values}
    if not measured:
        return None
    sign = -1 if metric == LOSS else 1
    # Of equal evaluations the later step counts.
    step = max(measured, key=lambda step: (sign * measured[step], step))
    # An export can be loaded at once; a checkpoint has to be exported first.
    for place in (f"export-{step}", f"checkpoints/{step}"):
        if (workdir / place).is_dir():
            where = f"in {place}"
            break
    else:
        where = "not kept: train.keep_checkpoints=0 keeps all"
    value = format(measured[step], form).replace("%", " %")
    return f"step {step}, {metric.split('/')[-1]} {value}, {where}"


def _prefixes(values: Mapping[str, float]) -> list[str]:
    """Returns "eval", "eval_greedy/math500" and so on: the prefixes of the accuracies."""
    return [name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")]


def _label(prefix: str) -> str:
    """Returns the name of an accuracy: its suite, and "greedy"."""
    kind, _, suite = prefix.partition("/")
    return f"{suite} greedy".strip() if kind == "eval_greedy" else suite


def _has_accuracy(values: Mapping[str, float], prefix: str, has_answers: bool) -> bool:
    """Returns whether the accuracy of a problem set means anything.

    Suites have answers even if the problems of the task have none.
    """
    return has_answers or "/" in prefix or f"{prefix}/score" not in values


def _has_score(values: Mapping[str, float], prefix: str) -> bool:
    """Returns whether there is a score that does not only repeat the accuracy."""
    score = values.get(f"{prefix}/score")
    if score is None:
        return False
    has_rewards = any(name.startswith(f"{prefix}/reward/") for name in values)
    return has_rewards or score != values[f"{prefix}/accuracy"]


def _accuracy(values: Mapping[str, float], prefix: str) -> str:
    return accuracy_text(
        values[f"{prefix}/accuracy"],
        values.get(f"{prefix}/problems"),
        values.get(f"{prefix}/stderr"),
    )


def _gain(values: Mapping[str, float], before: Mapping[str, float], prefix: str) -> str:
    """Returns the gain of the accuracy, or "" without an earlier one.

    It is " (+21.9)" between two percentages and " (+2)" between two counts.
    """
    name = f"{prefix}/accuracy"
    if name not in before:
        return ""
    gain = values[name] - before[name]
    has_percent = [_accuracy(row, prefix).endswith("%") for row in (before, values)]
    if all(has_percent):
        return f" ({100 * gain:+.1f})"
    if any(has_percent):
        return f" ({points(gain)})"
    return f" ({round(gain * values[f'{prefix}/problems']):+,})"


def _difference(
    values: Mapping[str, float],
    before: Mapping[str, float],
    name: str,
    form: str,
) -> str:
    if name not in before:
        return ""
    return f" ({values[name] - before[name]:+{form}})"
