"""Questions with an answer: gsm8k, math, and any other set with columns for both. Grading is jzero.grading.verdict's."""

import functools
import random
from typing import Any, NamedTuple

from jzero.errors import UserError
from jzero.grading import extract, verdict
from jzero.tasks import problem_sets
from jzero.types import Grade, Problem

TEMPLATES, BOXED = problem_sets.TEXTS["math"], problem_sets.TEXTS["words"]["boxed"]
STOP = {"r1": ("</answer>",)}  # stop strings; other templates end with the model's own token


def problem(task: problem_sets.Settings, name: str, id: str, row: problem_sets.Row) -> Problem:
    """By task.template or, where that is none for questions, qwen_math's."""
    prompt = TEMPLATES.get(task.template, TEMPLATES["qwen_math"]).format(
        question=row.problem, boxed=BOXED
    )
    if task.template == "chat":
        prompt = [
            {"role": "system", "content": task.system_prompt or BOXED},
            {"role": "user", "content": prompt},
        ]
    return Problem(id, name, prompt, {"answer": row.answer, "question": row.problem})


class Sets(NamedTuple):
    """What is left to train on, set by set, what is held out, and what was dropped, in words."""

    train: list[list[problem_sets.Row]]
    held_out: list[problem_sets.Row]
    notes: list[str]


def sets(task: problem_sets.Settings) -> Sets:
    """Raises where there is nothing to train on, or where that is GSM8K's test split."""
    columns, levels = (task.problem_column, task.answer_column), (task.level_min, task.level_max)
    return _sets(
        task.data or problem_sets.PUBLISHED["train"][task.name],
        task.eval_data,
        columns,
        levels,
        task.verifier,
    )


@functools.cache
def _sets(
    train: str, test: str, columns: tuple[str, str], levels: tuple[int, int], verifier: str
) -> Sets:
    notes, kept = [], []
    sources = [source.strip() for source in train.split(",") if source.strip()]
    tested = (
        [test] if test else [source for source in sources if "test" in problem_sets.load(source)]
    )
    held_out = [
        row
        for source in tested
        for row in problem_sets.rows(problem_sets.load_split(source, "test"), *columns, source)
    ]
    known = {problem_sets.digest(row.problem) for row in held_out}
    for source in sources:
        rows = problem_sets.rows(
            problem_sets.of_levels(problem_sets.load_split(source, "train"), *levels, source),
            *columns,
            source,
        )
        if problem_sets.contaminated([row.problem for row in rows]):
            raise UserError(
                f"task.data={source} holds GSM8K's test questions among its {len(rows)} rows: train on the 7,473 of "
                f"its train split, {problem_sets.PUBLISHED['train']['gsm8k']}"
            )
        new = [row for row in rows if problem_sets.digest(row.problem) not in known]
        good = [row for row in new if grades_itself(row.answer, verifier)]
        lost = {"they are held out": len(rows) - len(new)}
        lost["their answer does not grade 1 against itself"] = len(new) - len(good)
        notes += [
            f"{source}: {count} problems dropped, {why}" for why, count in lost.items() if count
        ]
        if not good:
            raise UserError(
                f"task.data={source}: none of {len(rows)} problems of these levels is left to train on"
            )
        notes.append(f"{source}: {len(good)} problems")
        kept.append(good)
    return Sets(kept, held_out, notes)


def grades_itself(answer: Any, verifier: str) -> bool:
    golds = answer if isinstance(answer, list) else [answer]
    return any(
        verdict.grade(f"\\boxed{{{gold}}}", answer, template="boxed", verifier=verifier).correct
        for gold in golds
    )


def train_problems(task: problem_sets.Settings, seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step: every set is shuffled anew every epoch, several are mixed by task.weights."""
    rows = problem_sets.stream(sets(task).train, task.weights, seed)
    indices = range(step * count, (step + 1) * count)
    return [problem(task, task.name, f"{task.name}/train/{i}", rows[i]) for i in indices]


def eval_problems(task: problem_sets.Settings, count: int) -> list[Problem]:
    """At most `count` held-out problems, the same in every run."""
    rows = sets(task).held_out
    chosen = sorted(
        random.Random(problem_sets.EVAL_SEED).sample(range(len(rows)), min(count, len(rows)))
    )
    return [problem(task, task.name, f"{task.name}/eval/{i}", rows[i]) for i in chosen]


def grade(response: str, gold: Any, task: problem_sets.Settings, marked: bool = False) -> Grade:
    """Of the answer that the template asks for or, if `marked`, of what follows the last ####."""
    way = {"r1_distill_qwen": "think_boxed"}.get(task.template, task.template)
    way = "gsm8k" if marked and "####" in response else way if way in extract.TEMPLATES else "boxed"
    return verdict.grade(
        response, gold["answer"], template=way, question=gold["question"], verifier=task.verifier
    )
