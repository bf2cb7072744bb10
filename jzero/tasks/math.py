"""Questions with an answer: gsm8k, math, and any other set with columns for both. Grading is jzero.grade.math's."""

import functools
import random
from typing import Any, NamedTuple

from jzero.grade import math
from jzero.tasks import data
from jzero.types import Grade, Problem

TEMPLATES, BOXED = data.TEXTS["math"], data.TEXTS["words"]["boxed"]
STOP = {"r1": ("</answer>",)}  # stop strings; other templates end with the model's own token


def problem(task: data.Settings, name: str, id: str, row: data.Row) -> Problem:
    """By task.template or, where that is none for questions, qwen_math's."""
    prompt = TEMPLATES.get(task.template, TEMPLATES["qwen_math"]).format(question=row.problem, boxed=BOXED)
    if task.template == "chat":
        prompt = [{"role": "system", "content": task.system or BOXED}, {"role": "user", "content": prompt}]
    return Problem(id, name, prompt, {"answer": row.answer, "question": row.problem})


class Sets(NamedTuple):
    """What is left to train on, set by set, what is held out, and what was dropped, in words."""

    train: list[list[data.Row]]
    held_out: list[data.Row]
    notes: list[str]


def sets(task: data.Settings) -> Sets:
    """Raises where there is nothing to train on, or where that is GSM8K's test split."""
    columns, levels = (task.problem_column, task.answer_column), (task.level_min, task.level_max)
    return _sets(task.data or data.PUBLISHED["train"][task.name], task.eval_data, columns, levels, task.verifier)


@functools.cache
def _sets(train: str, test: str, columns: tuple[str, str], levels: tuple[int, int], verifier: str) -> Sets:
    notes, kept = [], []
    sources = [source.strip() for source in train.split(",") if source.strip()]
    tested = [test] if test else [source for source in sources if "test" in data.load(source)]
    held_out = [row for source in tested for row in data.rows(data.split(source, "test"), *columns, source)]
    known = {data.digest(row.problem) for row in held_out}
    for source in sources:
        rows = data.rows(data.of_levels(data.split(source, "train"), *levels, source), *columns, source)
        if data.contaminated([row.problem for row in rows]):
            raise ValueError(
                f"task.data={source} holds GSM8K's test questions among its {len(rows)} rows: train on the 7,473 of "
                f"its train split, {data.PUBLISHED['train']['gsm8k']}"
            )
        new = [row for row in rows if data.digest(row.problem) not in known]
        good = [row for row in new if grades_itself(row.answer, verifier)]
        lost = {"they are held out": len(rows) - len(new)}
        lost["their answer does not grade 1 against itself"] = len(new) - len(good)
        notes += [f"{source}: {count} problems dropped, {why}" for why, count in lost.items() if count]
        if not good:
            raise ValueError(f"task.data={source}: none of {len(rows)} problems of these levels is left to train on")
        notes.append(f"{source}: {len(good)} problems")
        kept.append(good)
    return Sets(kept, held_out, notes)


def grades_itself(answer: Any, verifier: str) -> bool:
    golds = answer if isinstance(answer, list) else [answer]
    return any(math.grade(f"\\boxed{{{gold}}}", answer, template="boxed", verifier=verifier).correct for gold in golds)


def train_problems(task: data.Settings, seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step: every set is shuffled anew every epoch, several are mixed by task.weights."""
    rows = data.stream(sets(task).train, task.weights, seed)
    indices = range(step * count, (step + 1) * count)
    return [problem(task, task.name, f"{task.name}/train/{i}", rows[i]) for i in indices]


def eval_problems(task: data.Settings, count: int) -> list[Problem]:
    """At most `count` held-out problems, the same in every run."""
    rows = sets(task).held_out
    chosen = sorted(random.Random(data.EVAL_SEED).sample(range(len(rows)), min(count, len(rows))))
    return [problem(task, task.name, f"{task.name}/eval/{i}", rows[i]) for i in chosen]


def grade(response: str, gold: Any, task: data.Settings, marked: bool = False) -> Grade:
    """Of the answer that the template asks for or, if `marked`, of what follows the last ####."""
    way = {"r1_distill_qwen": "think_boxed"}.get(task.template, task.template)
    way = "gsm8k" if marked and "####" in response else way if way in math.TEMPLATES else "boxed"
    return math.grade(response, gold["answer"], template=way, question=gold["question"], verifier=task.verifier)
