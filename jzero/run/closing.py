"""What the terminal shows of a run's evaluations, and the box at its end.

eval after: accuracy 0.344 ± 0.087 (+0.219), length 21, cut 0.06

── countdown-tiny: 14 steps in 1:12 ────────────────────────────────────────
  accuracy  0.125 ± 0.085 -> 0.344 ± 0.087 (+0.219), 16 problems
  model     runs/tiny/export-14
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from jzero.run.record import RunRecord, step_of
from jzero.terminal import WIDTH, duration

# Evaluation name -> metrics, as in `RunRecord.evaluations`.
Evaluations = Mapping[str, Mapping[str, float]]

LOSS = "eval/loss"  # of held-out examples, in fine-tuning


def evaluation_lines(
    name: str,
    values: Mapping[str, float],
    before: Mapping[str, float],
) -> list[str]:
    """Returns a line for the loss and for each accuracy of the evaluation `name`.

    `before` are the metrics of the evaluation before training; the lines show the differences.
    """
    title = f"eval {name.replace('_', ' ')}"
    lines = []
    if LOSS in values:
        lines.append(f"{title}: loss {values[LOSS]:.4f}{_difference(values, before, LOSS, '.4f')}")
    for prefix in _prefixes(values):
        label = _label(prefix)
        difference = _difference(values, before, f"{prefix}/accuracy")
        parts = [f"accuracy {_with_error(values, prefix)}{difference}"]
        score = values.get(f"{prefix}/score")
        # Without rewards for the format, the score only repeats the accuracy.
        if score is not None and score != values[f"{prefix}/accuracy"]:
            parts.append(f"score {score:.3f}")
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


def closing_lines(name: str, workdir: Path, record: RunRecord, last_step: int) -> list[str]:
    """Returns the box at the end of a process: what was reached, where it is, and what is next.

    Paths and commands are never broken, so that they can be copied; they may exceed the width.
    """
    is_complete = record.step >= last_step
    steps = f"{record.step} steps" if is_complete else f"stopped after step {record.step}"
    limit = "" if is_complete else f" of {last_step}"
    title = f"\u2500\u2500 {name}: {steps}{limit} in {duration(record.seconds)} "

    rows = _results(record)
    export = workdir / f"export-{record.step}"
    if (best := _best(record, workdir)) is not None:
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


def _results(record: RunRecord) -> list[tuple[str, str]]:
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
        earlier = ""
        if f"{prefix}/accuracy" in before:
            earlier = f"{_with_error(before, prefix)} -> "
        difference = _difference(last, before, f"{prefix}/accuracy")
        problems = f"{last[f'{prefix}/problems']:,.0f} problems"
        label = f"{_label(prefix)} accuracy".strip()
        rows.append((label, f"{earlier}{_with_error(last, prefix)}{difference}, {problems}"))
    return rows


def _best(record: RunRecord, workdir: Path) -> str | None:
    """Returns the step with the best evaluation, and what is left of it; None with one evaluation.

    The first accuracy decides, or the loss where there is no accuracy.
    """
    by_step: dict[int, Mapping[str, float]] = {}
    for name, values in record.evaluations.items():
        step = step_of(name, record.step)
        if step is not None:
            by_step[step] = values
    if len(by_step) < 2:
        return None
    prefixes = _prefixes(by_step[max(by_step)])
    metric = f"{prefixes[0]}/accuracy" if prefixes else LOSS
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
    return f"step {step}, {metric.split('/')[-1]} {measured[step]:.3f}, {where}"


def _prefixes(values: Mapping[str, float]) -> list[str]:
    """Returns "eval", "eval_greedy/math500" and so on: the prefixes of the accuracies."""
    return [name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")]


def _label(prefix: str) -> str:
    """Returns the name of an accuracy: its suite, and "greedy"."""
    kind, _, suite = prefix.partition("/")
    return f"{suite} greedy".strip() if kind == "eval_greedy" else suite


def _with_error(values: Mapping[str, float], prefix: str) -> str:
    accuracy, error = values[f"{prefix}/accuracy"], values.get(f"{prefix}/stderr")
    # One problem has no standard error.
    return f"{accuracy:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _difference(
    values: Mapping[str, float],
    before: Mapping[str, float],
    name: str,
    form: str = ".3f",
) -> str:
    if name not in before:
        return ""
    return f" ({values[name] - before[name]:+{form}})"
